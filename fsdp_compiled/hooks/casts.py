"""Finding, replacing and casting the tensors inside a module's inputs and outputs. Dynamo traces the casts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


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
    """Return ``value`` with its floating-point tensors in ``dtype`` and all its tensors on ``device``.

    None for ``dtype`` or ``device`` leaves that as it is.
    """

    def change(tensor: Tensor) -> Tensor:
        if device is not None and tensor.device != device:
            tensor = tensor.to(device)
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor = tensor.to(dtype)
        return tensor

    return map_tensors(change, value)
