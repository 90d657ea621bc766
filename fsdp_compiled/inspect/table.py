"""A capture as plain text for a terminal or a pipe: at most 118 columns, no colours."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import facts
from .names import abbreviate
from .records import CapturedGraph

if TYPE_CHECKING:
    from .report import Capture

WIDTH = 118
LEAST_NAMES = 24  # characters left for parameter names, however wide the figures are

TIED = "\u00a0"  # a space at which no line is broken


def table(capture: Capture) -> str:
    """Return the whole text, without a newline at its end."""
    blocks = [_head(capture)]
    blocks += [
        _graph(title, graph) for title, graph in zip(facts.titles(capture.graphs), capture.graphs, strict=True)
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _head(capture: Capture) -> list[str]:
    breaks = [line for reason in capture.graph_breaks for line in _wrapped(" ".join(reason.split()), "  - ", "    ")]
    return [
        *_wrapped(facts.headline(capture)),
        *_wrapped(f"schedule: {_listed(facts.schedule(capture.schedule))}", rest="  "),
        facts.graph_breaks(capture),
        *breaks,
    ]


def _graph(title: str, graph: CapturedGraph) -> list[str]:
    reasons = [line for verdict in facts.verdicts(graph) for line in _wrapped(str(verdict), "  ", "    ")]
    return [*_wrapped(f"{title}: {_listed(facts.graph_facts(graph))}", rest="  "), *_rows(graph), *reasons]


def _rows(graph: CapturedGraph) -> list[str]:
    if not graph.collectives:
        return []
    columns = [
        [column.title, *(column.text(index, collective) for index, collective in enumerate(graph.collectives))]
        for column in facts.COLUMNS
    ]
    aligned = [
        [cell.rjust(width) if column.is_right else cell.ljust(width) for cell in cells]
        for column, cells in zip(facts.COLUMNS, columns, strict=True)
        for width in [max(map(len, cells))]
    ]
    left = ["  ".join(cells) for cells in zip(*aligned, strict=True)]
    space = max(LEAST_NAMES, WIDTH - len(left[0]) - 4)
    names = ["params", *(_params(collective.params, space) for collective in graph.collectives)]
    return [f"  {cells}  {name}".rstrip() for cells, name in zip(left, names, strict=True)]


def _params(params: tuple[str, ...], width: int) -> str:
    count = f"{len(params)}: "
    return count + abbreviate(params, width - len(count))


def _listed(pairs: Iterable[facts.Fact]) -> str:
    return ", ".join(f"{label} {value}".replace(" ", TIED) for label, value in pairs)


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    lines = textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return [line.replace(TIED, " ") for line in lines]
