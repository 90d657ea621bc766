"""What runs before and after the forward of a unit's modules: the eager hooks, and casts, which Dynamo traces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..param.unit import Unit
from ..tracing.dynamo import skipped


class EagerHooks(Protocol):
    """What hooks and identities call of ``FSDPState``, whose file imports this one."""

    @property
    def unit(self) -> Unit: ...
    def enter_forward(self, module: nn.Module) -> None: ...
    def watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]: ...
    def watch_output(self, module: nn.Module, output: Any) -> Any: ...
    def pre_backward(self) -> None: ...
    def post_backward(self) -> None: ...


# Dynamo guards all that a traced hook reads, in every step, and by a comparison in Python if two hooks read one
# object. So each of the two has constants of its own.


@dataclass(eq=False)
class PreForward:
    state: EagerHooks
    device: torch.device | None  # where inputs are moved
    dtype: torch.dtype | None  # to which they are cast

    @skipped
    def hook(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        runs_hooks = not torch.compiler.is_compiling() and (
            self.state.unit.config.has_hooks or torch.is_grad_enabled()
        )
        if runs_hooks:
            self.state.enter_forward(module)
        if self.dtype is not None or self.device is not None:
            args, kwargs = cast_floating((args, kwargs), self.dtype, self.device)
        if runs_hooks:
            args, kwargs = self.state.watch_inputs(args, kwargs)
        return args, kwargs


@dataclass(eq=False)
class PostForward:
    state: EagerHooks
    dtype: torch.dtype | None  # to which outputs are cast

    @skipped
    def hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling() and self.state.unit.config.has_hooks:
            output = self.state.watch_output(module, output)
        return output if self.dtype is None else cast_floating(output, self.dtype)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return ``value`` with ``change`` applied to every tensor in it, depth first.

    Tuples, named tuples, lists, sets, dicts and dataclasses (among them Hugging Face's ModelOutput) are rebuilt;
    any other object is left alone.
    """
    if isinstance(value, Tensor):
        return change(value)
    if value is None:
        return None  # whose class torch 2.11's Dynamo cannot ask for attributes, as is_dataclass does
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item) for item in value))
    if type(value) in (tuple, list, set, frozenset):
        return type(value)(map_tensors(change, item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return _map_fields(change, value)
    if type(value) is dict:
        return {key: map_tensors(change, item) for key, item in value.items()}
    if isinstance(value, dict):
        changed = copy.copy(value)
        changed.update((key, map_tensors(change, item)) for key, item in value.items())
        return changed
    return value


def _map_fields(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    items = {f.name: map_tensors(change, getattr(value, f.name)) for f in fields(value)}
    if all(f.init for f in fields(value)):
        return replace(value, **items)
    changed = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(changed, name, item)
    return changed


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, in the order in which :func:`map_tensors` meets them."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, value)
    return found


def cast_floating(value: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Return ``value``, its floating-point tensors in ``dtype`` and all on ``device``; None leaves that as it is."""

    def change(tensor: Tensor) -> Tensor:
        if device is not None and tensor.device != device:
            tensor = tensor.to(device)
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor = tensor.to(dtype)
        return tensor

    return map_tensors(change, value)
