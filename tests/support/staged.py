"""A process group over gloo that takes tensors of any device, by copies on the host.

Given tensors on a GPU, gloo itself ends the process in some collectives, functional ones among them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

NAME = "staged"

_STAGED = [  # what they write comes first
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "gather", "scatter"),
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "recv"),
]
_LATER_NAMES = {  # from torch 2.13 on
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


class _Done(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class StagedGroup(dist.ProcessGroup):
    """Each collective ends before its call returns; what it writes is in order on the current stream."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
        self._gloo._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timeout))
        self._gloo._set_default_backend(kind)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return NAME

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gloo.barrier().wait()
        return _Done()

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        self._gloo.send([tensor.cpu() for tensor in tensors], destination, tag).wait()
        return _Done()


def _staged(name: str) -> Callable[..., dist.Work]:
    def run(self: StagedGroup, results: Any, *operands: Any) -> dist.Work:
        tensors, _ = tree_flatten(results)
        on_host = tree_map_only(Tensor, lambda each: each.detach().to("cpu", copy=True), results)
        given = tree_map_only(Tensor, lambda each: each.detach().cpu(), operands)
        getattr(self._gloo, name)(on_host, *given).wait()
        for tensor, found in zip(tensors, tree_flatten(on_host)[0], strict=True):
            tensor.detach().copy_(found)
        return _Done()

    return run


for each in _STAGED:
    setattr(StagedGroup, each, _staged(each))
for later, earlier in _LATER_NAMES.items():
    setattr(StagedGroup, later, getattr(StagedGroup, earlier))


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(store, rank, size, timeout)


dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
