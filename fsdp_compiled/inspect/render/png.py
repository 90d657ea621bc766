"""A capture as a PNG: the drawings of its graphs below each other."""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import TYPE_CHECKING

from ..records import CapturedModel
from . import figures
from .drawing import COLOUR_OF, COLOURS, Box, Label, Line, Shape, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, GRAPH, HEAD, MARGIN, DPI = 1440, 360, 96, 24, 120  # pixels
TITLE = 28  # of a graph, in the drawing's pixels
FONT = 8  # points
VISIBLE = 2  # pixels of a box's width of which a line around it leaves something
PAPER, INK = COLOURS["paper"][0], COLOURS["ink"][0]
ALIGNMENT = {"start": "left", "middle": "center", "end": "right"}


def png(capture: CapturedModel) -> bytes:
    """Return a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Capture.save: a .png is drawn by matplotlib, which is not installed; "
            "run pip install 'fsdp-compiled[inspect]'"
        ) from error
    height = HEAD + GRAPH * len(capture.graphs)
    figure = Figure((WIDTH / DPI, height / DPI), DPI, facecolor=PAPER)
    head = f"{capture.model}: {figures.about(capture)}"
    figure.text(0.5, 1 - 0.4 * HEAD / height, head, size=11, color=INK, ha="center", parse_math=False)
    for index, (title, graph) in enumerate(figures.titled(capture.graphs), start=1):
        drawing = draw(graph)
        bottom = 1 - (0.7 * HEAD + GRAPH * index) / height
        axes = figure.add_axes((MARGIN / WIDTH, bottom, 1 - 2 * MARGIN / WIDTH, GRAPH / height))
        axes.set(xlim=(0, drawing.width), ylim=(drawing.height, -TITLE))
        axes.axis("off")
        head = f"{title}: {figures.in_line(figures.graph_facts(graph))}"
        for order, shape in enumerate((Label("note", 0, -6, head), *drawing.shapes)):
            _paint(axes, shape, order)
    file = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a name, in matplotlib's font; it shows a box
        FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})
    return file.getvalue()


def _paint(axes: Axes, shape: Shape, order: int) -> None:
    colour, _ = COLOURS[COLOUR_OF[shape.kind]]
    match shape:
        case Label(_, x, y, text, anchor):
            axes.text(x, y, text, size=FONT, color=colour, ha=ALIGNMENT[anchor], zorder=order, parse_math=False)
        case Line(kind, points):
            dashes = "--" if kind == "bound" else "-"
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, linestyle=dashes, zorder=order)
        case Box(kind, x, y, width, height):
            corners = (x, x + width, x + width, x), (y, y, y + height, y + height)
            fill, edge, hatch = (PAPER, colour, "/////") if kind == "stall" else (colour, PAPER, "")
            (patch,) = axes.fill(*corners, facecolor=fill, edgecolor=edge, hatch=hatch, zorder=order)
            patch.set_linewidth(0.5 if width > VISIBLE else 0.0)
            if kind == "memory":
                patch.set(alpha=0.25, linewidth=0.0, antialiased=False)
