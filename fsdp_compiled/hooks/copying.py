"""A deep copy of sharded modules: units, shards and hooks of its own, over the same process groups."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..expect import unexpected
from ..tracing.root_call import TracedCall
from ..tracing.sharded_module import copied_module, rebase
from .optimizers import watch_optimizers
from .state import FSDPState, states_below
from .step import UnitInStep


def copied_units(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a module given to ``fully_shard``, with the units below it.

    Whatever the original's state, it is sharded and between two steps. Gradients, the parameters' own hooks and
    torch.compile's results are not copied; what was set on units is. Raises as :func:`copied_module`, and
    RuntimeError in :func:`unsharded`, which would be of the copy for good.
    """
    states = [state for state in states_below([module]) if id(state) not in memo]
    for state in states:
        if not state.unit.config.trains:
            got = f"{state.unit.config.name} in unsharded()"
            raise unexpected("copy.deepcopy", "a model between two steps", got, "leave the block first", RuntimeError)
        for group in state.groups:
            group.keep_changes()
    for state in states:  # all of them first: what is copied next refers to any of them
        memo[id(state)], memo[id(state.unit)] = copy(state), UnitInStep(state.unit.config)
        for param in state.params:
            param.start_copy(memo)
    copied: nn.Module = copied_module(module, memo)
    for state in states:
        _finish(memo[id(state)], memo)
    for state in states:
        if state.is_root and (context := state._context) is not None and not context.ends_with_backward:
            own = memo[id(state)]._lazy_init()
            own.is_last_backward, own.finalizes_manually = context.is_last_backward, context.finalizes_manually
    return copied


def _finish(state: FSDPState, memo: dict[int, Any]) -> None:
    """Complete a unit's copy, once ``memo`` has those of modules; units that are not copied are forgotten."""
    names = ("modules", "params", "shared", "unit", "pre_forward", "post_forward")
    vars(state).update({name: deepcopy(vars(state)[name], memo) for name in names})
    for name in ("forward_prefetch", "backward_prefetch"):
        others = getattr(state, name)
        setattr(state, name, others and [memo[id(other)] for other in others if id(other) in memo])
    state.ignored = WeakKeyDictionary({deepcopy(module, memo): names for module, names in state.ignored.items()})
    state.outermost, state.custom = memo.get(id(state.outermost), state), dict(state.custom)
    state._context = None
    state.unit.on_compiled_gradient = state._on_compiled_gradient
    for param in state.params:
        param.finish_copy(memo)
    state.regroup()
    watch_optimizers(state.params)
    if state.is_root:  # perhaps only the copy is
        state.pre_forward.device = state.device
        for module in state.modules:
            rebase(module, add=(TracedCall,))
