"""Parameters that share a collective, and what the eager hooks do with them: unshard, reshard, reduce."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..agreement.ledger import agree
from ..collectives import Pending, all_gather_bucket, launch_all_gather, launch_reduction, launch_replica_reduction
from ..expect import unexpected
from ..param.param import FSDPParam
from ..param.placement import ShardedState
from ..param.unit import Unit
from ..sharding.contract import Contract, contract_of
from ..sharding.spec import AllGatherBucket, CommSpec, ReductionBucket
from .backward import without_grad

Bucket = TypeVar("Bucket", AllGatherBucket, ReductionBucket)


@dataclass(frozen=True)
class _Reduction:
    params: list[FSDPParam]
    pending: Pending[list[Tensor]]
    is_partial: bool = False  # over the shard group only

    def accumulate(self, results: Sequence[Tensor]) -> None:
        for param, grad in zip(self.params, results, strict=True):
            if self.is_partial:
                param.gradients.partial.add(grad, copy=True)
            else:
                param.gradients.accumulate(grad)


_BUCKETS = 64  # that a group keeps; a step uses few, but specs may change from step to step


@dataclass(eq=False)
class FSDPParamGroup:
    """Parameters of one unit, or shared among units, with equal mesh and dtypes."""

    params: Sequence[FSDPParam]  # at least one
    unit: Unit
    # Those of its all-gathers that are still to be waited for; None before the launch and after the last wait.
    _all_gathers: list[Pending[Sequence[Tensor]]] | None = field(default=None, repr=False)
    _is_lost: bool = False  # an exception has cut off the launch of one, or a wait
    _sent: list[list[int]] = field(default_factory=list, repr=False)  # versions of the shards, at the launch
    _reductions: list[_Reduction] = field(default_factory=list, repr=False)
    _to_host: list[tuple[_Reduction, list[Tensor]]] = field(default_factory=list, repr=False)
    _buckets: dict[Hashable, tuple[object, Any, Contract]] = field(default_factory=dict, repr=False)

    @property
    def is_unsharded(self) -> bool:
        return self.params[0].state is ShardedState.UNSHARDED

    def _bucket(self, make: Callable[[list[CommSpec]], Bucket], specs: list[CommSpec]) -> tuple[Bucket, Contract]:
        """Return ``make(specs)`` and its contract, made once for these very specs: hashing records is slow."""
        key = (make, *map(id, specs))
        if key not in self._buckets:
            if len(self._buckets) >= _BUCKETS:
                self._buckets.clear()
            bucket = make(specs)
            self._buckets[key] = (specs, bucket, contract_of(bucket))  # specs are kept, so that their ids stay theirs
        return self._buckets[key][1:]

    @without_grad
    def launch_unshard(self) -> None:
        """Start the group's all-gathers unless it is unsharded or they are under way."""
        if self._all_gathers is not None and (self._is_lost or self._sent != self._versions()):
            self.drop_unshard()  # one was cut off, or the program has written to a shard since their launch
        if self.is_unsharded or self._all_gathers is not None:
            return
        self._note_writes()
        inputs = {param: param.all_gather_inputs() for param in self.params}
        # Of all at once, also of a parameter whose extension sends nothing.
        outputs = cache(lambda: {param: param.allocate(specs) for param, (_, specs) in inputs.items()})
        found: dict[torch.dtype, list[tuple[CommSpec, Tensor, FSDPParam, int]]] = {}  # extensions send several dtypes
        for param, (shards, specs) in inputs.items():
            for number, (shard, spec) in enumerate(zip(shards, specs, strict=True)):
                found.setdefault(spec.all_gather.dtype, []).append((spec, shard, param, number))
        buckets = [self._bucket(self._all_gather_bucket, [spec for spec, *_ in sent]) for sent in found.values()]
        self._all_gathers, self._is_lost = [], True
        if not buckets:
            outputs()
        for (bucket, contract), sent in zip(buckets, found.values(), strict=True):
            agree(contract)
            shards = [shard for _, shard, *_ in sent]
            allocate = partial(lambda sent: [outputs()[param][number] for *_, param, number in sent], sent)
            self._all_gathers.append(launch_all_gather(shards, bucket, allocate))
        self._is_lost = False

    def _note_writes(self) -> None:
        """Let backwards raise that need parameters as they were before the program wrote to their shards."""
        if self.params[0].unsharded.post_forward is not None:
            return  # what forward has kept is all-gathered, as it was
        before, self._sent = self._sent, self._versions()
        for param, earlier, now in zip(self.params, before, self._sent, strict=False):  # none before the first
            if earlier != now:
                param.unsharded.count_write()

    def drop_stale(self) -> None:
        """Reshard what was unsharded before the program wrote to a shard, as an optimizer does without a backward."""
        is_left = self.params[0].state is not ShardedState.SHARDED and not self.params[0].is_held
        if is_left and self._sent != self._versions():
            self.reshard()

    def _versions(self) -> list[list[int]]:
        return [param.storage.versions for param in self.params]

    def _all_gather_bucket(self, specs: Sequence[CommSpec]) -> AllGatherBucket:
        return all_gather_bucket(specs[0].all_gather, [spec.param for spec in specs], self.params[0].placement.device)

    def _wait(self) -> None:
        is_lost = self._is_lost
        while self._all_gathers:
            self._is_lost = True
            self._all_gathers.pop(0).wait()
            self._is_lost = is_lost

    @without_grad
    def wait_unshard(self) -> None:
        """Finish the all-gathers and register the unsharded parameters."""
        if self._all_gathers is not None:
            self._wait()
            for param in self.params:
                param.to_unsharded()
            self._all_gathers = None

    @without_grad
    def drop_unshard(self) -> None:
        """Wait for the all-gathers under way and free their results, or leave them to one that is lost."""
        if self._all_gathers is not None:
            self._wait()
            for param in self.params:
                param.drop_unsharded(self._is_lost)
            self._all_gathers = None

    @without_grad
    def keep_changes(self) -> None:
        """Let shards follow what was written to parameters, as by modules that clamp or normalise one.

        RuntimeError if the program wrote to the shard of one, too, as an optimizer does.
        """
        lost = list[FSDPParam]()
        for number, param in enumerate(self.params if self.is_unsharded and self.unit.config.trains else ()):
            if (changed := param.unsharded.take_change()) is None:
                continue
            self._sent = self._sent or self._versions()
            if self._sent[number] == param.storage.versions:
                param.storage.follow(changed, param.placement.mesh_info.shard_mesh_rank)
                self._sent[number] = param.storage.versions
            else:
                lost.append(param)
        if lost:
            expected = "writes to the unsharded parameter or to the sharded one, as by an optimizer"
            do = "call reshard() of its unit between them"
            raise unexpected(lost[0].name, expected, "both since it was all-gathered", do, RuntimeError)

    def forget_changes(self) -> None:
        """Leave shards as they are, whatever was written to parameters."""
        for param in self.params:
            param.unsharded.take_change()

    def reshard(self) -> None:
        """Register the sharded parameters and free all others; an all-gather under way is dropped."""
        self.drop_unshard()
        if self.params[0].is_held:
            return  # a unit that shares these parameters is using them
        self.keep_changes()
        for param in self.params:
            if param.state is not ShardedState.SHARDED:
                param.to_sharded()

    @without_grad
    def reshard_post_forward(self) -> None:
        """As :meth:`reshard`, but keep shards over the smaller group if there is one."""
        if self.params[0].spec.post_forward.world == 1 or not self.is_unsharded:
            self.reshard()
        elif not self.params[0].is_held:
            for param in self.params:
                param.to_sharded_post_forward()

    @property
    def has_gradients(self) -> bool:
        return any(p.unsharded.grad is not None or p.gradients.unsharded.grad is not None for p in self.params)

    @without_grad
    def launch_reduce(self) -> None:
        """Start reducing the gradients that backward left, or accumulate them while sync is off."""
        if not self.unit.config.reduce_grads:
            for param in self.params:
                accumulate_unsharded(param)
            return
        ready = {param: grad for param in self.params if (grad := self._total_gradient(param)) is not None}
        if not ready:
            return
        is_partial = not self.unit.config.all_reduce_grads and self.params[0].spec.reduction.replicas.world > 1
        make = _partial_bucket if is_partial else _complete_bucket
        bucket, contract = self._bucket(make, [param.spec for param in ready])
        agree(contract)
        earlier = [] if is_partial else [param.gradients.partial.take() for param in ready]
        pending = launch_reduction(list(ready.values()), bucket, earlier)
        self._reductions.append(_Reduction(list(ready), pending, is_partial))

    @without_grad
    def launch_replica_reduce(self) -> None:
        """Start reducing over replicas what earlier backwards have reduced over the shard group only."""
        if not self.unit.config.all_reduce_grads:
            return
        parts = {param: part for param in self.params if (part := param.gradients.partial.take()) is not None}
        if not parts:
            return
        bucket, contract = self._bucket(_complete_bucket, [param.spec for param in parts])
        agree(contract.by_group[bucket.spec.replicas.name])
        self._reductions.append(_Reduction(list(parts), launch_replica_reduction(list(parts.values()), bucket)))

    @without_grad
    def wait_reduce(self) -> None:
        """Let compute wait for the reductions and add the results to the sharded parameters' gradients.

        Where those live on the host, :meth:`wait_on_host` adds them, so that the host can go on with backward.
        """
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            results = reduction.pending.wait()
            if reduction.is_partial or reduction.params[0].placement.offload is None:
                reduction.accumulate(results)
            else:
                self._to_host.append((reduction, results))

    @without_grad
    def wait_on_host(self) -> None:
        """Add the gradients that were copied to the host to those of the sharded parameters."""
        to_host, self._to_host = self._to_host, []
        for reduction, results in to_host:
            reduction.pending.wait_on_host()
            reduction.accumulate(results)

    @without_grad
    def drop_reduce(self) -> None:
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            reduction.pending.wait()
        self._to_host.clear()

    def _total_gradient(self, param: FSDPParam) -> Tensor | None:
        grad = param.unsharded.take_grad()
        if grad is not None:
            return param.gradients.unsharded.take_with(grad)
        accumulated = param.gradients.unsharded.take()
        if accumulated is None and self.unit.config.reduce_unused and param.sharded_param.requires_grad:
            shape, dtype = param.storage.layout.shape, param.spec.all_gather.dtype
            return torch.zeros(shape, dtype=dtype, device=param.placement.device)
        return accumulated


@without_grad
def accumulate_unsharded(param: FSDPParam) -> None:
    """Add the gradient that backward has left, if any, to the sum of those without sync."""
    if (grad := param.unsharded.take_grad()) is not None:
        param.gradients.unsharded.add(grad)


def _complete_bucket(specs: Sequence[CommSpec]) -> ReductionBucket:
    return ReductionBucket(specs[0].reduction, tuple(spec.param for spec in specs), inputs_persist=True)


def _partial_bucket(specs: Sequence[CommSpec]) -> ReductionBucket:
    return _complete_bucket([spec.over_shards_only() for spec in specs])


def group_params(params: Sequence[FSDPParam], unit: Unit) -> list[FSDPParamGroup]:
    """Divide a unit's parameters into groups of equal mesh and dtypes, in order of first appearance."""
    groups: dict[Hashable, list[FSDPParam]] = {}
    for param in params:
        info, shared = param.placement.mesh_info, param if len(param.users) > 1 else None
        dtypes = param.leaf.dtype, param.spec.all_gather.dtype, param.spec.reduction.dtype
        groups.setdefault((info.shards, info.replicas, dtypes, shared), []).append(param)
    return [FSDPParamGroup(members, unit) for members in groups.values()]
