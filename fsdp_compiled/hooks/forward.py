"""What runs before and after the forward of a unit's modules: the eager hooks, and casts, which Dynamo traces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..param.unit import Unit
from ..tracing.dynamo import skipped


class EagerHooks(Protocol):
    """What hooks and identities call of ``FSDPState``, whose file imports this one."""

    @property
    def unit(self) -> Unit: ...
    def enter_forward(self, module: nn.Module, given: Any, args: Any, kwargs: Any) -> tuple[Any, Any]: ...
    def watch_output(self, module: nn.Module, output: Any) -> Any: ...
    def begin_by_gradients(self) -> None: ...
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
        given = args, kwargs
        if self.dtype is not None or self.device is not None:
            args, kwargs = cast_floating((args, kwargs), self.dtype, self.device)
        if not torch.compiler.is_compiling() and (self.state.unit.config.has_hooks or torch.is_grad_enabled()):
            return self.state.enter_forward(module, given, args, kwargs)
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


def map_tensors(change: Callable[[Tensor], Tensor | None], value: Any) -> Any:
    """Return ``value``, each tensor in it replaced by what ``change`` returns, depth first; None leaves it.

    Tuples, named tuples, lists, sets, dicts, their subclasses and dataclasses (among them Hugging Face's ModelOutput)
    are made anew if a tensor in them is replaced; a dict or dataclass within itself stays the original.
    Any other object stays the same, and a module may write to it.
    """
    changed = _changed(change, value)
    return value if changed is None else changed


def _changed(change: Callable[[Tensor], Tensor | None], value: Any, around: tuple[Any, ...] = ()) -> Any:
    """Return what takes the place of ``value``, within dataclasses and dicts ``around``; None if nothing changes."""
    if isinstance(value, Tensor):
        return change(value)
    if value is None:
        return None  # whose class torch 2.11's Dynamo cannot ask for attributes, as is_dataclass does
    if isinstance(value, PackedSequence):  # its batch_sizes must stay on the CPU
        changed = _changed(change, (value.data, value.sorted_indices, value.unsorted_indices))
        return None if changed is None else PackedSequence(changed[0], value.batch_sizes, *changed[1:])
    if isinstance(value, (tuple, list, set, frozenset)):
        pairs = [(_changed(change, item, around), item) for item in value]
        if all(new is None for new, _ in pairs):
            return None
        items = [item if new is None else new for new, item in pairs]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    is_record = is_dataclass(value) and not isinstance(value, type)
    if not is_record and not isinstance(value, dict):
        return None
    # In a graph no such thing comes, and torch 2.11 cannot trace the comparison.
    if not torch.compiler.is_compiling() and any(value is each for each in around):
        return None
    given = {f.name: getattr(value, f.name) for f in fields(value)} if is_record else value
    found = {key: _changed(change, item, (*around, value)) for key, item in given.items()}
    found = {key: new for key, new in found.items() if new is not None}
    if not found:
        return None
    if type(value) is dict:
        return {**value, **found}
    if is_record and value.__dataclass_params__.init and all(f.init for f in fields(value)):
        return replace(value, **found)
    changed = copy.copy(value)
    if is_record:
        for name, item in found.items():
            object.__setattr__(changed, name, item)
    else:
        changed.update(found)
    return changed


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, in the order in which :func:`map_tensors` meets them."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def cast_floating(value: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Return ``value``, its floating-point tensors in ``dtype`` and all on ``device``; None leaves that as it is."""

    def change(tensor: Tensor) -> Tensor | None:
        is_elsewhere = device is not None and tensor.device != device
        is_cast = dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype
        if not is_elsewhere and not is_cast:
            return None
        return tensor.to(device if is_elsewhere else tensor.device, dtype if is_cast else tensor.dtype)

    return map_tensors(change, value)
