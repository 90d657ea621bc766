"""A graph's timeline as boxes, texts and lines with places, colours and a legend, which SVG and PNG only paint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from ..records import CapturedGraph
from . import figures
from .timeline import Mark, lay_out

WIDTH, PER_BAR = 1132, 7  # pixels: usual, and the least for each collective
EDGE, CAPTION, LANE, CURVE, AXIS = 1, 24, 26, 96, 28
BOX_WIDTH, BOX_HEIGHT, GAP = 14, 12, 18  # of the legend
STRIP = 5  # of an exposed part keeps the colour of the collective's kind
HEADROOM = 1.25  # above the peak, or above the bound where that is in view
IN_VIEW = 2.0  # times the peak: a bound beyond is only named, so that the curve keeps its height
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


class Box(NamedTuple):
    """A rectangle, and what to show where the pointer is on it."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    tip: str = ""


class Text(NamedTuple):
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


Shape = Box | Text | Line


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
        shapes += [Text("caption", EDGE, top - 6, name), *_bars(marks, scale, top)]
        top += LANE + CAPTION
    bottom = top + CURVE
    shapes += [Text("caption", EDGE, top - 6, memory), *_memory(levels, graph, scale, bottom)]
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
            labels.append(Text("on-bar", bar.x + 5, y + LANE - 8, mark.label + names))
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
        yield Text("note", EDGE + 2, bound - 5, f"bound {figures.size(bound_bytes)}")
    else:
        yield Text("caption", scale.width - EDGE, base - CURVE - 6, f"bound {figures.size(bound_bytes)}", "end")
    if boxes:
        peak = max(boxes, key=lambda box: box.height)
        is_late = peak.x > 0.85 * scale.width
        y = peak.y + 14 if peak.height > 18 else peak.y - 5  # above a low curve
        note = f"peak {figures.size(peak_bytes)}"
        yield Text("note", peak.x + (peak.width - 4 if is_late else 4), y, note, "end" if is_late else "start")


def _grid(scale: _Scale, bottom: float) -> Iterator[Shape]:
    yield Line("grid", ((EDGE, bottom), (scale.width - EDGE, bottom)))
    for time_us in figures.ticks(scale.end_us, int(scale.width / 110)):
        x = scale.x(time_us)
        yield Line("grid", ((x, CAPTION), (x, bottom)))
        anchor: Anchor = "end" if x > scale.width - 40 else "start" if x < 40 else "middle"
        yield Text("caption", x, bottom + 16, figures.duration(time_us), anchor)


def _legend(kinds: set[str], y: float) -> Iterator[Shape]:
    x = float(EDGE)
    for kind in (kind for kind in LEGEND if kind in kinds):
        yield Box(kind, x, y, BOX_WIDTH, BOX_HEIGHT)
        yield Text("caption", x + BOX_WIDTH + 6, y + BOX_HEIGHT - 2, kind)
        x += BOX_WIDTH + 6 + CHARACTER * len(kind) + GAP
