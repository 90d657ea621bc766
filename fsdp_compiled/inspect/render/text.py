"""A capture and an explanation as plain text for a terminal or a pipe: at most 118 columns, no colours."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from ..records import CapturedGraph, CapturedModel, ExplainedModel, UnitExplanation
from . import facts, figures
from .names import LISTED_WIDTH, abbreviate, counted, listed

WIDTH = 118
LEAST_NAMES = 16  # characters left for names of parameters or units, however wide the figures are
TIED = "\u00a0"  # a space at which no line is broken

Key = TypeVar("Key", bound=Hashable)


# ---- layout ----


def _table(items: Sequence[Mapping[str, str]], left: Collection[str]) -> list[str]:
    """Return a line of titles, which are the items' keys, and a line for each item.

    Args:
        items: their text for each column.
        left: titles of the columns that are aligned left, not right.
    """
    columns = []
    for title in items[0]:
        cells = [title, *(item[title] for item in items)]
        width = max(map(len, cells))
        columns.append([cell.ljust(width) if title in left else cell.rjust(width) for cell in cells])
    return ["  ".join(line) for line in zip(*columns, strict=True)]


def _wrapped(text: str, first: str = "", rest: str = "  ") -> list[str]:
    lines = textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return [line.replace(TIED, " ") for line in lines]


def _joined(*blocks: Iterable[str]) -> str:
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks)


# ---- a capture ----


def capture_text(capture: CapturedModel) -> str:
    """Return the text without a newline at its end."""
    return _joined(_head(capture), *map(_graph, facts.titles(capture.graphs), capture.graphs))


def _head(capture: CapturedModel) -> Iterator[str]:
    yield from _wrapped(facts.headline(capture), rest="")
    yield from _facts("schedule", facts.schedule(capture.schedule))
    yield facts.graph_breaks(capture)
    for reason in capture.graph_breaks:
        yield from _wrapped(" ".join(reason.split()), "  - ", "    ")


def _graph(title: str, graph: CapturedGraph) -> Iterator[str]:
    yield from _facts(title, facts.graph_facts(graph))
    if graph.collectives:
        cells = [facts.collective_facts(number, collective) for number, collective in enumerate(graph.collectives)]
        space = max(LEAST_NAMES, WIDTH - len(f"  {_table(cells, facts.LEFT)[0]}  "))
        names = [facts.params(collective.params, space) for collective in graph.collectives]
        items = [{**cell, "params": name} for cell, name in zip(cells, names, strict=True)]
        yield from (f"  {line}" for line in _table(items, {*facts.LEFT, "params"}))
    for verdict in facts.verdicts(graph):
        yield from _wrapped(verdict, "  ", "    ")


def _facts(title: str, pairs: Iterable[facts.Fact]) -> list[str]:
    return _wrapped(f"{title}: {', '.join(f'{label} {value}'.replace(' ', TIED) for label, value in pairs)}")


# ---- an explanation ----


def explanation_text(explanation: ExplainedModel) -> str:
    """Return the text without a newline at its end."""
    units, schedule = explanation.units, explanation.schedule
    params = counted(sum(len(unit.params) for unit in units), "parameter")
    size, per_rank = figures.size(explanation.total_bytes), figures.size(explanation.rank_bytes)
    head = (
        f"{explanation.model}: {counted(len(units), 'unit')}, {params} of {size}, of which each rank holds {per_rank}"
    )
    decisions = ", ".join(f"{label} {value}" for label, value in facts.schedule(schedule))
    graph = f"one full graph is scheduled with {decisions}: {_buckets(schedule.bucket)}"
    return _joined(_wrapped(head), _units(units), _reasons(explanation), _wrapped(graph))


def _units(units: Sequence[UnitExplanation]) -> list[str]:
    """Return a table; units that differ only in their names share a line."""
    left = {"unit", "in", "reduces in", "after forward"}
    alike = _grouped((tuple(_cells(unit).items()), unit) for unit in units)
    cells, groups = list(map(dict, alike)), list(alike.values())
    space = max(LEAST_NAMES, WIDTH - len(f"{_table(cells, left)[0]}  "))
    return _table([{"unit": _names(group, space), **cell} for cell, group in zip(cells, groups, strict=True)], left)


def _cells(unit: UnitExplanation) -> dict[str, str]:
    ranks = str(unit.shard_world) if unit.replicate_world == 1 else f"{unit.shard_world} x {unit.replicate_world}"
    return {
        "params": str(len(unit.params)),
        "size": figures.size(unit.total_bytes),
        "per rank": figures.size(unit.rank_bytes),
        "ranks": ranks if unit.params else "-",
        "all-gathers": figures.size(unit.all_gather_bytes),
        "in": _dtypes(unit.all_gather_dtypes),
        "reduces in": _dtypes(unit.reduce_dtypes),
        "after forward": unit.after_forward,
    }


def _dtypes(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(facts.dtype_name, dtypes)) or "-"


def _names(units: Sequence[UnitExplanation], width: int) -> str:
    count = f" (each of {len(units)})" if len(units) > 1 else ""
    return abbreviate([unit.name for unit in units], width - len(count)) + count


def _reasons(explanation: ExplainedModel) -> Iterator[str]:
    said = ((text, unit) for unit in explanation.units for text in (unit.why, *unit.notes))
    for text, units in _grouped(said).items():
        is_every = len(units) == len(explanation.units) > 1
        who = "every unit" if is_every else abbreviate([unit.name for unit in units], LISTED_WIDTH)
        yield from _wrapped(f"{who}: {text}")
    if explanation.outside:
        yield from _wrapped(
            f"in no unit: {listed('parameter', explanation.outside)}: unsharded on every rank, gradients not "
            "averaged; given as ignored_params, or fully_shard was not called on a module above"
        )


def _grouped(pairs: Iterable[tuple[Key, UnitExplanation]]) -> dict[Key, list[UnitExplanation]]:
    found: dict[Key, list[UnitExplanation]] = {}
    for key, unit in pairs:
        found.setdefault(key, []).append(unit)
    return found


def _buckets(bucket: str | int) -> str:
    words = {
        "auto": "buckets may span units, and their sizes follow from estimated times",
        "unit": "one bucket for each unit and dtype",
        "none": "every parameter is all-gathered and reduced alone",
    }
    return words[bucket] if isinstance(bucket, str) else f"buckets may span units, up to {figures.size(bucket)} each"
