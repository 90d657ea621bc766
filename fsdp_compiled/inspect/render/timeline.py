"""A graph's timeline as SVG, PNG and trace show it: lanes of marks.

It must not know pixels, colours or formats.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ..records import CapturedGraph, Collective, ComputeSpan
from . import figures
from .facts import SHORTEST_US, dtype_name, is_exposed, words
from .names import counted
from .plain import plain

NAMES_IN_TIP = 10


@dataclass(frozen=True)
class Mark:
    """Something that takes an interval of a lane.

    Args:
        kind: "compute"; "copy": packing and unpacking; "stall": compute waits for a collective; a collective's kind;
            "exposed": the part of a collective for which compute waits, on top of it; "memory".
        name: what it is, in a few words.
        start_us: when it begins.
        end_us: when it ends.
        title: the explanation's first line; empty for none.
        notes: its lines after the times.
        data: what a trace says about it.
        label: a collective's index.
        params: names of the parameters in a collective's bucket.
    """

    kind: str
    name: str
    start_us: float
    end_us: float
    title: str = ""
    notes: tuple[str, ...] = ()
    data: Mapping[str, object] = field(default_factory=dict)
    label: str = ""
    params: tuple[str, ...] = ()

    @property
    def tip(self) -> str:
        """The explanation, in lines."""
        length_us = max(self.end_us - self.start_us, 0.0)
        times = map(figures.duration, (length_us, self.start_us, self.end_us))
        return "\n".join([self.title, "{}, from {} to {}".format(*times), *self.notes]) if self.title else ""


MEMORY = "unsharded bytes in flight"


def lay_out(graph: CapturedGraph) -> dict[str, list[Mark]]:
    """Return lanes: compute, as many of collectives as run at the same time, memory. Marks do not overlap."""
    links = _links(graph)
    names = [f"communication {index}" if len(links) > 1 else "communication" for index in range(1, len(links) + 1)]
    return {"compute": _compute(graph), **dict(zip(names, links, strict=True)), MEMORY: list(_memory(graph))}


def _compute(graph: CapturedGraph) -> list[Mark]:
    """Return spans of compute; the gaps between them are stalls where compute waits for a collective, else copies."""
    marks = sorted(map(_span, graph.compute), key=_start_us)
    for number, collective in sorted(enumerate(graph.collectives), key=lambda item: (item[1].end_us, item[0])):
        name, verdict = f"waits for #{number}", collective.verdict
        title = f"stall: {name} {words(collective.kind)}"
        exposed_from_us = max(collective.end_us - collective.exposed_us, 0.0)
        for at in _free(marks, exposed_from_us, collective.end_us):
            insort(marks, Mark("stall", name, *at, title, (verdict,), {"verdict": verdict}), key=_start_us)
    free = _free(marks, 0.0, graph.total_us)
    return marks + [Mark("copy", "packs or unpacks", *at, title="packs or unpacks a bucket") for at in free]


def _span(span: ComputeSpan) -> Mark:
    title = f"compute: {counted(span.nodes, 'node')} from {span.first}"
    return Mark("compute", span.first, span.start_us, span.end_us, title, data={"nodes": span.nodes})


def _start_us(mark: Mark) -> float:
    return mark.start_us


def _free(marks: Sequence[Mark], start_us: float, end_us: float) -> Iterator[tuple[float, float]]:
    """Yield the parts from ``start_us`` to ``end_us`` that no mark covers; ``marks`` are in order and disjoint."""
    first = max(bisect(marks, start_us, key=_start_us) - 1, 0)
    for mark in takewhile(lambda mark: mark.start_us < end_us, marks[first:]):
        if mark.start_us - start_us >= SHORTEST_US:
            yield start_us, mark.start_us
        start_us = max(start_us, mark.end_us)
    if end_us - start_us >= SHORTEST_US:
        yield start_us, end_us


def _links(graph: CapturedGraph) -> list[list[Mark]]:
    lanes: list[list[Mark]] = [[]]
    for number, collective in sorted(enumerate(graph.collectives), key=lambda item: (item[1].start_us, item[0])):
        lane = next((lane for lane in lanes if not lane or lane[-1].end_us <= collective.start_us), None)
        if lane is None:
            lanes.append(lane := [])
        lane += _transfer(number, collective)
    return lanes


def _transfer(number: int, collective: Collective) -> Iterator[Mark]:
    start_us, end_us, params = collective.start_us, collective.end_us, collective.params
    name = f"#{number} {words(collective.kind)}"
    size = f"{figures.size(collective.bytes)} of {dtype_name(collective.dtype)}"
    cost = f"{figures.duration(collective.exposed_us)} " if is_exposed(collective) else ""
    more = [f"and {len(params) - NAMES_IN_TIP} more"] if len(params) > NAMES_IN_TIP else []
    yield Mark(
        words(collective.kind),
        name,
        start_us,
        end_us,
        title=f"{name}: {size} over {collective.world} ranks",
        notes=(cost + collective.verdict, *params[:NAMES_IN_TIP], *more),
        data=plain(collective),
        label=f"#{number}",
        params=params,
    )
    if is_exposed(collective):
        yield Mark("exposed", name, max(start_us, end_us - collective.exposed_us), end_us)


def _memory(graph: CapturedGraph) -> Iterator[Mark]:
    starts = [step.start_us for step in graph.memory]
    ends = [*starts, max([graph.total_us, *starts])][1:]
    for step, end_us in zip(graph.memory, ends, strict=True):
        size = figures.size(step.bytes)
        yield Mark("memory", size, step.start_us, end_us, size, data={"bytes": step.bytes})
