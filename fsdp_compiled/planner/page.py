"""A plan as one HTML page that needs nothing else: a chart of time and memory over the ranks, and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader

from ..inspect import render
from ..inspect.render.drawing import COLOURS, Box
from ..inspect.render.figures import duration, ticks
from .options import Option, PlannedTraining

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 540, 300, 64, 44, 16  # pixels of a chart
GIB = 2**30
SHADES = ("all-gather", "exposed", "copy", "reduce-scatter", "all-reduce", "compute", "muted", "rule", "ink", "panel")


class Chart(NamedTuple):
    title: str
    bars: list[Box]  # of parts; their kinds are colours of the page
    names: list[tuple[float, str]]  # of bars, and where
    lines: list[tuple[float, str]]  # height and label
    limit: float | None  # height
    legend: list[tuple[str, str]]  # part and colour


class Section(NamedTuple):
    """What the page says of a number of ranks."""

    ranks: int
    notes: Sequence[str]
    lines: Sequence[Sequence[str]]  # of a table
    code: str


def html(plan: PlannedTraining, about: str, titles: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the page's source."""
    loader = FileSystemLoader([Path(__file__).parent, Path(render.__file__).parent])
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    best = [options[0] for ranks in plan.options if (options := plan.best(ranks, 1))]
    charts = [
        chart("What all ranks together take for a million tokens", {str(o.ranks): _costs(o) for o in best}, duration),
        chart(
            "Memory of a rank at its peak",
            {str(o.ranks): {part: count / GIB for part, count in o.parts_bytes.items()} for o in best},
            lambda count: f"{count:.3g} GiB",
            plan.memory_bytes / GIB,
        ),
    ]
    return environment.get_template("plan.html").render(
        model=plan.model,
        about=about,
        titles=titles,
        sections=sections,
        charts=charts,
        colours=COLOURS,
        left=LEFT,
        WIDTH=WIDTH,
        HEIGHT=HEIGHT,
    )


def _costs(option: Option) -> dict[str, float]:
    """Return each part of a step, of all ranks together and for a million tokens."""
    return {part: us * option.ranks * 1e6 / option.tokens for part, us in option.parts_us.items()}


def chart(
    title: str,
    values: Mapping[str, Mapping[Any, float]],
    shown: Callable[[float], str],
    limit: float | None = None,
) -> Chart:
    """Return stacked bars: for each name the values of parts."""
    parts = list(dict.fromkeys(part for each in values.values() for part in each))
    colour = {part: SHADES[index % len(SHADES)] for index, part in enumerate(parts)}
    top = 1.05 * max([limit or 0.0, *(sum(each.values()) for each in values.values()), 1e-9])
    scale, step = (HEIGHT - BOTTOM - TOP) / top, (WIDTH - LEFT) / max(1, len(values))
    bars, names = list[Box](), list[tuple[float, str]]()
    for index, (name, each) in enumerate(values.items()):
        x, level = LEFT + (index + 0.2) * step, 0.0
        names.append((x + 0.3 * step, name))
        for part in parts:
            value = each.get(part, 0.0)
            level += value
            tip = f"{name} ranks\n{part}: {shown(value)}"
            bars.append(Box(colour[part], x, HEIGHT - BOTTOM - level * scale, 0.6 * step, value * scale, tip))
    lines = [(HEIGHT - BOTTOM - value * scale, shown(value)) for value in ticks(top, 5)]
    return Chart(title, bars, names, lines, limit and HEIGHT - BOTTOM - limit * scale, list(colour.items()))
