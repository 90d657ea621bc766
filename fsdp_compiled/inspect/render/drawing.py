"""A graph's timeline: lanes of marks, and their drawing, of boxes, texts and lines, which SVG and PNG only paint."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from ...sharding.spec import word
from ..records import CapturedGraph, Collective
from . import figures

WIDTH, PER_BAR = 1132, 7  # pixels: usual, and the least for each collective
EDGE, CAPTION, LANE, CURVE, AXIS = 1, 24, 26, 96, 28
BOX_WIDTH, BOX_HEIGHT, GAP = 14, 12, 18  # of the legend
STRIP = 5  # of an exposed part keeps the colour of the collective's kind
HEADROOM = 1.25  # above the peak, or above the bound where that is in view
IN_VIEW = 2.0  # times the peak: a bound beyond is only named, so that the curve keeps its height
NAMES_IN_TIP = 10
MEMORY = "unsharded bytes in flight"  # name of the lane
CHARACTER = 7.0  # mean width at the font size of labels

COLOURS = {  # for light and for dark surroundings
    "paper": ("#ffffff", "#14171c"),
    "panel": ("#f6f7f9", "#1c2027"),
    "ink": ("#1b212b", "#e4e7ec"),
    "muted": ("#5a6472", "#9aa4b2"),
    "rule": ("#dde1e7", "#2f3540"),
    "compute": ("#a3acb9", "#5c6675"),
    "copy": ("#d3d8df", "#3b4350"),
    "all-gather": ("#2f6fb3", "#5f9fe4"),
    "reduce-scatter": ("#7b51b3", "#ac8be2"),
    "all-reduce": ("#1c8577", "#43b8a6"),
    "exposed": ("#d9480f", "#ff7b47"),
    "memory": ("#2f6fb3", "#5f9fe4"),
    "on-bar": ("#ffffff", "#10131a"),
}
LEGEND = ("compute", "copy", "all-gather", "reduce-scatter", "all-reduce", "exposed", "stall")  # kinds of bars
_SHARED = {"stall": "exposed", "curve": "memory", "bound": "ink", "note": "ink", "grid": "rule", "caption": "muted"}
COLOUR_OF = {kind: kind for kind in COLOURS} | _SHARED  # of each kind of shape

Anchor = Literal["start", "middle", "end"]


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
    return {"compute": _compute(graph), **dict(zip(names, links, strict=True)), MEMORY: list(_levels(graph))}


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
        title = f"stall: {name} {figures.words(collective.kind)}"
        for at in _free(marks, max(collective.end_us - collective.exposed_us, 0.0), collective.end_us):
            insort(marks, _mark("stall", name, at, title, verdict, verdict=verdict), key=attrgetter("start_us"))
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
    return [(start, end) for start, end in zip(starts, ends, strict=True) if end - start >= figures.SHORTEST_US]


def _links(graph: CapturedGraph) -> list[list[Mark]]:
    lanes: list[list[Mark]] = [[]]
    for number, collective in sorted(enumerate(graph.collectives), key=lambda item: item[1].start_us):
        lane = next((lane for lane in lanes if not lane or lane[-1].end_us <= collective.start_us), None)
        if lane is None:
            lanes.append(lane := [])
        lane += _transfer(number, collective)
    return lanes


def _transfer(number: int, collective: Collective) -> Iterator[Mark]:
    kind, params, at = figures.words(collective.kind), collective.params, (collective.start_us, collective.end_us)
    size = f"{figures.size(collective.bytes)} of {word(collective.dtype)}"
    title = f"#{number} {kind}: {size} over {collective.world} ranks"
    cost = f"{figures.duration(collective.exposed_us)} " if figures.is_exposed(collective) else ""
    more = [f"and {len(params) - NAMES_IN_TIP} more"] if len(params) > NAMES_IN_TIP else []
    notes = (cost + collective.verdict, *params[:NAMES_IN_TIP], *more)
    mark = _mark(kind, f"#{number} {kind}", at, title, *notes, **vars(collective))
    yield mark._replace(label=f"#{number}", params=params)
    if figures.is_exposed(collective):
        start_us = max(mark.start_us, mark.end_us - collective.exposed_us)
        yield mark._replace(kind="exposed", start_us=start_us, tip="")


def _levels(graph: CapturedGraph) -> Iterator[Mark]:
    starts = [step.start_us for step in graph.memory]
    ends = [*starts[1:], max([graph.total_us, *starts])]
    for step, end_us in zip(graph.memory, ends, strict=False):
        size = figures.size(step.bytes)
        yield _mark("memory", size, (step.start_us, end_us), size, bytes=step.bytes)


class Box(NamedTuple):
    """A rectangle, and what to show where the pointer is on it."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    tip: str = ""


class Label(NamedTuple):
    """A line of text on the baseline ``y``."""

    kind: str
    x: float
    y: float
    text: str
    anchor: Anchor = "start"  # the part of the text that is at ``x``


class Line(NamedTuple):
    """Straight lines from point to point."""

    kind: str
    points: tuple[tuple[float, float], ...]


Shape = Box | Label | Line


class Drawing(NamedTuple):
    """Shapes in pixels, the origin at the upper left; later ones cover earlier ones."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


class _Scale(NamedTuple):
    end_us: float
    width: float

    def x(self, time_us: float) -> float:
        return EDGE + (self.width - 2 * EDGE) * time_us / self.end_us

    def box(self, mark: Mark, y: float, height: float) -> Box:
        left, right = self.x(mark.start_us), self.x(mark.end_us)
        return Box(mark.kind, left, y, max(right - left, 0.0), height, mark.tip)


def draw(graph: CapturedGraph, widest: int = WIDTH, until_us: float = 0.0) -> Drawing:
    """Return the drawing of a graph, wider than usual, up to ``widest``, where there are many collectives.

    Its time axis ends at ``until_us`` or with the graph, whichever is later.
    """
    scale = _Scale(max(graph.total_us, until_us) or 1.0, max(WIDTH, min(widest, PER_BAR * len(graph.collectives))))
    *lanes, (memory, levels) = lay_out(graph).items()
    shapes = list[Shape]()
    top = CAPTION
    for name, marks in lanes:
        shapes += [Label("caption", EDGE, top - 6, name), *_bars(marks, scale, top)]
        top += LANE + CAPTION
    bottom = top + CURVE
    shapes += [Label("caption", EDGE, top - 6, memory), *_memory(levels, graph, scale, bottom)]
    legend = _legend({shape.kind for shape in shapes}, bottom + AXIS)
    return Drawing(scale.width, bottom + AXIS + BOX_HEIGHT, (*_grid(scale, bottom), *shapes, *legend))


def _bars(marks: Sequence[Mark], scale: _Scale, y: float) -> list[Shape]:
    """Return a bar for each mark and, where there is room, a collective's index and parameters, or a block's name."""
    bars, labels = [], []
    for mark in marks:
        strip = STRIP if mark.kind == "exposed" else 0
        bars.append(bar := scale.box(mark, y + strip, LANE - strip))
        room = int((bar.width - 10) / CHARACTER) - len(mark.label)
        if mark.label and room >= 0:
            names = f" {figures.abbreviate(mark.params, room - 1)}" if mark.params and room > 12 else ""
            labels.append(Label("on-bar", bar.x + 5, y + LANE - 8, mark.label + names))
    return [*bars, *labels]


def _memory(marks: Sequence[Mark], graph: CapturedGraph, scale: _Scale, base: float) -> Iterator[Shape]:
    peak_bytes, bound_bytes = graph.peak_unsharded_bytes, graph.bound_bytes
    in_view = bound_bytes <= IN_VIEW * peak_bytes or not peak_bytes
    per_byte = CURVE / (HEADROOM * max(bound_bytes if in_view else 0, peak_bytes, 1))
    heights = [per_byte * step.bytes for step in graph.memory]
    boxes = [scale.box(mark, base - height, height) for mark, height in zip(marks, heights, strict=True)]
    yield from boxes
    steps = [point for box in boxes for point in ((box.x, box.y), (box.x + box.width, box.y))]
    yield Line("curve", ((EDGE, base), (steps[0][0] if steps else scale.width - EDGE, base), *steps))
    bound = base - per_byte * bound_bytes
    if in_view:
        yield Line("bound", ((EDGE, bound), (scale.width - EDGE, bound)))
        yield Label("note", EDGE + 2, bound - 5, f"bound {figures.size(bound_bytes)}")
    else:
        yield Label("caption", scale.width - EDGE, base - CURVE - 6, f"bound {figures.size(bound_bytes)}", "end")
    if boxes:
        peak = max(boxes, key=lambda box: box.height)
        is_late = peak.x > 0.85 * scale.width
        y = peak.y + 14 if peak.height > 18 else peak.y - 5  # above a low curve
        note = f"peak {figures.size(peak_bytes)}"
        yield Label("note", peak.x + (peak.width - 4 if is_late else 4), y, note, "end" if is_late else "start")


def _grid(scale: _Scale, bottom: float) -> Iterator[Shape]:
    yield Line("grid", ((EDGE, bottom), (scale.width - EDGE, bottom)))
    for time_us in figures.ticks(scale.end_us, int(scale.width / 110)):
        x = scale.x(time_us)
        yield Line("grid", ((x, CAPTION), (x, bottom)))
        anchor: Anchor = "end" if x > scale.width - 40 else "start" if x < 40 else "middle"
        yield Label("caption", x, bottom + 16, figures.duration(time_us), anchor)


def _legend(kinds: set[str], y: float) -> Iterator[Shape]:
    x = float(EDGE)
    for kind in (kind for kind in LEGEND if kind in kinds):
        yield Box(kind, x, y, BOX_WIDTH, BOX_HEIGHT)
        yield Label("caption", x + BOX_WIDTH + 6, y + BOX_HEIGHT - 2, kind)
        x += BOX_WIDTH + 6 + CHARACTER * len(kind) + GAP
