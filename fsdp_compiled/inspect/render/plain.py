"""A capture as plain data for JSON; all but the FX modules themselves."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import fx

from ..records import CapturedGraph, CapturedModel
from .facts import dtype_name


def plain(value: Any) -> Any:
    """Return dicts, lists, strings and numbers.

    A record becomes a dict of its fields, a dtype its name, an FX module its graph's text. Two records have more:

    - :class:`CapturedModel`: ``peak_unsharded_bytes``.
    - :class:`CapturedGraph`: ``compute_us``, ``communication_us``, ``exposed_us`` and ``total_us``; its ``module``
      is called ``after``.
    """
    if isinstance(value, fx.GraphModule):
        return str(value.graph)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if not is_dataclass(value):
        return value
    more: tuple[str, ...] = ("peak_unsharded_bytes",) if isinstance(value, CapturedModel) else ()
    if isinstance(value, CapturedGraph):
        more = ("compute_us", "communication_us", "exposed_us", "total_us")
    names = (*(field.name for field in fields(value)), *more)
    return {"after" if name == "module" else name: plain(getattr(value, name)) for name in names}
