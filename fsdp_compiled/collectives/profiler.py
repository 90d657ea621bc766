"""Ranges that ``torch.profiler`` shows, under the names that FSDP2's have where it has them.

They are opened only while a profiler is on, by code that runs outside of graphs: hooks, and the implementations of
operators. It knows buckets by the names of their units only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

NAMED = 3  # units whose names a range shows; of more, the first and the last
Range = AbstractContextManager[Any]
_NONE: Range = nullcontext()


class HasUnits(Protocol):
    """A bucket."""

    @property
    def units(self) -> tuple[str, ...]: ...


def of(what: str, bucket: HasUnits) -> Range:
    """Return the range ``FSDP::what (units)`` if a profiler is on."""
    return record_function(_name(what, bucket.units)) if _profiler_enabled() else _NONE


def of_unit(what: str, unit: str) -> Range:
    """Return the range ``FSDP::what (unit)`` if a profiler is on."""
    return record_function(_name(what, (unit,))) if _profiler_enabled() else _NONE


def later(what: str, bucket: HasUnits) -> Callable[[], Range]:
    """Return what opens the range when it is called."""
    return lambda: of(what, bucket)


@cache
def _name(what: str, units: Sequence[str]) -> str:
    """Return the name with those of the units: of the outermost its class, of others their path in it."""
    names = [unit.partition(".")[2] or unit for unit in units]
    shown = ", ".join(names) if len(names) <= NAMED else f"{names[0]} to {names[-1]}, {len(names)} units"
    return f"FSDP::{what} ({shown})"
