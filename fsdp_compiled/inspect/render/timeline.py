"""A graph's timeline as SVG, PNG and trace show it: lanes of marks.

It must not know pixels, colours or formats.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
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
    tip: str = ""  # the explanation, in lines
    data: Mapping[str, object] = MappingProxyType({})  # what a trace says about it
    label: str = ""  # a collective's index
    params: Sequence[str] = ()  # names of the parameters in a collective's bucket


def _tip(title: str, start_us: float, end_us: float, *notes: str) -> str:
    times = map(figures.duration, (max(end_us - start_us, 0.0), start_us, end_us))
    return "\n".join([title, "{}, from {} to {}".format(*times), *notes])


def lay_out(graph: CapturedGraph) -> dict[str, list[Mark]]:
    """Return lanes: compute, as many of collectives as run at the same time, memory. Marks do not overlap."""
    links = _links(graph)
    names = [f"communication {index}" for index in range(1, len(links) + 1)] if links[1:] else ["communication"]
    return {"compute": _compute(graph), **dict(zip(names, links, strict=True)), MEMORY: list(_memory(graph))}


def _compute(graph: CapturedGraph) -> list[Mark]:
    """Return spans of compute; the gaps between them are stalls where compute waits for a collective, else copies."""
    marks = []
    for span in graph.compute:
        at = span.start_us, span.end_us
        tip = _tip(f"compute: {figures.counted(span.nodes, 'node')} from {span.first}", *at)
        marks.append(Mark("compute", span.first, *at, tip, {"nodes": span.nodes}))
    for number, collective in sorted(enumerate(graph.collectives), key=lambda item: item[1].end_us):
        name, verdict = f"waits for #{number}", collective.verdict
        for at in _free(marks, max(collective.end_us - collective.exposed_us, 0.0), collective.end_us):
            tip = _tip(f"stall: {name} {words(collective.kind)}", *at, verdict)
            insort(marks, Mark("stall", name, *at, tip, {"verdict": verdict}), key=attrgetter("start_us"))
    free = _free(marks, 0.0, graph.total_us)
    return marks + [Mark("copy", "packs or unpacks", *at, _tip("packs or unpacks a bucket", *at)) for at in free]


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
    (start_us, end_us), params = (collective.start_us, collective.end_us), collective.params
    kind = words(collective.kind)
    name = f"#{number} {kind}"
    size = f"{figures.size(collective.bytes)} of {dtype_name(collective.dtype)}"
    cost = f"{figures.duration(collective.exposed_us)} " if is_exposed(collective) else ""
    more = [f"and {len(params) - NAMES_IN_TIP} more"] if len(params) > NAMES_IN_TIP else []
    notes = (cost + collective.verdict, *params[:NAMES_IN_TIP], *more)
    tip = _tip(f"{name}: {size} over {collective.world} ranks", start_us, end_us, *notes)
    yield Mark(kind, name, start_us, end_us, tip, vars(collective), f"#{number}", params)
    if is_exposed(collective):
        yield Mark("exposed", name, max(start_us, end_us - collective.exposed_us), end_us)


def _memory(graph: CapturedGraph) -> Iterator[Mark]:
    starts = [step.start_us for step in graph.memory]
    ends = [*starts[1:], max([graph.total_us, *starts])]
    for step, end_us in zip(graph.memory, ends, strict=False):
        size = figures.size(step.bytes)
        yield Mark("memory", size, step.start_us, end_us, _tip(size, step.start_us, end_us), {"bytes": step.bytes})
