"""Kinds of collectives: what each is to those who bucket, schedule, lower, inspect and run it.

A kind is a record in the file of its recipe, such as ``ALL_GATHER`` in :mod:`fsdp_compiled.collectives.all_gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from ..sharding.spec import Bucket, ParamSpec, Spec
from .cost import Cluster, Lane, Times


@dataclass(frozen=True, eq=False)
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
    inputs_persist: bool = True  # see :class:`AllGatherBucket`
    key: Hashable = 0  # requests with equal keys may share a bucket


def ring_times(requests: Sequence[Request], cluster: Cluster) -> Times:
    """Return the times of collectives that move all bytes around a ring once, packed and unpacked by compute."""
    size = sum(request.bytes for request in requests)
    stages = tuple(lane.link.collective_us(size, lane.world) for lane in requests[0].lanes)
    return Times(stages, cluster.packing_us(size), cluster.packing_us(size))


def packed_bucket(requests: Sequence[Request], cluster: Cluster) -> Bucket:
    """Return the bucket of a spec and parameters, without more."""
    return requests[0].kind.bucket(requests[0].spec, tuple(request.param for request in requests))  # type: ignore[call-arg]


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
        wait: for work, its stage and its bucket: waits, and returns the last stage's results, or what the next takes.
        is_ahead: started ahead of the compute that reads the results, which count as memory from then until they
            are read for the last time; else started as soon as the inputs exist, which count until the first wait.
        read: from the text of an opaque operator and its input, the bucket of it alone; None: the text is that.
        make: the bucket of several requests, for a cluster.
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
    make: Callable[[Sequence[Request], Cluster], Bucket] = packed_bucket
    times: Callable[[Sequence[Request], Cluster], Times] = ring_times

    def bucket_of_one(self, text: str, value: Tensor) -> Bucket:
        """Return what an opaque operator with this text asks for, given its input, a fake tensor."""
        return self.read(text, value) if self.read is not None else self.bucket.decode(text)


by_operator: WeakValueDictionary[str, Kind] = WeakValueDictionary()  # as a graph holds the names of operators only


def register(kind: Kind) -> None:
    """Let graphs hold operators of ``kind``: the opaque one, and a launch and a wait for each stage."""
    for name in (kind.opaque, *(f"{verb}_{stage}" for stage in kind.launch for verb in ("launch", "wait"))):
        by_operator[name] = kind
