"""A drawing as ``<svg>``, whose kinds of shapes are classes that ``page.css`` styles."""

from __future__ import annotations

from html import escape

from .drawing import Box, Drawing, Line, Shape, Text


def svg(drawing: Drawing, label: str) -> str:
    """Return the element; ``label`` says what it shows to those who cannot see it."""
    size = f'width="{_pixels(drawing.width)}" height="{_pixels(drawing.height)}"'
    head = f'<svg class="timeline" role="img" aria-label="{escape(label)}" {size}>'
    return "\n".join([head, *map(_element, drawing.shapes), "</svg>"])


def _element(shape: Shape) -> str:
    match shape:
        case Box(kind, x, y, width, height, tip):
            explained = f' data-tip="{escape(tip)}"' if tip else ""
            size = f'width="{_pixels(width)}" height="{_pixels(height)}"'
            return f'<rect class="{kind}" x="{_pixels(x)}" y="{_pixels(y)}" {size}{explained}/>'
        case Text(kind, x, y, text, anchor):
            return f'<text class="{kind} {anchor}" x="{_pixels(x)}" y="{_pixels(y)}">{escape(text)}</text>'
        case Line(kind, points):
            places = " ".join(f"{_pixels(x)},{_pixels(y)}" for x, y in points)
            return f'<polyline class="{kind}" points="{places}"/>'


def _pixels(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
