"""What the user has put in place of one unit's collectives.

It keeps the objects alive and writes their names into the unit's configuration; it must not know when a collective
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..collectives import AllGather, Comm, Hook, ReduceScatter, communicators, register
from ..collectives.backend import process_group

# Fields of UnitConfig.
_FIELDS: dict[type, str] = {AllGather: "all_gather_comm", ReduceScatter: "reduce_scatter_comm", Hook: "reduce_hook"}


class CustomComms:
    """One unit's communicators and hook on reduced gradients; ``configure`` changes fields of its UnitConfig."""

    def __init__(self, configure: Callable[..., None]) -> None:
        self._configure = configure
        self._used: dict[type, Comm | Hook] = {}

    def use(self, kind: type, custom: Comm | Hook) -> None:
        """Use ``custom`` as the unit's AllGather, ReduceScatter or Hook.

        Raises:
            TypeError: ``custom`` is of another kind.
        """
        if not isinstance(custom, kind):
            raise TypeError(f"comm: expected an {kind.__name__}, got {custom!r} of {type(custom).__name__}")
        self._used[kind] = custom
        self._configure(**{_FIELDS[kind]: register(custom)})

    def use_process_group_memory(self, groups: Iterable[str], device: torch.device, unit: str) -> None:
        """Take buffers from the process groups of these names."""
        for name in groups:
            self._require_none("set_allocate_memory_from_process_group_for_comm", unit)
            group = process_group(name)
            self.use(AllGather, communicators.ProcessGroupAllGather(group, device))
            self.use(ReduceScatter, communicators.ProcessGroupReduceScatter(group, device))

    def leave_process_group_memory(self) -> None:
        """Take buffers from PyTorch again."""
        for kind in (AllGather, ReduceScatter):
            if isinstance(self._used.get(kind), communicators.ProcessGroupMemory):
                del self._used[kind]
                self._configure(**{_FIELDS[kind]: ""})

    def use_symmetric_memory(self, groups: Iterable[str], device: torch.device, backend: str, unit: str) -> None:
        """All-gather over the process groups of these names through symmetric memory, which units share."""
        self._require_none("set_symm_mem_for_comm", unit)
        self.use(AllGather, communicators.symmetric_all_gather(device, backend, tuple(groups)))

    def _require_none(self, method: str, unit: str) -> None:
        allowed = (communicators.ProcessGroupMemory, communicators.SymmetricMemory, Hook)
        for comm in self._used.values():
            if not isinstance(comm, allowed):
                raise ValueError(f"{method}: {unit} has a communicator of its own, {comm!r}; leave it to that")
