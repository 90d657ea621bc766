"""Finds the states of units by their modules, and names units.

It must not know what a state does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .state import FSDPState

_unit_numbers = count()  # tells apart units that no outer fully_shard has named


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of the unit that ``module`` is a member of, or None."""
    return module.__dict__.get("_fsdp_state")


def unit_state(module: Any) -> FSDPState:
    """Return the state of the unit that ``module`` was given to ``fully_shard`` for.

    Raises:
        ValueError: it was given to none.
    """
    state = state_of(module)
    if state is None:
        raise ValueError(f"{type(module).__name__}: expected a module given to fully_shard, got one without state")
    return state


def states_below(modules: Sequence[nn.Module]) -> list[FSDPState]:
    """Return the states of ``modules`` and of everything below them, outermost first."""
    found = {id(s): s for root in modules for m in root.modules() if (s := state_of(m)) is not None}
    return list(found.values())


def units_of(module: nn.Module) -> tuple[FSDPState, ...]:
    """Return the states of the units that have taken parameters of ``module``."""
    return module.__dict__.get("_fsdp_units", ())


def new_unit_name(modules: Sequence[nn.Module]) -> str:
    """Return a name for a unit that no outer unit has named."""
    return f"{type(modules[0]).__name__}#{next(_unit_numbers)}"
