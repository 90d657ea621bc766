"""A graph's timeline as SVG, PNG and trace show it: lanes of marks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from ..records import CapturedGraph, Collective
from . import figures
from .figures import SHORTEST_US, dtype_name, is_exposed, words

NAMES_IN_TIP = 10
MEMORY = "unsharded bytes in flight"


class Mark(NamedTuple):
    """Something that takes an interval of a lane.

    Its kind is "compute"; "copy": packing and unpacking; "stall": compute waits for a collective; that of a
    collective; "exposed": the part of a collective for which compute waits, on top of it; or "memory".
    """

    kind: str
    name: str
    start_us: float
    end_us: float
    tip: str  # the explanation, in lines
    data: Mapping[str, object]  # what a trace says about it
    label: str = ""  # a collective's index, or the block that a region is called for
    params: Sequence[str] = ()  # names of the parameters in a collective's bucket


def lay_out(graph: CapturedGraph) -> dict[str, list[Mark]]:
    """Return lanes: compute, as many of collectives as run at the same time, memory. Marks do not overlap."""
    links = _links(graph)
    names = [f"communication {index}" for index in range(1, len(links) + 1)] if links[1:] else ["communication"]
    return {"compute": _compute(graph), **dict(zip(names, links, strict=True)), MEMORY: list(_memory(graph))}


def _compute(graph: CapturedGraph) -> list[Mark]:
    """Return spans of compute; the gaps between them are stalls where compute waits for a collective, else copies."""
    marks = []
    for span in graph.compute:
        what = span.block or f"{figures.counted(span.nodes, 'node')} from {span.first}"
        at = span.start_us, span.end_us
        mark = _mark("compute", span.block or span.first, at, f"compute: {what}", nodes=span.nodes)
        marks.append(mark._replace(label=span.block))
    for number, collective in sorted(enumerate(graph.collectives), key=lambda item: item[1].end_us):
        name, verdict = f"waits for #{number}", collective.verdict
        for at in _free(marks, max(collective.end_us - collective.exposed_us, 0.0), collective.end_us):
            stall = _mark("stall", name, at, f"stall: {name} {words(collective.kind)}", verdict, verdict=verdict)
            insort(marks, stall, key=attrgetter("start_us"))
    free = _free(marks, 0.0, graph.total_us)
    return marks + [_mark("copy", "packs or unpacks", at, "packs or unpacks a bucket") for at in free]


def _mark(kind: str, name: str, at: tuple[float, float], title: str, /, *notes: str, **data: object) -> Mark:
    """Return a mark from ``at[0]`` to ``at[1]`` microseconds; its tip has a title, its times and notes."""
    start_us, end_us = at
    times = map(figures.duration, (max(end_us - start_us, 0.0), start_us, end_us))
    tip = "\n".join([title, "{}, from {} to {}".format(*times), *notes])
    return Mark(kind, name, start_us, end_us, tip, data)


def _free(marks: Sequence[Mark], start_us: float, end_us: float) -> list[tuple[float, float]]:
    """Return the parts from ``start_us`` to ``end_us`` that no mark covers; ``marks`` are in order and disjoint."""
    inside = [mark for mark in marks if start_us < mark.end_us and mark.start_us < end_us]
    starts, ends = [start_us, *(mark.end_us for mark in inside)], [*(mark.start_us for mark in inside), end_us]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if end - start >= SHORTEST_US]


def _links(graph: CapturedGraph) -> list[list[Mark]]:
    lanes: list[list[Mark]] = [[]]
    for number, collective in sorted(enumerate(graph.collectives), key=lambda item: item[1].start_us):
        lane = next((lane for lane in lanes if not lane or lane[-1].end_us <= collective.start_us), None)
        if lane is None:
            lanes.append(lane := [])
        lane += _transfer(number, collective)
    return lanes


def _transfer(number: int, collective: Collective) -> Iterator[Mark]:
    kind, params, at = words(collective.kind), collective.params, (collective.start_us, collective.end_us)
    size = f"{figures.size(collective.bytes)} of {dtype_name(collective.dtype)}"
    title = f"#{number} {kind}: {size} over {collective.world} ranks"
    cost = f"{figures.duration(collective.exposed_us)} " if is_exposed(collective) else ""
    more = [f"and {len(params) - NAMES_IN_TIP} more"] if len(params) > NAMES_IN_TIP else []
    notes = (cost + collective.verdict, *params[:NAMES_IN_TIP], *more)
    mark = _mark(kind, f"#{number} {kind}", at, title, *notes, **vars(collective))
    yield mark._replace(label=f"#{number}", params=params)
    if is_exposed(collective):
        start_us = max(mark.start_us, mark.end_us - collective.exposed_us)
        yield mark._replace(kind="exposed", start_us=start_us, tip="")


def _memory(graph: CapturedGraph) -> Iterator[Mark]:
    starts = [step.start_us for step in graph.memory]
    ends = [*starts[1:], max([graph.total_us, *starts])]
    for step, end_us in zip(graph.memory, ends, strict=False):
        size = figures.size(step.bytes)
        yield _mark("memory", size, (step.start_us, end_us), size, bytes=step.bytes)
