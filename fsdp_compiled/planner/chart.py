"""A chart of a plan's page: stacked bars over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..inspect.render.drawing import Box
from ..inspect.render.figures import ticks

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 540, 300, 64, 44, 16  # pixels
SHADES = ("all-gather", "exposed", "copy", "reduce-scatter", "all-reduce", "compute", "muted", "rule", "ink", "panel")


class Chart(NamedTuple):
    title: str
    bars: list[Box]  # of parts; their kinds are colours of the page
    names: list[tuple[float, str]]  # of bars, and where
    lines: list[tuple[float, str]]  # height and label
    limit: float | None  # height
    legend: list[tuple[str, str]]  # part and colour


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
