"""How a model is compiled with a schedule of its own: ``compile`` and ``options``.

It hands the passes to Inductor for one compile; what the passes decide it must not know.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import collectives, passes
from .policy import SchedulePolicy


def options(schedule: SchedulePolicy | None = None) -> dict[str, Any]:
    """Return options for ``torch.compile(model, options=...)`` by which one compile uses ``schedule``.

    Passes that the user has in Inductor's custom-pass slots still run, after ours. Call it again after changing
    those slots.

    Args:
        schedule: None for the default policy, which plain ``torch.compile`` uses too.

    Raises:
        TypeError: ``schedule`` is no SchedulePolicy.
    """
    if schedule is not None and not isinstance(schedule, SchedulePolicy):
        raise TypeError(
            f"schedule: expected a SchedulePolicy or None, got {type(schedule).__name__}; "
            'use for example SchedulePolicy(bucket="unit")'
        )
    return passes.options(schedule or SchedulePolicy(), core_hash())


def compile(
    model: nn.Module | Callable[..., Any], *, schedule: SchedulePolicy | None = None, **torch_compile_kwargs: Any
) -> Any:
    """Compile a sharded model as ``torch.compile`` does, with a schedule of its own.

    Args:
        model: a module given to ``fully_shard``, or a function that calls one.
        schedule: None for the default policy.
        torch_compile_kwargs: given to ``torch.compile``; ``options`` and ``mode`` are kept.

    Returns:
        What ``torch.compile`` returns.

    Raises:
        TypeError: ``schedule`` is no SchedulePolicy.
        ValueError: another backend than Inductor, which alone runs the passes, or both ``mode`` and ``options``.
    """
    backend = torch_compile_kwargs.get("backend", "inductor")
    if backend != "inductor":
        raise ValueError(f"backend: expected 'inductor', got {backend!r}; only Inductor runs the graph passes")
    mode, given = torch_compile_kwargs.pop("mode", None), torch_compile_kwargs.pop("options", None) or {}
    if mode is not None and given:
        raise ValueError(f"mode: expected None beside options, got {mode!r}; put what the mode sets into options")
    of_mode = torch._inductor.list_mode_options(mode) if mode is not None else {}
    return torch.compile(model, options={**of_mode, **given, **options(schedule)}, **torch_compile_kwargs)


def core_hash() -> str:
    """Return a hash of what the operators in a graph compute, for the compile-cache keys."""
    return passes.source_hash(Path(collectives.__file__).parent)
