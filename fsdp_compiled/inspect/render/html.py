"""A capture as one HTML page that needs nothing else: summary, timelines, tables and the text of the graphs.

``page.html`` is the template; ``base.html``, which it extends, lets pages load nothing; ``page.css`` styles the kinds
of shapes and the columns of tables, which are classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from ..comparison import Comparison
from ..records import CapturedGraph, CapturedModel, Collective
from . import figures
from .drawing import COLOUR_OF, COLOURS, draw

NAMES = 30  # characters of a table cell's names; they unfold
WIDEST = 8000  # pixels of a timeline


def html(capture: CapturedModel, beside: CapturedModel | None = None, measured: Comparison | None = None) -> str:
    """Return the page's source: of one capture, or of two, compared above each other's, or of one and a run."""
    captures = [capture] if beside is None else [capture, beside]
    names, compared = figures.side_by_side(captures) if beside is not None else ([""], [])
    given: dict[str, Any] = {"figures": figures, "draw": draw, "zip": zip}
    given |= {"NAMES": NAMES, "WIDEST": WIDEST, "colour_of": COLOUR_OF}
    given |= {"summary": _summary, "collective_lines": _collective_lines, "positions": _positions}
    given |= {"captures": list(zip(names, captures, strict=True)), "compared": compared, "measured": measured}
    return page(Path(__file__).with_name("page.html"), **given)


def page(template: Path, **given: Any) -> str:
    """Return the source of a page that needs nothing else; the template has what is given, and the colours."""
    loader = FileSystemLoader([template.parent, Path(__file__).parent])  # base.html, which it extends
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(template.name).render(colours=COLOURS, **given)


def _summary(graphs: Sequence[tuple[str, CapturedGraph]]) -> list[dict[str, str]]:
    return [{"graph": title} | figures.graph_facts(graph) for title, graph in graphs]


def _collective_lines(found: Sequence[Collective]) -> list[dict[str, Any]]:
    return [
        figures.collective_facts(number, each)
        | {"verdict": each.verdict.removeprefix("exposed: "), "params": each.params}
        for number, each in enumerate(found)
    ]


def _positions(graph: CapturedGraph) -> set[int]:
    """Return those of the nodes that the table of collectives leads to."""
    return {position for each in graph.collectives for position in (each.launch, each.wait, each.first_use)}
