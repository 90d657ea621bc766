"""A capture as plain data for JSON; all but the FX modules themselves."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import fx

from ..records import CapturedGraph, CapturedModel
from .facts import dtype_name


def as_json(data: Any) -> str:
    """Return plain data as JSON with a newline at its end."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Return dicts, lists, strings and numbers.

    A record becomes a dict of its fields, a dtype its name, an FX module its graph's text. Two records have more:

    - :class:`CapturedModel`: ``peak_unsharded_bytes``.
    - :class:`CapturedGraph`: ``compute_us``, ``communication_us``, ``exposed_us`` and ``total_us``; its ``module``
      is called ``after``.
    """
    match value:
        case CapturedModel():
            return _fields(value) | {"peak_unsharded_bytes": value.peak_unsharded_bytes}
        case CapturedGraph():
            totals = ("compute_us", "communication_us", "exposed_us", "total_us")
            data = _fields(value) | {name: getattr(value, name) for name in totals}
            return {"after" if key == "module" else key: item for key, item in data.items()}
        case fx.GraphModule():
            return str(value.graph)
        case torch.dtype():
            return dtype_name(value)
        case tuple():
            return [plain(item) for item in value]
    return _fields(value) if is_dataclass(value) else value


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: plain(getattr(record, field.name)) for field in fields(record)}
