"""Where one parameter is registered and how it is to be sharded. It must not know the parameter's state."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..expect import unexpected
from ..policy import CPUOffloadPolicy, MixedPrecisionPolicy
from ..sharding.mesh import DataParallelMeshInfo


class ShardedState(Enum):
    """Which tensor is registered on the modules, and so which memory a parameter holds.

    SHARDED: the DTensor; only this rank's shard has memory.
    SHARDED_POST_FORWARD: the DTensor; beside the shard, a larger one over a smaller group has memory.
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
        return super().__new__(cls, original)


@dataclass(frozen=True)
class ParamModuleInfo:
    """Where a parameter is registered: its first module and name, and every other place that shares it."""

    module: nn.Module
    name: str
    shared: tuple[tuple[nn.Module, str], ...] = ()

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield every (module, name) under which the parameter is registered."""
        yield self.module, self.name
        yield from self.shared


@dataclass(frozen=True)
class ParamPlacement:
    """How a parameter is to be sharded."""

    mesh_info: DataParallelMeshInfo
    dim: int  # the sharded dimension
    mp_policy: MixedPrecisionPolicy
    device: torch.device  # where compute runs
    offload: CPUOffloadPolicy | None = None  # None where shards live with compute

    def pinned(self, shard: Tensor) -> Tensor:
        """Return ``shard`` in pinned memory if the offload policy asks for it."""
        if self.offload is None or not self.offload.pin_memory or shard.device.type != "cpu" or shard.is_pinned():
            return shard
        return shard.pin_memory()


def check_replacement(name: str, spec: DTensorSpec, current: Tensor | None) -> None:
    """Raise TypeError or ValueError unless ``current`` is a DTensor as ``spec`` says."""
    if not isinstance(current, DTensor):
        do = f"assign a DTensor with placements {spec.placements}, or load without assign=True"
        raise unexpected(name, "a sharded DTensor", f"a {type(current).__name__}", do, TypeError)
    if current.shape != spec.shape or current.placements != spec.placements:
        got = f"{tuple(current.shape)} with {current.placements}"
        raise unexpected(name, f"shape {tuple(spec.shape)} with {spec.placements}", got, "redistribute it first")
