"""Finds optimizers that hold parameters which the model no longer trains; their steps would silently do nothing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..agreement.ledger import AFTER_A_STEP, note
from ..expect import unexpected
from ..param.param import FSDPParam
from ..sharding.dtensor import laid_out_like
from ..tracing.dynamo import skipped

_params: WeakSet[FSDPParam] = WeakSet()  # of all models
_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # how many parameters each had when it was


def watch_optimizers(params: Iterable[FSDPParam]) -> None:
    """Let an optimizer's first step, and the first after it got more parameters, look whether it holds stale ones.

    A stale one is a parameter as it was before ``fully_shard``, or unsharded: the step, unless it is compiled, raises
    RuntimeError.
    """
    _params.update(params)


@cache
def hook_steps() -> list[RemovableHandle]:
    """Run before and after the steps of all optimizers of the process; a second call does nothing."""
    return [register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)]


def unhook_steps() -> None:
    for handle in hook_steps():
        handle.remove()
    hook_steps.cache_clear()


@skipped  # else Dynamo would begin here where it skips the step around it, as on Python 3.14
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _check(optimizer)
        _distribute_scalars(optimizer)
        _count_writes(optimizer, args, kwargs, has_ended=False)


@skipped
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _count_writes(optimizer, args, kwargs, has_ended=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _count_writes(optimizer: Optimizer, args: Any, kwargs: Any, has_ended: bool) -> None:
    """Count what a step writes to sharded parameters: of operators on lists, torch counts plain tensors alone.

    What is unsharded is stale then. A closure may run backwards, which need what is there before the step: with one,
    writes are counted when the step ``has_ended``.
    """
    if any(map(callable, (*args[1:2], kwargs.get("closure")))) is not has_ended:
        return
    increment_version([param for param in _held(optimizer) if isinstance(param, DTensor) and param.grad is not None])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _distribute_scalars(optimizer: Optimizer) -> None:
    """Make DTensors of scalars' state as other parameters have it: torch's full state dicts leave tensors."""
    held = [param for param in _held(optimizer) if isinstance(param, DTensor)]
    if all(param.dim() for param in held):
        return
    states = {param: optimizer.state[param] for param in held if param in optimizer.state}
    names = {name for state in states.values() for name, value in state.items() if isinstance(value, DTensor)}
    for param, name in product(states, names):
        value = states[param].get(name)
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() == param.dim() == 0:
            states[param][name] = laid_out_like(param, value)


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check(optimizer: Optimizer) -> None:
    held = _held(optimizer)
    sharded = next((param for param in held if isinstance(param, DTensor)), None)
    if sharded is not None:
        note(sharded.device_mesh, "step", AFTER_A_STEP)
    if _checked.get(optimizer) == len(held):
        return
    stale = {
        id(tensor): (param.name, what)
        for param in _params
        for what, tensor in (("before fully_shard", param.original()), ("unsharded", param.unsharded.param))
        if tensor is not None
    }
    for name, what in (stale[id(param)] for param in held if id(param) in stale):
        expected = f"{type(optimizer).__name__} to hold the sharded parameter"
        do = "make the optimizer after fully_shard, of a model that is not unsharded"
        raise unexpected(name, expected, f"it as it was {what}, which no step would train", do, RuntimeError)
    _checked[optimizer] = len(held)
