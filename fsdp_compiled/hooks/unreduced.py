"""Gradients that backwards have left unreduced, as a user asks for them: to see, to drop."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..param.param import FSDPParam
from .group import accumulate_unsharded
from .root import FSDPStateContext
from .state import states_below
from .step import is_in_backward

Unreduced = tuple[Tensor | None, Tensor | None]


def unreduced_gradients(module: nn.Module) -> dict[nn.Parameter, Unreduced]:
    """Return the sums of each parameter below ``module`` that has any: unsharded, and reduced over shards only."""
    for context in _contexts_below(module):
        context.recover()
    found = {}
    for param in _params_below(module):
        if not is_in_backward():
            accumulate_unsharded(param)
        unsharded, partial = param.gradients.unsharded.grad, param.gradients.partial.grad
        if unsharded is not None and param.outer is not None:
            unsharded = param.outer.unreduced(unsharded)
        if partial is not None:
            partial = param.storage.unpadded(partial)
        if unsharded is not None or partial is not None:
            found[param.sharded_param] = (unsharded, partial)
    return found


def zero_gradients(module: nn.Module, set_to_none: bool) -> None:
    """Drop or zero all gradients of the sharded parameters below ``module``; Dynamo traces this."""
    params = _params_below(module)
    if not torch.compiler.is_compiling():
        for context in _contexts_below(module):
            context.complete_reductions()
        for param in params:
            param.unsharded.drop_grad()
    for param in params:
        param.gradients.zero(set_to_none)


def _contexts_below(module: nn.Module) -> Iterable[FSDPStateContext]:
    return dict.fromkeys(state._context for state in states_below([module]) if state._context is not None)


def _params_below(module: nn.Module) -> Iterable[FSDPParam]:
    """Return the sharded parameters of ``module`` and the modules below, once each."""
    return dict.fromkeys(p for each in module.modules() for p in each.__dict__.get("_fsdp_params", {}).values())
