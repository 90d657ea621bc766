"""Parameters that share a collective, and what the eager hooks do with them: unshard, reshard, reduce.

It knows the order of one group's operations; it must not know modules' hooks or other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from .collectives import (
    Pending,
    launch_gather,
    launch_reduction,
    launch_replica_reduction,
)
from .layout import ShardLayout
from .param import FSDPParam, ShardedState
from .passes import ir
from .passes.route import Route
from .unit import UnitStatus


@dataclass
class _Gather:
    """One collective of a group: who sends what, and the result under way."""

    route: Route
    params: list[tuple[FSDPParam, int]] = field(default_factory=list)  # and which of its outputs
    shards: list[Tensor] = field(default_factory=list)
    layouts: list[ShardLayout] = field(default_factory=list)
    pending: Pending[None] | None = None

    def launch(self, outputs: Callable[[], dict[FSDPParam, Sequence[Tensor]]]) -> None:
        shards, self.shards = self.shards, []
        self.pending = launch_gather(
            shards, self.layouts, self.route, lambda: [outputs()[param][number] for param, number in self.params]
        )

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()


@dataclass(frozen=True)
class _Reduction:
    """Gradients under way, all the way or over the shard group only."""

    params: list[FSDPParam]
    pending: Pending[list[Tensor]]
    is_whole: bool

    def land(self, results: Sequence[Tensor]) -> None:
        """Add the results to the sharded parameters' gradients."""
        for param, grad in zip(self.params, results, strict=True):
            param.land(grad)


@dataclass(eq=False)
class FSDPParamGroup:
    """Parameters of one unit, or shared among units, with equal mesh and dtypes.

    Args:
        params: at least one.
        status: of the unit.
    """

    params: Sequence[FSDPParam]
    status: UnitStatus
    _gathers: list[_Gather] = field(default_factory=list, repr=False)
    _reductions: list[_Reduction] = field(default_factory=list, repr=False)
    _arriving: list[tuple[_Reduction, list[Tensor]]] = field(default_factory=list, repr=False)

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return self.params[0].state is ShardedState.UNSHARDED

    def launch_unshard(self) -> None:
        """Start the group's all-gather unless it is unsharded or under way."""
        if self.is_unsharded or self._gathers:
            return
        # Memory first allocated under inference_mode could never take part in training.
        with torch.inference_mode(False), torch.no_grad():
            self._gathers = gathers = self._new_gathers()
            outputs = cache(lambda: {param: param.allocate(*_outputs_of(param, gathers)) for param in self.params})
            for gather in gathers:
                gather.launch(outputs)

    def _new_gathers(self) -> list[_Gather]:
        """Return one collective per dtype that is sent; only all-gather extensions send several."""
        found: dict[torch.dtype, _Gather] = {}
        for param in self.params:
            shards, layouts, route = param.all_gather_inputs()
            for number, (shard, layout) in enumerate(zip(shards, layouts, strict=True)):
                dtype = route.dtype if param.extension is None else shard.dtype
                gather = found.setdefault(dtype, _Gather(route.in_dtype(dtype)))
                gather.params.append((param, number))
                gather.shards.append(shard)
                gather.layouts.append(layout)
        return list(found.values())

    def wait_unshard(self) -> None:
        """Finish the all-gathers and register the unsharded parameters."""
        if not self._gathers:
            return
        gathers, self._gathers = self._gathers, []
        with torch.inference_mode(False), torch.no_grad():
            for gather in gathers:
                gather.wait()
            for param in self.params:
                param.to_unsharded()

    def reshard(self) -> None:
        """Register the sharded parameters and free all others; an all-gather under way is dropped."""
        self.drop_unshard()
        if self.params[0].is_hooked:
            return  # a unit that shares these parameters is using them
        for param in self.params:
            if param.state is not ShardedState.SHARDED:
                param.to_sharded()

    def drop_unshard(self) -> None:
        """Let an all-gather under way land nowhere."""
        if not self._gathers:
            return
        gathers, self._gathers = self._gathers, []
        with torch.inference_mode(False), torch.no_grad():
            for gather in gathers:
                gather.wait()
        for param in self.params:
            param.free_unsharded()

    @torch.no_grad()
    def reshard_post_forward(self) -> None:
        """As :meth:`reshard`, but keep shards over the smaller group if there is one."""
        if self.params[0].smaller is None or not self.is_unsharded:
            self.reshard()
        elif not self.params[0].is_hooked:
            for param in self.params:
                param.to_sharded_post_forward()

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait to be reduced, wholly or over replicas."""
        return any(param.pending.grad is not None or param.has_unsharded_grad for param in self.params)

    @torch.no_grad()
    def launch_reduce(self) -> None:
        """Start reducing the gradients that backward left, or store them while sync is off."""
        if not self.status.reduce_grads:
            for param in self.params:
                grad = param.take_unsharded_grad()
                if grad is not None:
                    param.pending.add(grad)
            return
        ready = [(param, grad) for param in self.params if (grad := self._total_gradient(param)) is not None]
        if not ready:
            return
        params, grads = [param for param, _ in ready], [grad for _, grad in ready]
        layouts = [param.layout for param in params]
        if self.status.all_reduce_grads:
            dtypes, carried = [param.leaf.dtype for param in params], [param.partial.take() for param in params]
            pending = launch_reduction(grads, layouts, params[0].route, dtypes, carried)
        else:
            route = params[0].route.over_shards_only()
            pending = launch_reduction(grads, layouts, route, [param.dtypes[1] for param in params])
        self._reductions.append(_Reduction(params, pending, self.status.all_reduce_grads))

    @torch.no_grad()
    def launch_replica_reduce(self) -> None:
        """Start reducing over replicas what earlier backwards have reduced over the shard group only."""
        if not self.status.all_reduce_grads or not self.status.has_stored:
            return
        parts = [(param, part) for param in self.params if (part := param.partial.take()) is not None]
        if parts:
            params = [param for param, _ in parts]
            layouts = [param.layout for param in params]
            pending = launch_replica_reduction([part for _, part in parts], layouts, params[0].route)
            self._reductions.append(_Reduction(params, pending, is_whole=True))

    @torch.no_grad()
    def wait_reduce(self) -> None:
        """Let compute wait for the reductions and add the results to the sharded parameters' gradients.

        Where those live on the host, that is left to :meth:`wait_on_host`, so that the host can go on with backward.
        """
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            results = reduction.pending.wait()
            if not reduction.is_whole:
                for param, part in zip(reduction.params, results, strict=True):
                    param.partial.add(part.clone())
            elif reduction.params[0].placement.offload is None:
                reduction.land(results)
            else:
                self._arriving.append((reduction, results))

    @torch.no_grad()
    def wait_on_host(self) -> None:
        """Add the results that have moved to the host to the sharded parameters' gradients."""
        arriving, self._arriving = self._arriving, []
        for reduction, results in arriving:
            reduction.pending.wait_on_host()
            reduction.land(results)

    def drop_reduce(self) -> None:
        """Wait for the reductions under way and forget their results."""
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            reduction.pending.wait()
        self._arriving.clear()

    def _total_gradient(self, param: FSDPParam) -> Tensor | None:
        grad, pending = param.take_unsharded_grad(), param.pending.take()
        if grad is None:
            if pending is None and self.status.reduce_unused and param.sharded_param.requires_grad:
                return torch.zeros(param.layout.shape, dtype=param.dtypes[0], device=param.placement.device)
            return pending
        return grad if pending is None else pending.add_(grad.to(pending.dtype))


def _outputs_of(param: FSDPParam, gathers: Sequence[_Gather]) -> tuple[list[ShardLayout], list[torch.dtype]]:
    """Return layouts and dtypes of a parameter's outputs, in order."""
    found = {
        number: (layout, gather.route.dtype)
        for gather in gathers
        for (owner, number), layout in zip(gather.params, gather.layouts, strict=True)
        if owner is param
    }
    return [found[number][0] for number in sorted(found)], [found[number][1] for number in sorted(found)]


def group_params(params: Sequence[FSDPParam], status: UnitStatus) -> list[FSDPParamGroup]:
    """Divide a unit's parameters into groups of equal mesh and dtypes, in order of first appearance.

    Within a group, small odd ones come last, where they do not misalign the rest of a bucket.
    """
    groups: dict[Hashable, list[FSDPParam]] = {}
    for param in params:
        info = param.placement.mesh_info
        shared = param if param.is_lent else None
        key = (info.shard_group, info.replicate_group, info.shard_world, param.leaf.dtype, *param.dtypes, shared)
        groups.setdefault(key, []).append(param)
    return [
        FSDPParamGroup(sorted(members, key=lambda param: -ir.granularity(param.layout.shard_numel)), status)
        for members in groups.values()
    ]
