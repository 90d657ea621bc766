"""The lanes of a graph's timeline as the page, the picture and the trace draw them.

It must not know pixels or formats.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .records import CapturedGraph, Collective, ComputeSpan

SHORTEST_US = 0.01  # less is not shown; rounding leaves less between two spans


@dataclass(frozen=True)
class Interval:
    """From ``start_us`` to ``end_us``."""

    start_us: float
    end_us: float

    @property
    def length_us(self) -> float:
        """Never negative."""
        return max(0.0, self.end_us - self.start_us)

    def within(self, other: Interval) -> Interval:
        """Return what both cover; of length 0 if nothing."""
        start = max(self.start_us, other.start_us)
        return Interval(start, max(start, min(self.end_us, other.end_us)))


@dataclass(frozen=True)
class Stall:
    """Compute stands still for the collective with index ``number``."""

    number: int
    at: Interval


@dataclass(frozen=True)
class Transfer:
    """A collective, its index, when it has the link, and for which part of that compute stands still."""

    number: int
    collective: Collective
    at: Interval
    exposed: Interval


@dataclass(frozen=True)
class Level:
    """So many unsharded bytes are in flight."""

    bytes: int
    at: Interval


@dataclass(frozen=True)
class Lanes:
    """A graph's lanes; within each nothing overlaps.

    Args:
        compute: spans of compute.
        stalls: gaps between them that collectives cause.
        copies: the rest of the gaps, where buckets are packed and unpacked.
        links: transfers, in as many lanes as there are at the same time.
        levels: the memory curve.
        end_us: when everything is done.
    """

    compute: tuple[ComputeSpan, ...]
    stalls: tuple[Stall, ...]
    copies: tuple[Interval, ...]
    links: tuple[tuple[Transfer, ...], ...]
    levels: tuple[Level, ...]
    end_us: float


def lay_out(graph: CapturedGraph) -> Lanes:
    """Return the lanes of a graph."""
    whole = Interval(0.0, graph.total_us)
    busy = [Interval(span.start_us, span.end_us) for span in graph.compute]
    stalls = tuple(_stalls(graph, list(_gaps(busy, whole))))
    return Lanes(
        compute=graph.compute,
        stalls=stalls,
        copies=tuple(_gaps([*busy, *(stall.at for stall in stalls)], whole)),
        links=_links(graph),
        levels=_levels(graph),
        end_us=graph.total_us,
    )


def is_exposed(collective: Collective) -> bool:
    """Tell whether compute stands still for it long enough to speak of."""
    return collective.exposed_us >= SHORTEST_US


def link_names(lanes: Lanes) -> list[str]:
    """Return a name for each of :attr:`Lanes.links`."""
    several = len(lanes.links) > 1
    return [f"communication {index + 1}" if several else "communication" for index in range(len(lanes.links))]


def _gaps(busy: Iterable[Interval], whole: Interval) -> Iterator[Interval]:
    """Yield the parts of ``whole`` that no interval covers."""
    free_from = whole.start_us
    for interval in [*sorted(busy, key=lambda i: i.start_us), Interval(whole.end_us, whole.end_us)]:
        gap = Interval(free_from, min(interval.start_us, whole.end_us))
        if gap.length_us >= SHORTEST_US:
            yield gap
        free_from = max(free_from, interval.end_us)


def _stalls(graph: CapturedGraph, gaps: list[Interval]) -> Iterator[Stall]:
    ends = [gap.end_us for gap in gaps]
    free_from = 0.0
    for number, collective in sorted(enumerate(graph.collectives), key=lambda item: (item[1].end_us, item[0])):
        exposed = _exposed(collective)
        for gap in gaps[bisect_right(ends, exposed.start_us) :]:
            part = Interval(max(exposed.start_us, free_from), exposed.end_us).within(gap)
            if part.length_us >= SHORTEST_US:
                yield Stall(number, part)
                free_from = part.end_us
            if gap.end_us >= exposed.end_us:
                break


def _exposed(collective: Collective) -> Interval:
    """Return when compute stands still for it: up to its end, beginning perhaps while the link is not yet free."""
    return Interval(collective.end_us - collective.exposed_us, collective.end_us)


def _links(graph: CapturedGraph) -> tuple[tuple[Transfer, ...], ...]:
    lanes: list[list[Transfer]] = [[]]
    for number, collective in sorted(enumerate(graph.collectives), key=lambda item: (item[1].start_us, item[0])):
        at = Interval(collective.start_us, collective.end_us)
        lane = next((lane for lane in lanes if not lane or lane[-1].at.end_us <= at.start_us), None)
        if lane is None:
            lane = []
            lanes.append(lane)
        lane.append(Transfer(number, collective, at, _exposed(collective).within(at)))
    return tuple(map(tuple, lanes))


def _levels(graph: CapturedGraph) -> tuple[Level, ...]:
    starts = [step.start_us for step in graph.memory]
    ends = [*starts, max([graph.total_us, *starts])][1:]
    return tuple(
        Level(step.bytes, Interval(step.start_us, end)) for step, end in zip(graph.memory, ends, strict=True)
    )
