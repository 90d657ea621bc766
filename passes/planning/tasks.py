"""What a schedule places: tasks in a graph's compute, actions on them, and the memory that they take.

A task is a bucket as the schedule sees it. Positions count compute nodes; "at position p" means before compute node p
runs, and the position after the last one is the end of the graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

Kind = Literal["all_gather", "reduction", "all_reduce"]


@dataclass(frozen=True)
class AllGatherTask:
    """An all-gather; times are in microseconds."""

    bytes: int  # of the unsharded parameters
    us: float  # time on the link
    first: int  # position of the first compute node that reads the result
    last: int  # position of the last one
    earliest: int = 0  # position before which its input does not exist
    kept_bytes: int = 0  # of ``bytes``, what the user keeps unsharded until backward; no part of the bound
    lane: str = ""  # name of the link
    pack_us: float = 0.0  # compute time of packing
    unpack_us: float = 0.0  # compute time of unpacking

    @property
    def ready(self) -> int:
        """Position at which its input exists."""
        return self.earliest

    @property
    def needed(self) -> int:
        """Position of the first compute node that reads the result."""
        return self.first

    @property
    def counted(self) -> int:
        """Bytes in flight from launch to the last read."""
        return self.bytes - self.kept_bytes


@dataclass(frozen=True)
class ReductionTask:
    """A reduction: a reduce-scatter, an all-reduce, or one after the other; times are in microseconds.

    The bytes of a gradient count from the compute node that makes it until the reduction is waited for.
    """

    parts: tuple[tuple[int, int], ...]  # of each gradient: position of that node, -1 for a graph input, and bytes
    us: float  # time of the first collective on its link
    needed: int  # position of the first compute node that reads the result
    lane: str = ""  # name of the link
    all_reduce_us: float = 0.0  # time of an all-reduce that follows; 0 for none
    all_reduce_lane: str = ""  # name of its link
    pack_us: float = 0.0  # compute time of packing
    host_us: float = 0.0  # time of the copy to the host, which starts as soon as the result is complete; 0 for none

    @property
    def made(self) -> int:
        """Position from which on gradients exist."""
        return max(min(position for position, _ in self.parts), 0)

    @property
    def ready(self) -> int:
        """Position at which all gradients exist."""
        return max(position for position, _ in self.parts) + 1

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class Load:
    """One graph's work: compute in a fixed order, and the collectives to place in it, in any order."""

    compute_us: tuple[float, ...]  # estimated time of each compute node
    all_gathers: tuple[AllGatherTask, ...]
    reductions: tuple[ReductionTask, ...] = ()
    compute_blocked_fraction: float = 0.0  # see :class:`Cluster`

    @cached_property
    def clock(self) -> list[float]:
        """When each position is reached by compute alone, microseconds."""
        return [0.0, *accumulate(self.compute_us)]


@dataclass(frozen=True)
class Action:
    """The launch of a collective, or the wait for it, at a position."""

    position: int
    verb: Literal["launch", "wait"]
    kind: Kind
    index: int


# ---- memory ----


def least_bytes(load: Load) -> list[int]:
    """Return, for each position, the bytes in flight while it runs if everything is launched as late as possible
    and every reduction is waited for at once: what no schedule of these buckets can go below.
    """
    return bytes_between(load, [g.first for g in load.all_gathers], [r.ready for r in load.reductions])


def bytes_in_flight(load: Load, actions: Iterable[Action]) -> list[int]:
    """Return, for each position, the bytes in flight while it runs under a schedule."""
    at = {(action.verb, action.kind, action.index): action.position for action in actions}
    launched = [at["launch", "all_gather", index] for index in range(len(load.all_gathers))]
    return bytes_between(load, launched, [at["wait", "reduction", index] for index in range(len(load.reductions))])


def bytes_between(load: Load, launched: Iterable[int], reduced: Iterable[int]) -> list[int]:
    """Return the bytes in flight at each position, given where all-gathers start and where reductions are done."""
    change = [0] * (len(load.compute_us) + 2)
    for all_gather, start in zip(load.all_gathers, launched, strict=True):
        change[start] += all_gather.counted
        change[all_gather.last + 1] -= all_gather.counted
    for reduction, end in zip(load.reductions, reduced, strict=True):
        for made, size in reduction.parts:
            change[max(made, 0)] += size
        change[end] -= reduction.bytes
    return list(accumulate(change))[:-1]


# ---- fewer positions ----


def compress(load: Load) -> tuple[Load, list[int]]:
    """Return the same load with one position for each run of compute that nothing begins or ends in.

    The list tells for each of its positions, the end included, the one in ``load``.
    """
    marks = {0, len(load.compute_us)}
    for all_gather in load.all_gathers:
        marks |= {all_gather.earliest, all_gather.first, all_gather.last + 1}
    for reduction in load.reductions:
        marks |= {reduction.needed, *(p for made, _ in reduction.parts for p in (made, made + 1))}
    positions = sorted(mark for mark in marks if 0 <= mark <= len(load.compute_us))

    def within(position: int) -> int:
        return bisect_right(positions, position) - 1

    all_gathers = tuple(
        replace(g, first=within(g.first), last=within(g.last), earliest=within(g.earliest)) for g in load.all_gathers
    )
    reductions = tuple(
        replace(r, parts=tuple((within(made), size) for made, size in r.parts), needed=within(r.needed))
        for r in load.reductions
    )
    compute = tuple(load.clock[b] - load.clock[a] for a, b in pairwise(positions))
    return replace(load, compute_us=compute, all_gathers=all_gathers, reductions=reductions), positions
