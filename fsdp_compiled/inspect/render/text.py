"""Tables and sentences for a terminal or a pipe, and a capture in them: at most 118 columns, no colours."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..records import CapturedGraph, CapturedModel
from . import figures

WIDTH = 118
LEAST_NAMES = 16  # characters left for names of parameters or units, however wide the figures are
LEFT = {"kind", "dtype", "unit", "in", "reduces in", "part", "mesh"}  # aligned left, as the last column is
TIED = "\u00a0"  # a space at which no line is broken


def table(items: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line of titles, which are the items' keys, and a line for each item."""
    columns, last = [], [*items[0]][-1]
    for title in items[0]:
        cells = [title, *(item[title] for item in items)]
        side, width = "<" if title in LEFT or title == last else ">", max(map(len, cells))
        columns.append([f"{cell:{side}{width}}" for cell in cells])
    return ["  ".join(line) for line in zip(*columns, strict=True)]


def space_beside(items: Sequence[Mapping[str, str]], indent: int = 0) -> int:
    """Return the width that a table leaves for names of parameters or units."""
    return max(LEAST_NAMES, WIDTH - indent - len(f"{table(items)[0]}  "))


def wrapped(text: str, first: str = "", rest: str = "  ") -> list[str]:
    lines = textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return [line.replace(TIED, " ") for line in lines]


def joined(*blocks: Iterable[str]) -> str:
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks)


def capture_text(capture: CapturedModel) -> str:
    head = [
        *wrapped(f"{capture.model}: {figures.about(capture)}", rest=""),
        *_facts("schedule", figures.schedule(capture.schedule)),
        f"graph breaks: {len(capture.graph_breaks) or 'none'}",
    ]
    for reason in capture.graph_breaks:
        head += wrapped(" ".join(reason.split()), "  - ", "    ")
    graphs = figures.titled(capture.graphs)
    kernels = (_kernels(title, graph) for title, graph in graphs if graph.has_program)
    step = list[Iterable[str]]()
    if capture.memory:
        step.append(_facts("time of a step, by estimate", figures.step_facts(capture)))
        step.append(_facts("memory of a step, by estimate", figures.memory_facts(capture.memory)))
    return joined(head, *(_graph(title, graph) for title, graph in graphs), *kernels, *step)


def _graph(title: str, graph: CapturedGraph) -> Iterator[str]:
    yield from _facts(title, figures.graph_facts(graph))
    if graph.collectives:
        cells = [figures.collective_facts(number, collective) for number, collective in enumerate(graph.collectives)]
        space = space_beside(cells, indent=2)
        for cell, collective in zip(cells, graph.collectives, strict=True):
            cell["params"] = figures.params(collective.params, space)
        yield from (f"  {line}" for line in table(cells))
    for region in graph.regions:
        calls = figures.abbreviate(region.calls)
        each = f"{len(region.calls)} calls of {region.name}, {figures.duration(region.estimate_us)} each: {calls}"
        yield from wrapped(each, "  ", "    ")
    for verdict in figures.verdicts(graph):
        yield from wrapped(verdict, "  ", "    ")


def _kernels(title: str, graph: CapturedGraph) -> Iterator[str]:
    yield from _facts(f"kernels of {title}", figures.kernels_facts(graph.kernels))
    lines = figures.kernel_lines(graph.kernels)
    space = space_beside([{**line, "kernel": ""} for line in lines], indent=2)
    for line in lines:
        line["kernel"] = figures.elide(line["kernel"], space)
    yield from (f"  {line}" for line in table(lines))


def _facts(title: str, values: Mapping[str, str]) -> list[str]:
    tied = (f"{label} {value}".replace(" ", TIED) for label, value in values.items())
    return wrapped(f"{title}: {', '.join(tied)}")
