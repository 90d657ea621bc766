"""What a user decides about dtypes, offload and the schedule: frozen records, checked when made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.torch_version import TorchVersion

from .expect import expect, expect_bool, unexpected
from .passes.schedule_policy import SchedulePolicy as SchedulePolicy


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit's communication and compute. Sharded parameters and gradients keep their own.

    Args:
        param_dtype: dtype of the all-gather and of the unsharded parameters; None keeps the original dtype.
            Non-floating-point parameters are never cast.
        reduce_dtype: dtype of the reduce-scatter and of accumulated unsharded gradients. None does what the installed
            torch's FSDP2 does: the parameter's original dtype since 2.15, ``param_dtype`` before; or the parameter's
            ``grad_dtype``, if that was set.
        output_dtype: floating-point outputs of the unit's forward are cast to it; None leaves them.
        cast_forward_inputs: whether floating-point inputs of forward are cast to ``param_dtype``.
        param_dtype_override_fn: given each original parameter once, on every rank alike, it returns the parameter's
            own dtype to leave it uncast, or None for ``param_dtype``.

    Raises:
        TypeError: a field has another type.
        ValueError: a dtype is not floating point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[..., torch.dtype | None] | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            where, example = f"MixedPrecisionPolicy.{name}", "use for example torch.bfloat16"
            expect(where, value, torch.dtype | None, "torch.dtype or None", example)
            if value is not None and not value.is_floating_point:
                raise unexpected(where, "a floating-point dtype", value, example)
        expect_bool("MixedPrecisionPolicy.cast_forward_inputs", self.cast_forward_inputs)
        where = "MixedPrecisionPolicy.param_dtype_override_fn"
        expect(where, self.param_dtype_override_fn, Callable | None, "a function or None")

    def for_param(self, name: str, param: torch.nn.Parameter) -> MixedPrecisionPolicy:
        """Return the policy of one parameter, without a function.

        Raises:
            TypeError: the function returned no dtype.
            ValueError: it returned a dtype that is neither the parameter's nor ``param_dtype``.
        """
        if self.param_dtype_override_fn is None:
            return self
        dtype = self.param_dtype_override_fn(param)
        expected = f"param_dtype_override_fn to return None, {param.dtype} or {self.param_dtype}"
        expect(name, dtype, torch.dtype | None, expected)
        if dtype not in (None, param.dtype, self.param_dtype):
            raise unexpected(name, expected, dtype)
        own = self.param_dtype if dtype is None else dtype
        return replace(self, param_dtype=own if own and own.is_floating_point else None, param_dtype_override_fn=None)


@dataclass(frozen=True)
class OffloadPolicy:
    """No offload: sharded parameters, gradients and optimizer state live on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, gradients and optimizer state on the CPU.

    Args:
        pin_memory: whether to pin the shards' memory so that copies to the device overlap with compute. Gradients
            copied from a GPU are pinned in any case.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        expect_bool("CPUOffloadPolicy.pin_memory", self.pin_memory)


# What the installed torch's FSDP2 does. *Source:* "versionchanged:: 2.15" of MixedPrecisionPolicy, and FSDPModule's
# reset_iter_state of 2.15, after which an accumulation of gradients is to begin anew.
_REDUCES_IN_ORIGINAL_DTYPE = RESET_DROPS_GRADIENTS = TorchVersion(torch.__version__) >= "2.15"


class Dtypes(NamedTuple):
    """In which a parameter is all-gathered, its gradient is reduced, and its sharded gradient is kept."""

    all_gather: torch.dtype
    reduction: torch.dtype
    gradient: torch.dtype


def resolved(policy: MixedPrecisionPolicy, original: torch.dtype, grad_dtype: torch.dtype | None) -> Dtypes:
    """Return the dtypes for a parameter of dtype ``original``.

    ``grad_dtype`` is the parameter's: ``original`` unless the user has set it, None if gradients may have any.
    """
    if not original.is_floating_point:
        return Dtypes(original, original, original)
    param_dtype = policy.param_dtype or original
    reduced_in = original if _REDUCES_IN_ORIGINAL_DTYPE else param_dtype
    if grad_dtype != original:
        reduced_in = grad_dtype or param_dtype
    reduce_dtype = policy.reduce_dtype or reduced_in
    return Dtypes(param_dtype, reduce_dtype, grad_dtype or reduce_dtype)
