"""What a schedule places: tasks in a graph's compute, actions on them, and the memory that they take.

A task is a bucket as the schedule sees it. Positions count compute nodes; "at position p" means before compute node p
runs, and the position after the last one is the end of the graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

Kind = Literal["all_gather", "reduction", "all_reduce"]


@dataclass(frozen=True)
class AllGatherTask:
    """An all-gather.

    Args:
        bytes: of the unsharded parameters.
        us: time on the link, microseconds.
        first: position of the first compute node that reads the result.
        last: position of the last one.
        earliest: position before which its input does not exist.
        kept_bytes: of ``bytes``, what stays unsharded until backward by the user's decision; no part of the bound.
        lane: name of the link.
        pack_us: compute time of packing, microseconds.
        unpack_us: compute time of unpacking.
    """

    bytes: int
    us: float
    first: int
    last: int
    earliest: int = 0
    kept_bytes: int = 0
    lane: str = ""
    pack_us: float = 0.0
    unpack_us: float = 0.0

    @property
    def counted(self) -> int:
        """Bytes in flight from launch to the last read."""
        return self.bytes - self.kept_bytes


@dataclass(frozen=True)
class ReductionTask:
    """A reduction: a reduce-scatter, an all-reduce, or one after the other.

    Args:
        parts: for each gradient the position of the compute node that makes it, -1 for a graph input, and its
            bytes; they count from there until the reduction is waited for.
        us: time of the first collective on its link, microseconds.
        needed: position of the first compute node that reads the result.
        lane: name of the link.
        all_reduce_us: time of an all-reduce that follows; 0 for none.
        all_reduce_lane: name of its link.
        pack_us: compute time of packing.
        host_us: time of the copy to the host, which starts as soon as the result is complete; 0 for none.
    """

    parts: tuple[tuple[int, int], ...]
    us: float
    needed: int
    lane: str = ""
    all_reduce_us: float = 0.0
    all_reduce_lane: str = ""
    pack_us: float = 0.0
    host_us: float = 0.0

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
    """One graph's work: compute in a fixed order, and the collectives to place in it.

    Args:
        compute_us: estimated time of each compute node.
        all_gathers: in any order.
        reductions: in any order.
        compute_blocked_fraction: see :class:`Cluster`.
    """

    compute_us: tuple[float, ...]
    all_gathers: tuple[AllGatherTask, ...]
    reductions: tuple[ReductionTask, ...] = ()
    compute_blocked_fraction: float = 0.0


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
    change = [0] * (len(load.compute_us) + 2)
    for all_gather in load.all_gathers:
        change[all_gather.first] += all_gather.counted
        change[all_gather.last + 1] -= all_gather.counted
    for reduction in load.reductions:
        for made, size in reduction.parts:
            change[max(made, 0)] += size
        change[reduction.ready] -= reduction.bytes
    return list(accumulate(change))[:-1]


def bytes_in_flight(load: Load, actions: Iterable[Action]) -> list[int]:
    """Return, for each position, the bytes in flight while it runs under a schedule."""
    change = [0] * (len(load.compute_us) + 2)
    for action in actions:
        if action.verb == "launch" and action.kind == "all_gather":
            change[action.position] += load.all_gathers[action.index].counted
            change[load.all_gathers[action.index].last + 1] -= load.all_gathers[action.index].counted
        elif action.verb == "wait" and action.kind == "reduction":
            change[action.position] -= load.reductions[action.index].bytes
    for reduction in load.reductions:
        for made, size in reduction.parts:
            change[max(made, 0)] += size
    return list(accumulate(change))[:-1]


# ---- fewer positions ----


def compress(load: Load) -> tuple[Load, list[int]]:
    """Return the same load with one position for each run of compute that nothing begins or ends in.

    Returns:
        The smaller load, and for each of its positions, the end included, the position in ``load``.
    """
    marks = {0, len(load.compute_us)}
    for all_gather in load.all_gathers:
        marks |= {all_gather.earliest, all_gather.first, all_gather.last + 1}
    for reduction in load.reductions:
        marks |= {reduction.needed, *(p for made, _ in reduction.parts for p in (made, made + 1))}
    positions = sorted(mark for mark in marks if 0 <= mark <= len(load.compute_us))
    clock = [0.0, *accumulate(load.compute_us)]
    place = {position: index for index, position in enumerate(positions)}

    def within(position: int) -> int:
        return bisect_right(positions, position) - 1

    all_gathers = tuple(
        replace(g, first=place[g.first], last=within(g.last), earliest=place[g.earliest]) for g in load.all_gathers
    )
    reductions = tuple(
        replace(r, parts=tuple((within(made), size) for made, size in r.parts), needed=place[r.needed])
        for r in load.reductions
    )
    compute = tuple(clock[b] - clock[a] for a, b in pairwise(positions))
    return replace(load, compute_us=compute, all_gathers=all_gathers, reductions=reductions), positions
