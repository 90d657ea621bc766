"""Shows an optimizer plain tensors in place of DTensors for the time of an elementwise step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..expect import unexpected
from ..sharding.dtensor import laid_out_like
from .local_parts import check_params, local_part_of, name_of

# Checked on torch 2.11.0, 2.13.0 and 2.15.0, as are, in on_shards, the two marks by which schedulers know that a step
# ran. There are none of these hooks during a step: a subclass's that calls its parent's would run them again.
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@contextmanager
def local_tensors(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer hold plain tensors that share memory with its DTensors, which it holds again afterwards.

    ValueError, before anything is changed, for a layout that cannot be stepped.
    """
    groups = optimizer.param_groups
    shown_params: list[list[Tensor]] = [group["params"] for group in groups]
    dtensors = (param for param in chain.from_iterable(shown_params) if isinstance(param, DTensor))
    leaves: dict[Any, Tensor] = {param: _leaf(param, optimizer) for param in dtensors}
    if not leaves.keys() <= optimizer.state.keys():  # what has state was checked before it got it
        check_params(optimizer)
    attributes = {"state": _plain_state(optimizer, leaves), **{name: OrderedDict() for name in HOOKS}}
    shown = {name: getattr(optimizer, name) for name in attributes}
    for group, params in zip(groups, shown_params, strict=True):
        group["params"] = [leaves.get(param, param) for param in params]
    vars(optimizer).update(attributes)
    try:
        yield
    finally:
        owners = {leaf: param for param, leaf in leaves.items()}
        for key, values in optimizer.state.items():
            if key in owners:
                _show_state(values, shown["state"].setdefault(owners[key], {}), owners[key])
            else:
                shown["state"][key] = values
        for key in [key for key in shown["state"] if leaves.get(key, key) not in optimizer.state]:
            del shown["state"][key]  # as the step did
        for group, params in zip(optimizer.param_groups, shown_params, strict=True):
            group["params"] = params
        vars(optimizer).update(shown)


def _leaf(param: DTensor, optimizer: Optimizer) -> Tensor:
    """Return the plain tensor in place of ``param``, with its gradient."""
    leaf = param._local_tensor.detach()
    if param.grad is not None:
        leaf.requires_grad = True
        grad = local_part_of(param.grad, param, optimizer)
        if grad.dtype != leaf.dtype:
            leaf.grad_dtype = grad.dtype
        leaf.grad = grad
    return leaf


def _plain_state(optimizer: Optimizer, leaves: Mapping[Any, Tensor]) -> defaultdict[Any, Any]:
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, values in optimizer.state.items():
        if isinstance(key, DTensor) and key in leaves:
            values = {name: _plain_value(value, key, name, optimizer) for name, value in values.items()}
        state[leaves.get(key, key)] = values
    return state


def _plain_value(value: Any, param: DTensor, name: str, optimizer: Optimizer) -> Any:
    if isinstance(value, DTensor):
        return local_part_of(value, param, optimizer, f"state {name!r}")
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape != param._local_tensor.shape:
        got = f"a plain tensor of the whole shape {tuple(value.shape)}"
        do = "distribute it like the parameter before it is loaded"
        raise unexpected(name_of(param, optimizer), f"a DTensor as state {name!r}", got, do)
    return value


def _show_state(values: dict[str, Any], shown: dict[str, Any], param: DTensor) -> None:
    """Make ``shown``, which the user sees of a parameter's state, what a step left as ``values``."""
    for key, value in values.items():
        before = shown.get(key)
        if before is not value and not (isinstance(before, DTensor) and before._local_tensor is value):
            shown[key] = _shown_value(value, param)
    if len(shown) > len(values):
        for key in shown.keys() - values.keys():
            del shown[key]


def _shown_value(value: Any, param: DTensor) -> Any:
    """Return new state as its user sees it: with one value per element, as a DTensor of ``param``'s layout.

    A scalar's stays as it is, since here nothing tells it from a count of steps, and ranks have the same; where other
    parameters have DTensors of that name, the next step begins with making it one.
    """
    if not isinstance(value, Tensor) or not value.dim() or value.shape != param._local_tensor.shape:
        return value
    return laid_out_like(param, value)
