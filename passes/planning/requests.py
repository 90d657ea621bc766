"""Requests, one for each parameter's all-gather or gradient's reduction, and what a bucket of them costs.

A bucket is a tuple of requests. Its cost is computed here only: for the decision which requests share a bucket, and
for the schedule of the buckets.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ...sharding.spec import AllGatherSpec, ParamSpec, ReductionSpec
from ..cost.cluster import AllGatherKind, Cluster, Lane, gathers_into_place
from .tasks import AllGatherTask, Load, ReductionTask, compress

CPU = torch.device("cpu")


@dataclass(frozen=True)
class AllGatherRequest:
    """One parameter's all-gather."""

    index: int  # tells requests apart
    param: ParamSpec
    spec: AllGatherSpec
    task: AllGatherTask  # the request scheduled alone; its times are filled in for the bucket
    lane: Lane
    device: torch.device = CPU  # where compute runs
    inputs_persist: bool = True  # see :class:`AllGatherBucket`
    key: Hashable = 0  # requests with equal keys may share a bucket


@dataclass(frozen=True)
class ReductionRequest:
    """One gradient's reduction: ``lanes`` are the links of its collectives in turn, one or two.

    The other fields are as in :class:`AllGatherRequest`.
    """

    index: int
    param: ParamSpec
    spec: ReductionSpec
    task: ReductionTask
    lanes: tuple[Lane, ...]
    device: torch.device = CPU
    key: Hashable = 0


Request = TypeVar("Request", AllGatherRequest, ReductionRequest)


@dataclass(frozen=True)
class Requests:
    """A graph's compute and its requests: all-gathers by first read, reductions by when their gradients exist."""

    compute_us: tuple[float, ...]
    all_gathers: tuple[AllGatherRequest, ...]
    reductions: tuple[ReductionRequest, ...]
    cluster: Cluster

    def compressed(self) -> Requests:
        """Return the same requests with no more positions than they need."""
        small, _ = compress(load_of(self, Buckets.alone(self)))
        all_gathers = (replace(r, task=t) for r, t in zip(self.all_gathers, small.all_gathers, strict=True))
        reductions = (replace(r, task=t) for r, t in zip(self.reductions, small.reductions, strict=True))
        return Requests(small.compute_us, tuple(all_gathers), tuple(reductions), self.cluster)


@dataclass(frozen=True)
class Buckets:
    """Which requests share a collective."""

    all_gathers: tuple[tuple[AllGatherRequest, ...], ...]
    reductions: tuple[tuple[ReductionRequest, ...], ...]

    @property
    def count(self) -> int:
        """Of all-gathers and reductions together."""
        return len(self.all_gathers) + len(self.reductions)

    @staticmethod
    def alone(requests: Requests) -> Buckets:
        """Return a bucket for each request."""
        return Buckets(tuple((r,) for r in requests.all_gathers), tuple((r,) for r in requests.reductions))


def load_of(requests: Requests, buckets: Buckets) -> Load:
    """Return what the schedule has to place for these buckets."""
    return Load(
        requests.compute_us,
        tuple(_all_gather_task(bucket, requests.cluster) for bucket in buckets.all_gathers),
        tuple(_reduction_task(bucket, requests.cluster) for bucket in buckets.reductions),
        requests.cluster.compute_blocked_fraction,
    )


def _all_gather_task(requests: Sequence[AllGatherRequest], cluster: Cluster) -> AllGatherTask:
    first, tasks = requests[0], [request.task for request in requests]
    sizes = [task.bytes for task in tasks]
    kind = AllGatherKind(
        into_place=gathers_into_place(first.spec, [r.param.dim for r in requests], sizes, first.device),
        beside=first.device.type == "cuda",
        inputs_persist=all(request.inputs_persist for request in requests),
        from_host=bool(first.spec.device) and first.device.type != "cpu",
    )
    times = cluster.all_gather_times(sizes, first.lane, kind)
    return AllGatherTask(
        bytes=sum(sizes),
        first=min(task.first for task in tasks),
        last=max(task.last for task in tasks),
        earliest=max(task.earliest for task in tasks),
        kept_bytes=sum(task.kept_bytes for task in tasks),
        lane=first.lane.name,
        **times._asdict(),
    )


def _reduction_task(requests: Sequence[ReductionRequest], cluster: Cluster) -> ReductionTask:
    first, parts = requests[0], tuple(part for request in requests for part in request.task.parts)
    size = sum(part_bytes for _, part_bytes in parts)
    scattered = size // first.spec.shards.world
    lane, last = first.lanes[0], first.lanes[-1]  # one, or those of a reduce-scatter and an all-reduce
    all_reduces = len(first.lanes) > 1
    passes = 2 if first.spec.shards.world == 1 else 1  # over replicas alone
    return ReductionTask(
        parts=parts,
        us=lane.link.collective_us(size, lane.world, reduces=True, passes=passes),
        needed=min(request.task.needed for request in requests),
        lane=lane.name,
        all_reduce_us=last.link.collective_us(scattered, last.world, True, passes=2) if all_reduces else 0.0,
        all_reduce_lane=last.name,
        pack_us=cluster.packing_us(size),
        host_us=cluster.host_us(scattered) if first.spec.to_host and first.device.type != "cpu" else 0.0,
    )
