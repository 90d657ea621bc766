"""What the user puts in place of a unit's collectives: its state keeps the objects, its configuration their names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..collectives import AllGather, Comm, Hook, ReduceScatter, communicators, register
from ..expect import expect, unexpected
from ..sharding.dtensor import process_group
from .state import FSDPState

# Fields of UnitConfig.
_FIELDS: dict[type, str] = {AllGather: "all_gather_comm", ReduceScatter: "reduce_scatter_comm", Hook: "reduce_hook"}


def use(state: FSDPState, kind: type, custom: Comm | Hook) -> None:
    """Use ``custom`` as the unit's AllGather, ReduceScatter or Hook; TypeError if it is of another kind."""
    expect("comm", custom, kind, f"an {kind.__name__}")
    state.custom[kind] = custom
    state.unit.configure(**{_FIELDS[kind]: register(custom)})


def use_hook(state: FSDPState, hook: Callable[[Tensor], None], stream: torch.Stream | None) -> None:
    """Call ``hook`` on the unit's reduced gradients; ValueError if its own ``stream`` is none to wait for."""
    if stream is not None and any(param.placement.mesh_info.replicate_mesh_dim is not None for param in state.params):
        expected = f"None for {state.unit.config.name}, whose gradients are reduced over replicas"
        raise unexpected("stream", expected, repr(stream), "the hook runs on the stream of that reduction")
    use(state, Hook, Hook(hook, stream))


def use_process_group_memory(state: FSDPState, enable: bool) -> None:
    """Take the unit's buffers from its process groups, or from PyTorch again."""
    if not enable:
        for kind in (AllGather, ReduceScatter):
            if isinstance(state.custom.get(kind), communicators.ProcessGroupMemory):
                del state.custom[kind]
                state.unit.configure(**{_FIELDS[kind]: ""})
        return
    for name in _shard_groups(state):
        _require_none("set_allocate_memory_from_process_group_for_comm", state)
        group = process_group(name)
        use(state, AllGather, communicators.ProcessGroupAllGather(group, state.device))
        use(state, ReduceScatter, communicators.ProcessGroupReduceScatter(group, state.device))


def use_symmetric_memory(state: FSDPState, backend: str) -> None:
    """All-gather the unit through symmetric memory, which units share."""
    _require_none("set_symm_mem_for_comm", state)
    use(state, AllGather, communicators.symmetric_all_gather(state.device, backend, _shard_groups(state)))


def _shard_groups(state: FSDPState) -> tuple[str, ...]:
    return tuple(sorted({param.placement.mesh_info.shards.name for param in state.params} - {""}))


def _require_none(method: str, state: FSDPState) -> None:
    allowed = (communicators.ProcessGroupMemory, communicators.SymmetricAllGather, Hook)
    for comm in state.custom.values():
        if not isinstance(comm, allowed):
            unit = state.unit.config.name
            raise ValueError(f"{method}: {unit} has a communicator of its own, {comm!r}; leave it to that")
