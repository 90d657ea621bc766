"""Parameters that share a collective, and what the eager hooks do with them: unshard, reshard, reduce.

It knows the order of one group's operations; it must not know modules' hooks or other groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .collectives import Group, PendingGather, PendingReduction, launch_gather, launch_reduction
from .param import FSDPParam, ShardedState
from .unit import UnitStatus


@dataclass(eq=False)
class FSDPParamGroup:
    """Parameters of one unit with equal mesh and dtypes.

    Args:
        params: at least one.
        status: of the unit.
    """

    params: Sequence[FSDPParam]
    status: UnitStatus
    _gather: PendingGather | None = field(default=None, repr=False)
    _reduction: tuple[list[FSDPParam], PendingReduction] | None = field(default=None, repr=False)

    @property
    def is_sharded(self) -> bool:
        """Whether the sharded parameters are registered."""
        return self.params[0].state is ShardedState.SHARDED

    @property
    def _route_group(self) -> Group:
        info = self.params[0].placement.mesh_info
        return Group(info.shard_group, info.shard_world, info.replicate_group, info.replicate_world)

    def launch_unshard(self) -> None:
        """Start the group's all-gather unless it is unsharded or under way."""
        if not self.is_sharded or self._gather is not None:
            return
        with torch.no_grad():
            shards = [param.leaf for param in self.params]
            layouts = [param.layout for param in self.params]
            self._gather = launch_gather(shards, layouts, self.params[0].dtypes[0], self._route_group)

    def wait_unshard(self) -> None:
        """Finish the all-gather and register the unsharded parameters."""
        if self._gather is None:
            return
        # Memory first allocated under inference_mode could never take part in training.
        with torch.inference_mode(False), torch.no_grad():
            self._gather.wait([param.allocate() for param in self.params])
        self._gather = None
        for param in self.params:
            param.to_unsharded()

    def reshard(self) -> None:
        """Register the sharded parameters and free the unsharded ones; an all-gather under way is dropped."""
        if self._gather is not None:
            self._gather.drop()
            self._gather = None
        if not self.is_sharded:
            for param in self.params:
                param.to_sharded()

    @torch.no_grad()
    def launch_reduce(self) -> None:
        """Start averaging the gradients that eager backward left, or store them while sync is off."""
        if not self.status.reduce_grads:
            for param in self.params:
                grad = param.take_unsharded_grad()
                if grad is not None:
                    param.store(grad)
            return
        ready = [(param, grad) for param in self.params if (grad := _total_gradient(param)) is not None]
        if not ready:
            return
        params = [param for param, _ in ready]
        pending = launch_reduction(
            [grad for _, grad in ready],
            [param.layout for param in params],
            params[0].dtypes[1],
            self._route_group,
        )
        self._reduction = (params, pending)

    def wait_reduce(self) -> None:
        """Finish the reduction and add the results to the sharded parameters' gradients."""
        if self._reduction is None:
            return
        params, pending = self._reduction
        self._reduction = None
        for param, grad in zip(params, pending.wait([p.leaf.dtype for p in params]), strict=True):
            param.land(grad)

    def drop_reduce(self) -> None:
        """Wait for the reduction under way and forget its result."""
        if self._reduction is not None:
            self._reduction[1].wait([param.leaf.dtype for param in self._reduction[0]])
        self._reduction = None


def _total_gradient(param: FSDPParam) -> torch.Tensor | None:
    grad = param.take_unsharded_grad()
    if grad is None:
        return param.take_pending()
    pending = param.take_pending()
    return grad if pending is None else pending.add_(grad.to(pending.dtype))


def group_params(params: Sequence[FSDPParam], status: UnitStatus) -> list[FSDPParamGroup]:
    """Divide a unit's parameters into groups of equal mesh and dtypes, in order of first appearance."""
    groups: dict[object, list[FSDPParam]] = {}
    for param in params:
        info = param.placement.mesh_info
        key = (info.shard_group, info.replicate_group, info.shard_world, param.leaf.dtype, *param.dtypes)
        groups.setdefault(key, []).append(param)
    return [FSDPParamGroup(members, status) for members in groups.values()]
