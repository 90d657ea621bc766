"""A graph's timeline and memory curve as one SVG; its classes are styled by ``page.css``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from . import facts, figures
from .lanes import Interval, Lanes, Level, Transfer, is_exposed, link_names
from .names import abbreviate
from .records import CapturedGraph

WIDTH, WIDEST, PER_BAR = 1132, 8000, 7  # pixels: usual, at most, and for each collective
EDGE, CAPTION, LANE, MEMORY, AXIS = 1, 24, 26, 96, 22
STRIP = 5  # of an exposed part keeps the colour of the collective's kind
HEADROOM = 1.25  # above the larger of bound and peak
CHARACTER = 7.0  # mean width at the font size of labels
NAMES_IN_TIP = 10


@dataclass(frozen=True)
class Scale:
    """Where times lie on the drawing."""

    end_us: float
    width: float

    @classmethod
    def of(cls, lanes: Lanes) -> Scale:
        """Return a scale on which even the shortest of many collectives can be told apart."""
        transfers = sum(map(len, lanes.links))
        return cls(lanes.end_us or 1.0, max(WIDTH, min(WIDEST, PER_BAR * transfers)))

    def x(self, time_us: float) -> float:
        """Return the place of a time."""
        return EDGE + (self.width - 2 * EDGE) * time_us / self.end_us

    def box(self, at: Interval, y: float, height: float) -> str:
        """Return a rectangle's attributes."""
        left, right = self.x(at.start_us), self.x(at.start_us + at.length_us)
        return f'x="{_pixels(left)}" y="{_pixels(y)}" width="{_pixels(right - left)}" height="{_pixels(height)}"'


def drawing(title: str, graph: CapturedGraph, lanes: Lanes) -> str:
    """Return an ``<svg>`` of a graph and its lanes, whose marks carry their explanation as ``data-tip``."""
    scale = Scale.of(lanes)
    y, parts = 0.0, []
    for name, marks in _lanes(graph, lanes, scale):
        parts += [_caption(y, name), f'<g transform="translate(0 {_pixels(y + CAPTION)})">', *marks, "</g>"]
        y += CAPTION + LANE
    parts += [_caption(y, "unsharded bytes in flight"), *_memory(graph, lanes, scale, y + CAPTION)]
    bottom = y + CAPTION + MEMORY
    grid = list(_grid(scale, bottom))
    size = f'width="{_pixels(scale.width)}" height="{_pixels(bottom + AXIS)}"'
    label = escape(f"Timeline of the {title} graph")
    return "\n".join([f'<svg class="timeline" role="img" aria-label="{label}" {size}>', *grid, *parts, "</svg>"])


def _lanes(graph: CapturedGraph, lanes: Lanes, scale: Scale) -> Iterator[tuple[str, list[str]]]:
    yield "compute", [*_compute(graph, lanes, scale)]
    for name, link in zip(link_names(lanes), lanes.links, strict=True):
        yield name, [mark for transfer in link for mark in _transfer(transfer, scale)]


def _compute(graph: CapturedGraph, lanes: Lanes, scale: Scale) -> Iterator[str]:
    for span in lanes.compute:
        at = Interval(span.start_us, span.end_us)
        nodes = "1 node" if span.nodes == 1 else f"{span.nodes} nodes"
        yield _mark("compute", scale.box(at, 0, LANE), f"compute: {nodes} from {span.first}", _when(at))
    for copy in lanes.copies:
        yield _mark("copy", scale.box(copy, 0, LANE), "packs or unpacks a bucket", _when(copy))
    for stall in lanes.stalls:
        waits_for = graph.collectives[stall.number]
        first = f"stall: waits for #{stall.number} {facts.words(waits_for.kind)}"
        yield _mark("stall", scale.box(stall.at, 0.5, LANE - 1), first, _when(stall.at), waits_for.verdict)


def _transfer(transfer: Transfer, scale: Scale) -> Iterator[str]:
    collective = transfer.collective
    cost = f"{figures.duration(collective.exposed_us)} " if is_exposed(collective) else ""
    tip = (
        f"#{transfer.number} {facts.words(collective.kind)}: {figures.size(collective.bytes)} "
        f"of {facts.dtype_name(collective.dtype)} over {collective.world} ranks",
        _when(transfer.at),
        cost + collective.verdict,
        *_listed(collective.params),
    )
    yield _mark(facts.words(collective.kind), scale.box(transfer.at, 0, LANE), *tip)
    if is_exposed(collective):
        yield f'<rect class="exposed" {scale.box(transfer.exposed, STRIP, LANE - STRIP)}/>'
    room = int((scale.x(transfer.at.end_us) - scale.x(transfer.at.start_us) - 10) / CHARACTER)
    number = f"#{transfer.number}"
    if room >= len(number):
        names = f" {abbreviate(collective.params, room - len(number) - 1)}" if room > len(number) + 12 else ""
        yield _text("on-bar", scale.x(transfer.at.start_us) + 5, LANE - 8, number + names)


def _listed(params: tuple[str, ...]) -> list[str]:
    more = len(params) - NAMES_IN_TIP
    return [*params[:NAMES_IN_TIP], *([f"and {more} more"] if more > 0 else [])]


def _memory(graph: CapturedGraph, lanes: Lanes, scale: Scale, y: float) -> Iterator[str]:
    top = HEADROOM * max(graph.bound_bytes, graph.peak_unsharded_bytes, 1)

    def height(count_bytes: int) -> float:
        return MEMORY * count_bytes / top

    for level in lanes.levels:
        box = scale.box(level.at, y + MEMORY - height(level.bytes), height(level.bytes))
        yield _mark("memory", box, figures.size(level.bytes), _when(level.at))
    yield f'<path class="curve" d="{_outline(lanes.levels, scale, y + MEMORY, height(1))}"/>'
    bound = y + MEMORY - height(graph.bound_bytes)
    yield _line("bound", EDGE, bound, scale.width - EDGE, bound)
    yield _text("note", EDGE + 2, bound - 5, f"bound {figures.size(graph.bound_bytes)}")
    if lanes.levels:
        peak = max(lanes.levels, key=lambda level: level.bytes)
        is_late = peak.at.start_us > 0.85 * scale.end_us
        place = scale.x(peak.at.end_us) - 4 if is_late else scale.x(peak.at.start_us) + 4
        under = y + MEMORY - height(peak.bytes) + 14
        under = under if under < y + MEMORY - 4 else y + MEMORY - height(peak.bytes) - 5  # over a low curve instead
        yield _text("note end" if is_late else "note", place, under, f"peak {figures.size(peak.bytes)}")


def _outline(levels: tuple[Level, ...], scale: Scale, base: float, per_byte: float) -> str:
    if not levels:
        return f"M{_pixels(scale.x(0))} {_pixels(base)}H{_pixels(scale.x(scale.end_us))}"
    steps = (
        f"V{_pixels(base - level.bytes * per_byte)}H{_pixels(scale.x(level.at.start_us + level.at.length_us))}"
        for level in levels
    )
    start = levels[0].at.start_us
    return f"M{_pixels(scale.x(0))} {_pixels(base)}H{_pixels(scale.x(start))}{''.join(steps)}"


def _grid(scale: Scale, bottom: float) -> Iterator[str]:
    yield _line("base", EDGE, bottom, scale.width - EDGE, bottom)
    for time_us in figures.ticks(scale.end_us, int(scale.width / 110)):
        x = scale.x(time_us)
        yield _line("grid", x, CAPTION, x, bottom)
        side = " end" if x > scale.width - 40 else " start" if x < 40 else " middle"
        yield _text(f"tick{side}", x, bottom + 16, figures.duration(time_us))


def _mark(kind: str, box: str, *tip: str) -> str:
    return f'<rect class="{kind}" {box} data-tip="{escape(chr(10).join(tip))}"/>'


def _caption(y: float, text: str) -> str:
    return _text("caption", EDGE, y + CAPTION - 6, text)


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{_pixels(x)}" y="{_pixels(y)}">{escape(text)}</text>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    places = f'x1="{_pixels(x1)}" y1="{_pixels(y1)}" x2="{_pixels(x2)}" y2="{_pixels(y2)}"'
    return f'<line class="{kind}" {places}/>'


def _when(at: Interval) -> str:
    length = figures.duration(at.length_us)
    return f"{length}, from {figures.duration(at.start_us)} to {figures.duration(at.start_us + at.length_us)}"


def _pixels(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
