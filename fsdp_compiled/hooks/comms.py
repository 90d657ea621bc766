"""What the user has put in place of one unit's collectives.

It keeps the objects alive and writes their names into the unit's configuration; it must not know when a collective
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..collectives import AllGather, Comm, Hook, ReduceScatter, register
from ..collectives.backend import process_group
from ..collectives.communicators import (
    ProcessGroupAllGather,
    ProcessGroupMemory,
    ProcessGroupReduceScatter,
    SymmetricMemory,
    symmetric_all_gather,
)


class CustomComms:
    """One unit's communicators and reduce hook.

    Args:
        configure: changes fields of the unit's :class:`UnitConfig`: ``all_gather_comm``, ``reduce_scatter_comm``,
            ``reduce_hook``.
    """

    def __init__(self, configure: Callable[..., None]) -> None:
        self._configure = configure
        self._comms: dict[str, Comm] = {}
        self._hook: Hook | None = None

    def set_all_gather(self, comm: AllGather) -> None:
        """All-gather by ``comm``."""
        self._comms["all_gather"] = comm
        self._configure(all_gather_comm=register(comm))

    def set_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce over shards by ``comm``."""
        self._comms["reduce_scatter"] = comm
        self._configure(reduce_scatter_comm=register(comm))

    def set_reduce_hook(self, hook: Hook) -> None:
        """Call ``hook`` on reduced, packed gradients."""
        self._hook = hook
        self._configure(reduce_hook=register(hook))

    def use_process_group_memory(self, groups: Iterable[str], device: torch.device, unit: str) -> None:
        """Take buffers from the process groups of these names."""
        for group in groups:
            self._require_none("set_allocate_memory_from_process_group_for_comm", unit)
            all_gather = ProcessGroupAllGather(process_group(group), device)
            reduce_scatter = ProcessGroupReduceScatter(process_group(group), device)
            self.set_all_gather(all_gather)
            self.set_reduce_scatter(reduce_scatter)

    def leave_process_group_memory(self) -> None:
        """Take buffers from PyTorch again."""
        if isinstance(self._comms.get("all_gather"), ProcessGroupMemory):
            self._comms.clear()
            self._configure(all_gather_comm="", reduce_scatter_comm="")

    def use_symmetric_memory(self, groups: Iterable[str], device: torch.device, backend: str, unit: str) -> None:
        """Gather over the process groups of these names through symmetric memory, which units share."""
        self._require_none("set_symm_mem_for_comm", unit)
        self.set_all_gather(symmetric_all_gather(device, backend, tuple(groups)))

    def _require_none(self, method: str, unit: str) -> None:
        for comm in self._comms.values():
            if not isinstance(comm, (ProcessGroupMemory, SymmetricMemory)):
                raise ValueError(f"{method}: {unit} has a communicator of its own, {comm!r}; leave it to that")
