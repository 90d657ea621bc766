"""Gradients that backwards have left unreduced, as a user asks for them: to see, to drop."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..param.param import FSDPParam
from .backward import outside_modes
from .group import accumulate_unsharded
from .state import FSDPState, states_below
from .step import is_in_backward

Unreduced = tuple[Tensor | None, Tensor | None]


def unreduced_gradients(module: nn.Module) -> dict[nn.Parameter, Unreduced]:
    """Return the sums of each parameter below ``module`` that has any: unsharded, and reduced over shards only."""
    _recovered(module)
    found = {}
    for param in _params_below(module):
        if not is_in_backward():
            accumulate_unsharded(param)
        unsharded, partial = param.gradients.unreduced
        if unsharded is not None and param.outer is not None:
            unsharded = param.outer.unreduced(unsharded)
        if unsharded is not None or partial is not None:
            found[param.sharded_param] = (unsharded, partial)
    return found


def zero_gradients(module: nn.Module, set_to_none: bool) -> None:
    """Drop or zero all gradients of the sharded parameters below ``module``; Dynamo traces this."""
    params = _params_below(module)
    if not torch.compiler.is_compiling():
        _finish_reductions(_recovered(module))
        for param in params:
            param.unsharded.drop_grad()
    for param in params:
        param.gradients.zero(set_to_none)


def _recovered(module: nn.Module) -> list[FSDPState]:
    """Return the units below ``module``, which have dropped what a backward cut off by an exception has left."""
    states = states_below([module])
    for state in states:
        if state._context is not None:
            state._context.recover()
    return states


@outside_modes
def _finish_reductions(states: Iterable[FSDPState]) -> None:
    """Let gradients arrive whose reduction no backward has waited for yet."""
    for state in states:
        if state._context is not None:
            state._context.comm.finish_reduce()
        for group in state.groups:
            group.wait_on_host()


def _params_below(module: nn.Module) -> Iterable[FSDPParam]:
    """Return the sharded parameters of ``module`` and the modules below, once each."""
    return dict.fromkeys(p for each in module.modules() for p in each.__dict__.get("_fsdp_params", {}).values())
