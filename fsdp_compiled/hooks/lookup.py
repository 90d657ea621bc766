"""Finds the states of units by their modules, and names units. It must not know what a state does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from torch import nn

from .state import FSDPState

_unit_numbers = count()  # tells apart units that no outer fully_shard has named


def unit_state(module: Any) -> FSDPState:
    """Return the state of the unit that ``module`` was given to ``fully_shard`` for.

    Raises:
        ValueError: it was given to none.
    """
    state = module.__dict__.get("_fsdp_state")
    if state is None:
        raise ValueError(f"{type(module).__name__}: expected a module given to fully_shard, got one without state")
    return state


def units_of(module: nn.Module) -> tuple[FSDPState, ...]:
    """Return the states of the units that have taken parameters of ``module``."""
    return module.__dict__.get("_fsdp_units", ())


def new_unit_name(modules: Sequence[nn.Module]) -> str:
    """Return a name for a unit that no outer unit has named."""
    return f"{type(modules[0]).__name__}#{next(_unit_numbers)}"
