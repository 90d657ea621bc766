"""Units that the user keeps unsharded over calls of a compiled model, whose graphs have no communication for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..param.gradients import tell
from ..param.param import FSDPParam
from ..regions.block import is_compiled, without_failing_regions
from ..regions.choose import set_default_regions
from ..tracing.dynamo import skipped
from .backward import before_backward
from .step import TrainingState, UnitState, is_in_backward

T = TypeVar("T")


@skipped  # or Dynamo would trace it and what it calls as one
def run_call(model: nn.Module, run: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Run a call of an outermost unit; under ``torch.compile`` it makes regions, if need be, and finds kept units."""
    compiles = is_compiled(model)
    if compiles and "_fsdp_regions" not in model.__dict__:
        set_default_regions(model)
    held = _hold(model) if compiles and torch.is_grad_enabled() else ()
    try:
        output = without_failing_regions(model, run, *args, **kwargs)
    finally:
        if held:
            _release(held)
    return _watch(held, output) if held else output


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _hold(model: nn.Module) -> Sequence[UnitState]:
    """All-gather the units that are kept, unless they are unsharded; Dynamo traces reads of what is registered."""
    if is_in_backward():
        return ()  # a recomputation must read what its forward read, whatever was learned since
    states: Sequence[UnitState] = model._fsdp_state._lazy_init().all_states  # type: ignore[union-attr, operator]
    kept = [s for s in states if s.unit.is_kept and not s.unit.hooked and not s.unit.config.reshard_after_forward]
    held = [state for state in kept if all(p.outer is None and p.extension is None for p in _params(state))]
    for state in held:
        for group in state.groups:
            group.drop_stale()
        state.launch_unshard()
    for state in held:
        state.unshard()
        state.unit.begin_kept()
    return held


def _params(state: UnitState) -> Iterable[FSDPParam]:
    return (param for group in state.groups for param in group.params)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _release(held: Sequence[UnitState]) -> None:
    for state in held:
        state.unit.end_kept()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _watch(held: Sequence[UnitState], output: T) -> T:
    """Return the output so that its backward all-gathers what was resharded since, and reduces at its end."""
    for state in held:
        for group in state.groups:
            group.keep_changes()
        output = before_backward(state, output)
    return output


def begin_by_gradients(state: UnitState) -> None:
    """Let the gradients of unsharded parameters begin the backward of a forward that returned an object.

    Operations before it, if nothing else has told, find what forward has left unsharded, or an error.
    """
    state._lazy_init().step.left.add(state)  # type: ignore[attr-defined]
    for param in _params(state):
        leaf = param.unsharded.param
        if leaf is not None and leaf.requires_grad and "_fsdp_told" not in vars(leaf):
            leaf._fsdp_told = True  # type: ignore[attr-defined]
            tell(leaf, state, _begin_backward)


def _begin_backward(state: UnitState) -> None:
    if state.unit.training_state is TrainingState.IDLE:
        state.pre_backward()
