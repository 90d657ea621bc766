"""A capture as a PNG: each graph's timeline, and beneath it the memory curve on the same axis."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

from . import facts, figures
from .lanes import Interval, Lanes, Transfer, is_exposed, lay_out, link_names
from .palette import LIGHT
from .records import CapturedGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .report import Capture

WIDTH_IN, GRAPH_IN, HEAD_IN, DPI = 12.0, 3.0, 0.8, 120
BAR = 0.8  # of a lane's height
STRIP = 0.13  # likewise; there an exposed part keeps the colour of the collective's kind
LABELLED = 0.02  # of the timeline that a bar must have for its number
MANY = 100  # bars in a lane of which the lines around them would leave nothing
HATCHED = {"facecolor": LIGHT["paper"], "edgecolor": LIGHT["exposed"], "hatch": "/////"}


def picture(capture: Capture) -> bytes:
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
    rows = len(capture.graphs)
    figure = Figure((WIDTH_IN, HEAD_IN + GRAPH_IN * rows), DPI, facecolor=LIGHT["paper"], layout="constrained")
    figure.suptitle(facts.headline(capture), fontsize=11, color=LIGHT["ink"], parse_math=False)
    if rows:
        axes = figure.subplots(2 * rows, 1, squeeze=False, gridspec_kw={"height_ratios": [3, 2] * rows})[:, 0]
        for index, (title, graph) in enumerate(zip(facts.titles(capture.graphs), capture.graphs, strict=True)):
            lanes = lay_out(graph)
            _draw_lanes(axes[2 * index], f"{title}: {_summary(graph)}", lanes)
            _draw_memory(axes[2 * index + 1], graph, lanes)
    file = BytesIO()
    FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})
    return file.getvalue()


def _draw_lanes(axes: Axes, title: str, lanes: Lanes) -> None:
    names = ["compute", *link_names(lanes)]
    _style(axes, lanes.end_us)
    axes.set_title(title, loc="left", fontsize=9, color=LIGHT["ink"])
    axes.tick_params(labelbottom=False)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    _bars(axes, 0, [Interval(span.start_us, span.end_us) for span in lanes.compute], "compute")
    _bars(axes, 0, list(lanes.copies), "copy")
    _bars(axes, 0, [stall.at for stall in lanes.stalls], "stall")
    for row, link in enumerate(lanes.links, start=1):
        for kind in sorted({transfer.collective.kind for transfer in link}):
            _bars(axes, row, [t.at for t in link if t.collective.kind == kind], facts.words(kind))
        _bars(axes, row, [t.exposed for t in link if is_exposed(t.collective)], "exposed")
        _number(axes, row, [t for t in link if t.at.length_us > LABELLED * lanes.end_us])
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False, labelcolor=LIGHT["muted"])


def _summary(graph: CapturedGraph) -> str:
    return ", ".join(f"{label} {value}" for label, value in facts.graph_facts(graph))


def _bars(axes: Axes, row: int, at: list[Interval], name: str) -> None:
    """Draw intervals in a lane; ``name`` tells what they are in the legend, and their colour."""
    if not at:
        return
    known = axes.get_legend_handles_labels()[1]
    top = row - BAR / 2 + (STRIP if name == "exposed" else 0.0)
    look: dict[str, Any] = HATCHED if name == "stall" else {"facecolor": LIGHT[name], "edgecolor": LIGHT["paper"]}
    axes.broken_barh(
        [(interval.start_us, interval.length_us) for interval in at],
        (top, row + BAR / 2 - top),
        label=f"_{name}" if name in known else name,
        linewidth=0.4 if len(at) < MANY else 0.0,
        **look,
    )


def _number(axes: Axes, row: int, transfers: list[Transfer]) -> None:
    for transfer in transfers:
        middle = (transfer.at.start_us + transfer.at.end_us) / 2
        axes.text(middle, row, f"#{transfer.number}", color=LIGHT["on-bar"], fontsize=7.5, ha="center", va="center")


def _draw_memory(axes: Axes, graph: CapturedGraph, lanes: Lanes) -> None:
    _style(axes, lanes.end_us)
    top = max(graph.bound_bytes, graph.peak_unsharded_bytes, 1)
    axes.set_ylim(0, top * 1.25)
    axes.set_yticks([0, top], ["0", figures.size(top)])
    if lanes.levels:
        edges = [lanes.levels[0].at.start_us, *(level.at.end_us for level in lanes.levels)]
        heights = [level.bytes for level in lanes.levels]
        axes.stairs(heights, edges, fill=True, color=LIGHT["memory"], alpha=0.3)
        axes.stairs(heights, edges, color=LIGHT["memory"], linewidth=1.0)
    axes.axhline(graph.bound_bytes, color=LIGHT["ink"], linewidth=0.9, linestyle="--")
    place: dict[str, Any] = {
        "fontsize": 8,
        "color": LIGHT["ink"],
        "va": "bottom",
        "transform": axes.get_yaxis_transform(),
    }
    axes.text(0.005, graph.bound_bytes, f"bound {figures.size(graph.bound_bytes)}", **place)
    axes.set_ylabel("unsharded", fontsize=8, color=LIGHT["muted"])


def _style(axes: Axes, end_us: float) -> None:
    axes.set_facecolor(LIGHT["paper"])
    axes.set_xlim(0, end_us or 1.0)
    marks = figures.ticks(end_us, 10)
    axes.set_xticks(marks, [figures.duration(mark) for mark in marks])
    axes.grid(axis="x", color=LIGHT["rule"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=0, labelcolor=LIGHT["muted"])
    for spine in axes.spines.values():
        spine.set_visible(False)
