"""Ranges that ``torch.profiler`` shows, under the names that FSDP2's have where it has them.

They are opened only while a profiler is on, by code that runs outside of graphs: hooks, and the implementations of
operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from torch.autograd.profiler import record_function

from ..sharding.spec import Bucket
from .backend import profiler_is_on


def of(what: str, where: Bucket | str) -> AbstractContextManager[Any]:
    """Return the range ``FSDP::what (units)`` of a bucket's units, or of the unit of a name, if a profiler is on."""
    if not profiler_is_on():
        return nullcontext()
    return record_function(_name(what, (where,) if isinstance(where, str) else where.units))


@cache
def _name(what: str, units: Sequence[str]) -> str:
    """Return the name with those of the units: of the outermost its class, of others their path in it."""
    names = [unit.partition(".")[2] or unit for unit in units]
    shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]}, {len(names)} units"
    return f"FSDP::{what} ({shown})"
