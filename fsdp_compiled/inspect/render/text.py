"""A capture and an explanation as plain text for a terminal or a pipe: at most 118 columns, no colours."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..comparison import ComparedStep
from ..records import CapturedGraph, CapturedModel, ExplainedModel, UnitExplanation
from . import figures

WIDTH = 118
LEAST_NAMES = 16  # characters left for names of parameters or units, however wide the figures are
WORST = 30  # estimates that are listed with what was measured
LEFT = {
    "kind",
    "dtype",
    "unit",
    "in",
    "reduces in",
    "part",
    "mesh",
}  # aligned left, as the last column is
TIED = "\u00a0"  # a space at which no line is broken


def table(items: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line of titles, which are the items' keys, and a line for each item."""
    columns, last = [], [*items[0]][-1]
    for title in items[0]:
        cells = [title, *(item[title] for item in items)]
        side, width = "<" if title in LEFT or title == last else ">", max(map(len, cells))
        columns.append([f"{cell:{side}{width}}" for cell in cells])
    return ["  ".join(line) for line in zip(*columns, strict=True)]


def _space_beside(items: Sequence[Mapping[str, str]], indent: int = 0) -> int:
    """Return the width that a table leaves for names of parameters or units."""
    return max(LEAST_NAMES, WIDTH - indent - len(f"{table(items)[0]}  "))


def _wrapped(text: str, first: str = "", rest: str = "  ") -> list[str]:
    lines = textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return [line.replace(TIED, " ") for line in lines]


def _joined(*blocks: Iterable[str]) -> str:
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks)


def capture_text(capture: CapturedModel) -> str:
    head = [
        *_wrapped(f"{capture.model}: {figures.about(capture)}", rest=""),
        *_facts("schedule", figures.schedule(capture.schedule)),
        f"graph breaks: {len(capture.graph_breaks) or 'none'}",
    ]
    for reason in capture.graph_breaks:
        head += _wrapped(" ".join(reason.split()), "  - ", "    ")
    graphs = figures.titled(capture.graphs)
    kernels = (_kernels(title, graph) for title, graph in graphs if graph.has_program)
    step = list[Iterable[str]]()
    if capture.memory:
        step.append(_facts("time of a step, by estimate", figures.step_facts(capture)))
        step.append(_facts("memory of a step, by estimate", figures.memory_facts(capture.memory)))
    return _joined(head, *(_graph(title, graph) for title, graph in graphs), *kernels, *step)


def _graph(title: str, graph: CapturedGraph) -> Iterator[str]:
    yield from _facts(title, figures.graph_facts(graph))
    if graph.collectives:
        cells = [figures.collective_facts(number, collective) for number, collective in enumerate(graph.collectives)]
        space = _space_beside(cells, indent=2)
        for cell, collective in zip(cells, graph.collectives, strict=True):
            cell["params"] = figures.params(collective.params, space)
        yield from (f"  {line}" for line in table(cells))
    for region in graph.regions:
        calls = figures.abbreviate(region.calls)
        each = f"{len(region.calls)} calls of {region.name}, {figures.duration(region.estimate_us)} each: {calls}"
        yield from _wrapped(each, "  ", "    ")
    for verdict in figures.verdicts(graph):
        yield from _wrapped(verdict, "  ", "    ")


def _kernels(title: str, graph: CapturedGraph) -> Iterator[str]:
    yield from _facts(f"kernels of {title}", figures.kernels_facts(graph.kernels))
    lines = figures.kernel_lines(graph.kernels)
    space = _space_beside([{**line, "kernel": ""} for line in lines], indent=2)
    for line in lines:
        line["kernel"] = figures.elide(line["kernel"], space)
    yield from (f"  {line}" for line in table(lines))


def _facts(title: str, values: Mapping[str, str]) -> list[str]:
    tied = (f"{label} {value}".replace(" ", TIED) for label, value in values.items())
    return _wrapped(f"{title}: {', '.join(tied)}")


def comparison_text(comparison: ComparedStep) -> str:
    head = f"one step, the mean of {figures.counted(comparison.steps, 'step')} of a run"
    parts = table([figures.compared_part(each) for each in (comparison.step, *comparison.parts)])
    lines = [figures.compared_facts(each) for each in comparison.lines]
    more = [f"and {len(lines) - WORST} more, in the .html file"] if len(lines) > WORST else []
    return _joined([head], parts, ["the worst estimates first"], table(lines[:WORST]) if lines else [], more)


def explanation_text(explanation: ExplainedModel) -> str:
    units, schedule = explanation.units, explanation.schedule
    params = figures.counted(sum(len(unit.params) for unit in units), "parameter")
    size, per_rank = figures.size(explanation.total_bytes), figures.size(explanation.rank_bytes)
    count = figures.counted(len(units), "unit")
    head = f"{explanation.model}: {count}, {params} of {size}, of which each rank holds {per_rank}"
    decisions = figures.in_line(figures.schedule(schedule))
    graph = f"one full graph is scheduled with {decisions}: {_buckets(schedule.bucket)}"
    return _joined(_wrapped(head), _units(units), _reasons(explanation), _wrapped(graph))


def _units(units: Sequence[UnitExplanation]) -> list[str]:
    """Return a table; units that differ only in their names share a line."""
    alike = defaultdict[tuple[tuple[str, str], ...], list[str]](list)
    for unit in units:
        alike[tuple(_cells(unit).items())].append(unit.name)
    width = _space_beside([dict(cells) for cells in alike])
    items = []
    for cells, names in alike.items():
        count = f" (each of {len(names)})" if len(names) > 1 else ""
        items.append({"unit": figures.abbreviate(names, width - len(count)) + count, **dict(cells)})
    return table(items)


def _cells(unit: UnitExplanation) -> dict[str, str]:
    ranks = str(unit.shard_world) if unit.replicate_world == 1 else f"{unit.shard_world} x {unit.replicate_world}"
    return {
        "params": str(len(unit.params)),
        "size": figures.size(unit.total_bytes),
        "per rank": figures.size(unit.rank_bytes),
        "ranks": ranks if unit.params else "-",
        "all-gathers": figures.size(unit.all_gather_bytes),
        "in": ", ".join(map(figures.dtype_name, unit.all_gather_dtypes)) or "-",
        "reduces in": ", ".join(map(figures.dtype_name, unit.reduce_dtypes)) or "-",
        "after forward": unit.after_forward,
    }


def _reasons(explanation: ExplainedModel) -> Iterator[str]:
    said = defaultdict[str, list[str]](list)
    for unit in explanation.units:
        for text in (unit.why, *unit.notes):
            said[text].append(unit.name)
    for text, names in said.items():
        who = "every unit" if len(names) == len(explanation.units) > 1 else figures.abbreviate(names)
        yield from _wrapped(f"{who}: {text}")
    if explanation.outside:
        who = figures.listed("parameter", explanation.outside)
        why = "given as ignored_params, or fully_shard was not called on a module above"
        yield from _wrapped(f"in no unit: {who}: unsharded on every rank, gradients not averaged; {why}")


def _buckets(bucket: str | int) -> str:
    words = {
        "auto": "buckets may span units, and their sizes follow from estimated times",
        "unit": "one bucket for each unit and dtype",
        "none": "every parameter is all-gathered and reduced alone",
    }
    return words[bucket] if isinstance(bucket, str) else f"buckets may span units, up to {figures.size(bucket)} each"
