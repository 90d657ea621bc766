"""What a unit tells its parameters: how to shard them, and what they are to do at present."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .mesh import DataParallelMeshInfo
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy


def _nothing() -> None:
    pass


@dataclass
class UnitStatus:
    """What the parameters of one unit do at present; the unit's state writes it, the parameters read it.

    Args:
        name: the unit's full name, as far as known.
        hooked: the eager hooks have gathered this unit for the module call or backward under way.
        reshard_after_forward: free (True) or keep (False) unsharded parameters between forward and backward.
        post_forward_size: if they are freed, how many ranks hold them sharded until backward; 0 for all.
        reshard_after_backward: free (True) or keep (False) them after backward.
        keep_unsharded_storage: whether a reshard leaves the unsharded memory allocated.
        unshard_in_backward: whether backward gathers at all.
        reduce_grads: whether backward reduces gradients, or accumulates them unsharded.
        all_reduce_grads: whether it also reduces them over replicas, or accumulates what the shards reduced.
        has_stored: whether either of these was ever off, so that gradients may wait.
        reduce_unused: whether parameters without a gradient take part in the reduction, with zeros.
        divide_factor: what sums of gradients are divided by; None for the number of ranks.
        sum_only: whether reductions must not use an averaging collective.
        gather_comm, reduce_comm, reduce_hook: names of the user's communication, "" for none.
        on_landing: called whenever a compiled backward leaves a gradient of the unit.
    """

    name: str
    hooked: bool = False
    reshard_after_forward: bool = True
    post_forward_size: int = 0
    reshard_after_backward: bool = True
    keep_unsharded_storage: bool = False
    unshard_in_backward: bool = True
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    has_stored: bool = False
    reduce_unused: bool = False
    divide_factor: float | None = None
    sum_only: bool = False
    gather_comm: str = ""
    reduce_comm: str = ""
    reduce_hook: str = ""
    on_landing: Callable[[], None] = _nothing


@dataclass(frozen=True)
class ParamPlacement:
    """How a parameter is to be sharded: over which mesh, along which dimension, in which dtypes, on which devices."""

    mesh_info: DataParallelMeshInfo
    dim: int
    mp_policy: MixedPrecisionPolicy
    device: torch.device  # of compute
    offload: CPUOffloadPolicy | None = None
