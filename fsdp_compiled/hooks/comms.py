"""What the user has put in place of one unit's collectives.

It keeps the objects alive and writes their names into the unit's configuration; it must not know when a collective
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..collectives import AllGather, Comm, Hook, ReduceScatter, communicators, register
from ..collectives.backend import process_group

_FIELDS: dict[type, str] = {AllGather: "all_gather_comm", ReduceScatter: "reduce_scatter_comm"}  # of UnitConfig


class CustomComms:
    """One unit's communicators and reduce hook.

    Args:
        configure: changes fields of the unit's :class:`UnitConfig`.
    """

    def __init__(self, configure: Callable[..., None]) -> None:
        self._configure = configure
        self._comms: dict[type, Comm] = {}
        self._hook: Hook | None = None

    def set_comm(self, kind: type, comm: Comm) -> None:
        """Let ``comm`` do the unit's collectives of one ``kind``: AllGather or ReduceScatter.

        Raises:
            TypeError: ``comm`` is of another kind.
        """
        if not isinstance(comm, kind):
            raise TypeError(f"comm: expected an {kind.__name__}, got {comm!r} of {type(comm).__name__}")
        self._comms[kind] = comm
        self._configure(**{_FIELDS[kind]: register(comm)})

    def set_reduce_hook(self, hook: Hook) -> None:
        """Call ``hook`` on reduced, packed gradients."""
        self._hook = hook
        self._configure(reduce_hook=register(hook))

    def use_process_group_memory(self, groups: Iterable[str], device: torch.device, unit: str) -> None:
        """Take buffers from the process groups of these names."""
        for name in groups:
            self._require_none("set_allocate_memory_from_process_group_for_comm", unit)
            group = process_group(name)
            self.set_comm(AllGather, communicators.ProcessGroupAllGather(group, device))
            self.set_comm(ReduceScatter, communicators.ProcessGroupReduceScatter(group, device))

    def leave_process_group_memory(self) -> None:
        """Take buffers from PyTorch again."""
        if isinstance(self._comms.get(AllGather), communicators.ProcessGroupMemory):
            self._comms.clear()
            self._configure(**dict.fromkeys(_FIELDS.values(), ""))

    def use_symmetric_memory(self, groups: Iterable[str], device: torch.device, backend: str, unit: str) -> None:
        """All-gather over the process groups of these names through symmetric memory, which units share."""
        self._require_none("set_symm_mem_for_comm", unit)
        self.set_comm(AllGather, communicators.symmetric_all_gather(device, backend, tuple(groups)))

    def _require_none(self, method: str, unit: str) -> None:
        ours = (communicators.ProcessGroupMemory, communicators.SymmetricMemory)
        for comm in self._comms.values():
            if not isinstance(comm, ours):
                raise ValueError(f"{method}: {unit} has a communicator of its own, {comm!r}; leave it to that")
