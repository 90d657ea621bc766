"""Units and the reasons for what they do as plain text: at most 118 columns, no colours."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from . import facts, figures
from .names import abbreviate
from .table import WIDTH

if TYPE_CHECKING:
    from .explain import Explanation, UnitExplanation

LEAST_NAME = 16  # characters left for a unit's name, however wide the figures are
LISTED_WIDTH = 48  # characters that a list of names may take in a sentence

Key = TypeVar("Key", bound=Hashable)


def table(explanation: Explanation) -> str:
    """Return the whole text, without a newline at its end."""
    blocks = [_head(explanation), _rows(explanation.units), _reasons(explanation), _schedule(explanation)]
    return "\n\n".join("\n".join(block) for block in blocks)


@dataclass(frozen=True)
class Column:
    """A column of the table beside the units' names: its title, its text for a unit, and its alignment."""

    title: str
    text: Callable[[UnitExplanation], str]
    is_right: bool = True

    def aligned(self, units: Sequence[UnitExplanation]) -> list[str]:
        """Return the title and a cell for each unit, all of one width."""
        cells = [self.title, *(self.text(unit) for unit in units)]
        width = max(map(len, cells))
        return [cell.rjust(width) if self.is_right else cell.ljust(width) for cell in cells]


COLUMNS = (
    Column("params", lambda unit: str(len(unit.params))),
    Column("size", lambda unit: figures.size(unit.total_bytes)),
    Column("per rank", lambda unit: figures.size(unit.rank_bytes)),
    Column("ranks", lambda unit: _ranks(unit)),
    Column("gathers", lambda unit: figures.size(unit.gather_bytes)),
    Column("in", lambda unit: _dtypes(unit.gather_dtypes), is_right=False),
    Column("reduces in", lambda unit: _dtypes(unit.reduce_dtypes), is_right=False),
    Column("after forward", lambda unit: unit.after_forward, is_right=False),
)


def _ranks(unit: UnitExplanation) -> str:
    if not unit.params:
        return "-"
    return str(unit.shard_world) if unit.replicate_world == 1 else f"{unit.shard_world} x {unit.replicate_world}"


def _dtypes(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(facts.dtype_name, dtypes)) or "-"


def _head(explanation: Explanation) -> list[str]:
    params = sum(len(unit.params) for unit in explanation.units)
    return _wrapped(
        f"{explanation.model}: {_counted(len(explanation.units), 'unit')}, {_counted(params, 'parameter')} of "
        f"{figures.size(explanation.total_bytes)}, of which each rank holds {figures.size(explanation.rank_bytes)}"
    )


def listed(noun: str, names: Sequence[str]) -> str:
    """Return how many there are and, in little space, which: ``2 parameters, {up,down}.weight``."""
    return f"{_counted(len(names), noun)}, {abbreviate(names, LISTED_WIDTH)}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _rows(units: Sequence[UnitExplanation]) -> list[str]:
    """Return the rows, one for all units that differ only in their names."""
    alike = _grouped((tuple(column.text(unit) for column in COLUMNS), unit) for unit in units)
    columns = [column.aligned([group[0] for group in alike.values()]) for column in COLUMNS]
    cells = ["  ".join(row) for row in zip(*columns, strict=True)]
    space = max(LEAST_NAME, WIDTH - len(cells[0]) - 2)
    names = ["unit", *(_names(group, space) for group in alike.values())]
    width = max(map(len, names))
    return [f"{name.ljust(width)}  {row}".rstrip() for name, row in zip(names, cells, strict=True)]


def _names(units: Sequence[UnitExplanation], width: int) -> str:
    count = f" (each of {len(units)})" if len(units) > 1 else ""
    return abbreviate([unit.name for unit in units], width - len(count)) + count


def _reasons(explanation: Explanation) -> Iterator[str]:
    said = ((text, unit) for unit in explanation.units for text in (unit.why, *unit.notes))
    for text, units in _grouped(said).items():
        is_every = len(units) == len(explanation.units) > 1
        who = "every unit" if is_every else abbreviate([unit.name for unit in units], LISTED_WIDTH)
        yield from _wrapped(f"{who}: {text}")
    if explanation.outside:
        yield from _wrapped(
            f"in no unit: {listed('parameter', explanation.outside)}: whole on every rank, gradients not averaged; "
            "given as ignored_params, or fully_shard was not called on a module above"
        )


def _grouped(pairs: Iterable[tuple[Key, UnitExplanation]]) -> dict[Key, list[UnitExplanation]]:
    found: dict[Key, list[UnitExplanation]] = {}
    for key, unit in pairs:
        found.setdefault(key, []).append(unit)
    return found


def _schedule(explanation: Explanation) -> list[str]:
    decisions = ", ".join(f"{label} {value}" for label, value in facts.schedule(explanation.schedule))
    return _wrapped(f"one full graph is scheduled with {decisions}: {_buckets(explanation.schedule.bucket)}")


def _buckets(bucket: str | int) -> str:
    words = {
        "auto": "buckets may span units, and their sizes follow from estimated times",
        "unit": "one bucket for each unit and dtype",
        "none": "every parameter is gathered and reduced alone",
    }
    return words[bucket] if isinstance(bucket, str) else f"buckets may span units, up to {figures.size(bucket)} each"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
