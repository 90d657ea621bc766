"""Kinds of collectives: what each is to those who bucket, schedule, lower, inspect and run it.

A kind is a record in the file of its recipe, such as ``ALL_GATHER`` in :mod:`fsdp_compiled.collectives.all_gather`.
Whoever meets an operator of ours in a graph asks its kind; nothing here knows which kinds there are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..sharding.spec import Bucket, ParamSpec, Spec
from .cost import Cluster, Lane

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Request:
    """One parameter or gradient that a graph asks to travel. Positions are those of :mod:`planning.tasks`."""

    index: int  # tells requests of a graph apart
    kind: Kind
    param: ParamSpec
    spec: Spec
    bytes: int  # of the unsharded side
    ready: int  # position at which its input exists
    needed: int  # position of the first compute node that reads the result
    last: int  # position of the last one
    lanes: tuple[Lane, ...]  # one for each stage
    made: int | None = None  # position of the node that makes the input, which then counts as memory; -1: an argument
    kept_bytes: int = 0  # of ``bytes``, what the user keeps unsharded until backward; no part of the memory bound
    device: torch.device = CPU  # where compute runs
    inputs_persist: bool = True  # see :class:`AllGatherBucket`
    key: Hashable = 0  # requests with equal keys may share a bucket


@dataclass(frozen=True)
class Times:
    """Estimated microseconds of one bucket."""

    stages_us: tuple[float, ...]  # on the lane of each stage
    pack_us: float = 0.0  # of compute, before the launch
    unpack_us: float = 0.0  # of compute, after the first wait


def ring_times(requests: Sequence[Request], cluster: Cluster) -> Times:
    """Return the times of collectives that move all bytes around a ring once, packed and unpacked by compute."""
    size = sum(request.bytes for request in requests)
    stages = tuple(lane.link.collective_us(size, lane.world) for lane in requests[0].lanes)
    return Times(stages, cluster.packing_us(size), cluster.packing_us(size))


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of collective, or of several that follow each other.

    Args:
        noun: for messages: "all-gather".
        opaque: name of the operator that tracing leaves, for one tensor; its last argument is a text.
        bucket: the record of what one collective carries.
        launch: for each stage that buckets may have, by its name, what starts it: on the input tensors, or on what
            the wait for the stage before returned; it returns work under way, a :class:`Pending`.
        results: the results' shapes on fake tensors: from any tensor on the device of compute, and a bucket.
        wait: for work, its stage and its bucket: waits, and returns the results of the last stage, or what the next
            one takes.
        is_ahead: started ahead of the compute that reads the results, which count as memory from then until they
            are read for the last time; else started as soon as the inputs exist, which count until the first wait.
        read: from the text of an opaque operator and its input, the bucket of it alone; None: the text is that.
        make: the bucket of several requests; None: their spec and parameters.
        times: what a bucket of several requests takes.
    """

    noun: str
    opaque: str
    bucket: type[Bucket]
    launch: Mapping[str, Callable[[Any, Any], Any]]
    results: Callable[[Tensor, Any], list[Tensor]]
    wait: Callable[[Any, str, Any], Any] = lambda work, stage, bucket: work.wait()
    is_ahead: bool = True
    read: Callable[[str, Tensor], Bucket] | None = None
    make: Callable[[Sequence[Request], Cluster], Bucket] | None = None
    times: Callable[[Sequence[Request], Cluster], Times] = ring_times

    def bucket_of_one(self, text: str, value: Tensor) -> Bucket:
        """Return what an opaque operator with this text asks for, given its input, a fake tensor."""
        bucket: Bucket = self.bucket.decode(text) if self.read is None else self.read(text, value)
        return bucket

    def bucket_of(self, requests: Sequence[Request], cluster: Cluster) -> Bucket:
        """Return what one collective of ``requests`` carries."""
        if self.make is not None:
            return self.make(requests, cluster)
        params = tuple(request.param for request in requests)
        return self.bucket(requests[0].spec, params)  # type: ignore[call-arg]


_by_opaque: WeakValueDictionary[str, Kind] = WeakValueDictionary()  # a graph holds the names of operators only
_by_stage: WeakValueDictionary[str, Kind] = WeakValueDictionary()  # as above


def register(kind: Kind) -> None:
    """Let graphs hold operators of ``kind``."""
    _by_opaque[kind.opaque] = kind
    for stage in kind.launch:
        _by_stage[stage] = kind


def of_opaque(name: str) -> Kind | None:
    """Return the kind whose opaque operator has this name."""
    return _by_opaque.get(name)


def of_stage(name: str) -> Kind:
    """Return the kind that a stage belongs to."""
    return _by_stage[name]
