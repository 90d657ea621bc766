"""What runs before and after the forward of a unit's modules: the eager hooks, and casts, which Dynamo traces.

Dynamo guards all that a traced hook reads, in every step, and by a comparison in Python if two hooks read one object.
So each of the two has constants of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..tracing.dynamo import skipped
from .casts import cast_floating
from .step import UnitState


@dataclass(eq=False)
class PreForward:
    """The hook before forward."""

    state: UnitState
    device: torch.device | None  # where inputs are moved
    dtype: torch.dtype | None = field(init=False)  # to which they are cast

    def __post_init__(self) -> None:
        policy = self.state.mp_policy
        self.dtype = policy.param_dtype if policy.cast_forward_inputs else None

    @skipped
    def hook(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments for forward."""
        if not torch.compiler.is_compiling():
            self.state.enter_forward(module)
        if self.dtype is not None or self.device is not None:
            args, kwargs = cast_floating((args, kwargs), self.dtype, self.device)
        if not torch.compiler.is_compiling():
            args, kwargs = self.state.watch_inputs(args, kwargs)
        return args, kwargs


@dataclass(eq=False)
class PostForward:
    """The hook after forward."""

    state: UnitState
    dtype: torch.dtype | None = field(init=False)  # to which outputs are cast

    def __post_init__(self) -> None:
        self.dtype = self.state.mp_policy.output_dtype

    @skipped
    def hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return what the module returns."""
        if not torch.compiler.is_compiling():
            output = self.state.watch_output(module, output)
        return output if self.dtype is None else cast_floating(output, self.dtype)
