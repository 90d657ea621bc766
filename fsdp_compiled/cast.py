"""Casting and moving the tensors inside a module's inputs and outputs. Dynamo traces it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def cast_floating(value: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype`` and all its tensors on ``device``.

    Tuples, named tuples, lists, dicts and dataclasses are rebuilt; any other object is left alone. None for
    ``dtype`` or ``device`` leaves that as it is.
    """
    if isinstance(value, Tensor):
        return _cast_tensor(value, dtype, device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype, device) for item in value))
    if type(value) in (tuple, list):
        return type(value)(cast_floating(item, dtype, device) for item in value)
    if type(value) is dict:
        return {key: cast_floating(item, dtype, device) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type) and _is_plain(value):
        items = {f.name: cast_floating(getattr(value, f.name), dtype, device) for f in fields(value)}
        return replace(value, **items)
    return value


def _cast_tensor(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    if device is not None and tensor.device != device:
        tensor = tensor.to(device)
    if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor


def _is_plain(value: Any) -> bool:
    # Mappings such as Hugging Face's ModelOutput are dataclasses too, but replace() cannot rebuild them.
    return not isinstance(value, dict) and all(f.init for f in fields(value))
