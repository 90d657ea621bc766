"""Where one parameter is registered, how it is sharded, and the spec of its collectives, which follows from that."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from ..policy import CPUOffloadPolicy, Dtypes, MixedPrecisionPolicy, resolved
from ..sharding.layout import ShardLayout
from ..sharding.mesh import DataParallelMeshInfo
from ..sharding.spec import AllGatherSpec, CommSpec, Group, ParamSpec, ReductionSpec, scaling_for
from .unit import UnitConfig

Place = tuple[nn.Module, str]  # under which a parameter is registered


class ShardedState(Enum):
    """Which tensor is registered on the modules, and so which memory a parameter holds.

    SHARDED: the DTensor; only this rank's shard has memory.
    SHARDED_POST_FORWARD: the DTensor; a larger shard, over a smaller group, has memory, too.
    UNSHARDED: the plain tensor used in compute; the shard and the unsharded parameter have memory.
    """

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
    UNSHARDED = auto()


class TakenOriginal(weakref.ref[nn.Parameter]):
    """A weak reference on an original parameter, by which a module outside the unit that shares it is found."""

    def __init__(self, original: nn.Parameter, taken_by: Any) -> None:
        self.taken_by = taken_by  # an FSDPParam, whose file imports this one

    def __new__(cls, original: nn.Parameter, taken_by: Any) -> TakenOriginal:
        return super().__new__(cls, original, _forget)


def _forget(taken: TakenOriginal) -> None:
    """Let go of the FSDPParam when the original is gone: a copy of it has this reference, too, and would keep it."""
    taken.taken_by = None


@dataclass(frozen=True)
class ParamPlacement:
    mesh_info: DataParallelMeshInfo
    dim: int  # the sharded dimension
    mp_policy: MixedPrecisionPolicy
    device: torch.device  # where compute runs
    offload: CPUOffloadPolicy | None = None  # None where shards live with compute
    sets_grad_dtype: bool = False  # by the user; else it is the parameter's dtype
    grad_dtype: torch.dtype | None = None  # None: any

    def dtypes(self, dtype: torch.dtype) -> Dtypes:
        """Return the dtypes of a parameter that is sharded as ``dtype``."""
        return resolved(self.mp_policy, dtype, self.grad_dtype if self.sets_grad_dtype else dtype)

    def following(self, param: nn.Parameter) -> ParamPlacement:
        """Return the placement of ``param`` with its ``grad_dtype``, if that is set."""
        if param.grad_dtype == param.dtype:
            return self
        return replace(self, sets_grad_dtype=True, grad_dtype=param.grad_dtype)

    def give_grad_dtype(self, param: nn.Parameter) -> None:
        """Set ``param.grad_dtype`` again, which every conversion unsets, also one to the same dtype."""
        if self.sets_grad_dtype and param.grad_dtype != self.grad_dtype:
            param.grad_dtype = self.grad_dtype

    def pinned(self, shard: Tensor) -> Tensor:
        """Return ``shard`` in pinned memory if the offload policy asks for it."""
        if self.offload is None or not self.offload.pin_memory or shard.device.type != "cpu" or shard.is_pinned():
            return shard
        return shard.pin_memory()


def comm_spec(
    name: str, layout: ShardLayout, dtype: torch.dtype, placement: ParamPlacement, config: UnitConfig
) -> CommSpec:
    """Return the spec of a parameter by its full name, of ``dtype`` as it is sharded.

    The first call that asks for a smaller or a separate process group makes it; every rank must make that call.
    """
    info, dtypes = placement.mesh_info, placement.dtypes(dtype)
    offloads, world = placement.offload is not None, info.shard_mesh_size * info.replicas.world
    device = placement.device.type if offloads else ""
    grad_dtype = None if dtypes.gradient == dtype else dtypes.gradient
    smaller = config.post_forward_size if config.reshard_after_forward else 0
    return CommSpec(
        ParamSpec(name, config.name, layout.shape, layout.dim, dtype, grad_dtype),
        AllGatherSpec(info.shards, dtypes.all_gather, config.all_gather_comm, device),
        ReductionSpec(
            dtypes.reduction,
            info.another_group(info.shard_mesh_size) if config.separate_reduce_group else info.shards,
            info.replicas,
            scaling_for(dtypes.reduction, world, config.divide_factor, config.sum_only),
            config.reduce_scatter_comm,
            config.reduce_hook,
            to_host=offloads,
        ),
        reshard=config.reshard_after_forward,
        post_forward=info.another_group(smaller) if 1 < smaller < info.shard_mesh_size else Group(),
        reshard_is_set=not config.reshards_by_default,
    )
