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
    """One parameter's all-gather.

    Args:
        index: tells requests apart.
        param: what travels.
        spec: of the all-gather.
        task: the request scheduled alone; its times are filled in for the bucket.
        lane: the link.
        device: where compute runs.
        inputs_persist: see :class:`AllGatherBucket`.
        key: requests with equal keys may share a bucket.
    """

    index: int
    param: ParamSpec
    spec: AllGatherSpec
    task: AllGatherTask
    lane: Lane
    device: torch.device = CPU
    inputs_persist: bool = True
    key: Hashable = 0


@dataclass(frozen=True)
class ReductionRequest:
    """One gradient's reduction.

    Args:
        index: tells requests apart.
        param: whose gradient travels.
        spec: of the reduction.
        task: the request scheduled alone; its times are filled in for the bucket.
        lanes: the links of its collectives in turn: one or two.
        device: where compute runs.
        key: requests with equal keys may share a bucket.
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
        return replace(
            self,
            compute_us=small.compute_us,
            all_gathers=tuple(replace(r, task=t) for r, t in zip(self.all_gathers, small.all_gathers, strict=True)),
            reductions=tuple(replace(r, task=t) for r, t in zip(self.reductions, small.reductions, strict=True)),
        )


@dataclass(frozen=True)
class Buckets:
    """Which requests share a collective."""

    all_gathers: tuple[tuple[AllGatherRequest, ...], ...]
    reductions: tuple[tuple[ReductionRequest, ...], ...]

    @staticmethod
    def alone(requests: Requests) -> Buckets:
        """Return a bucket for each request."""
        return Buckets(tuple((r,) for r in requests.all_gathers), tuple((r,) for r in requests.reductions))


def load_of(requests: Requests, buckets: Buckets) -> Load:
    """Return what the schedule has to place for these buckets."""
    return Load(
        requests.compute_us,
        tuple(all_gather_task(bucket, requests.cluster) for bucket in buckets.all_gathers),
        tuple(reduction_task(bucket, requests.cluster) for bucket in buckets.reductions),
        requests.cluster.compute_blocked_fraction,
    )


def _into_place(requests: Sequence[AllGatherRequest]) -> bool:
    first = requests[0]
    return gathers_into_place(
        first.spec, [r.param.dim for r in requests], [r.task.bytes for r in requests], first.device
    )


def all_gather_task(requests: Sequence[AllGatherRequest], cluster: Cluster) -> AllGatherTask:
    """Return a bucket as the schedule sees it."""
    first, tasks = requests[0], [request.task for request in requests]
    kind = AllGatherKind(
        into_place=_into_place(requests),
        beside=first.device.type == "cuda",
        inputs_persist=all(request.inputs_persist for request in requests),
        from_host=bool(first.spec.device) and first.device.type != "cpu",
    )
    sizes = [task.bytes for task in tasks]
    times = cluster.all_gather_times(sizes, first.lane, kind)
    return AllGatherTask(
        bytes=sum(sizes),
        us=times.us,
        first=min(task.first for task in tasks),
        last=max(task.last for task in tasks),
        earliest=max(task.earliest for task in tasks),
        kept_bytes=sum(task.kept_bytes for task in tasks),
        lane=first.lane.name,
        pack_us=times.pack_us,
        unpack_us=times.unpack_us,
    )


def reduction_task(requests: Sequence[ReductionRequest], cluster: Cluster) -> ReductionTask:
    """Return a bucket as the schedule sees it."""
    first, parts = requests[0], tuple(part for request in requests for part in request.task.parts)
    size = sum(part_bytes for _, part_bytes in parts)
    scattered = size // first.spec.shards.world
    sizes = [size, scattered] if len(first.lanes) > 1 else [size]
    times = [
        lane.link.collective_us(each, lane.world, reduces=True) for lane, each in zip(first.lanes, sizes, strict=True)
    ]
    return ReductionTask(
        parts=parts,
        us=times[0],
        needed=min(request.task.needed for request in requests),
        lane=first.lanes[0].name,
        all_reduce_us=times[1] if len(times) > 1 else 0.0,
        all_reduce_lane=first.lanes[-1].name,
        pack_us=cluster.packing_us(size),
        host_us=cluster.host_us(scattered) if first.spec.to_host and first.device.type != "cpu" else 0.0,
    )
