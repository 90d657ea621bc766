"""What is streamed of a model: parameters and persistent buffers, each once, its name and of what it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..expect import expect, shown, unexpected
from ..hooks.state import FSDPState, states_of
from ..param.param import FSDPParam
from ..tracing.dynamo import module_inside

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Item:
    """One tensor under its name."""

    name: str
    sources: tuple[Tensor, ...]  # as they are registered
    join: Callable[..., Tensor] | None = None  # makes it of the complete sources; None: it is the only one

    def travels_in(self, source: Tensor, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype in which a source is all-gathered: what is joined is cast afterwards."""
        return source.dtype if self.join is not None else cast_dtype(source, dtype)

    def travelling_bytes(self, dtype: torch.dtype | None) -> int:
        return sum(source.numel() * self.travels_in(source, dtype).itemsize for source in self.sources)


def cast_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return ``dtype`` for a floating-point tensor, else its own."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def batches_of(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield successive items together, of at most ``limit`` bytes; a larger one alone."""
    taken, taken_bytes = list[T](), 0
    for item in items:
        size = nbytes(item)
        if taken and taken_bytes + size > limit:
            yield taken
            taken, taken_bytes = [], 0
        taken.append(item)
        taken_bytes += size
    if taken:
        yield taken


def name_in_state(name: str) -> str:
    """Return a name as of ``get_model_state_dict``: without what ``checkpoint_wrapper`` and ``torch.compile`` add."""
    return f"{name}.".replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")[:-1]


def names_of_tensors(model: nn.Module) -> Iterable[tuple[list[str], Tensor]]:
    """Yield each parameter and persistent buffer once, with all of its names in the state dict."""
    return each_once({name_in_state(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()})


def each_once(state_dict: Mapping[str, Any]) -> Iterable[tuple[list[str], Tensor]]:
    """Yield each tensor of a state dict once, with all of its names there."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in state_dict.items():
        if isinstance(tensor, Tensor):
            found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return found.values()


def items_of(model: nn.Module) -> list[Item]:
    return [Item(names[0], (tensor,)) for names, tensor in names_of_tensors(model)]


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's and what ``torch.compile`` has wrapped, or the model itself."""
    original = module_inside(model)
    return original.get_base_model() if hasattr(original, "get_base_model") else original


def check_streamed(model: nn.Module, dtype: torch.dtype | None) -> list[FSDPState]:
    """Return the units of ``model``, outermost first, after looking for what was replaced; raises as its callers."""
    states = states_of(model)
    expect("dtype", dtype, torch.dtype | None, "a floating-point dtype or None")
    if dtype is not None and not dtype.is_floating_point:
        raise unexpected("dtype", "a floating-point dtype or None", shown(dtype))
    for root in dict.fromkeys(state.outermost for state in states):
        root.check_parameters()
    return states


def sharded_tensors(model: nn.Module, states: Iterable[FSDPState]) -> list[tuple[str, Tensor, FSDPParam | None]]:
    """Return each parameter and persistent buffer once, sharded where it is a unit's, also while it is unsharded."""
    params = sharded_parameters(states)
    found = ((names[0], tensor, params.get(id(tensor))) for names, tensor in names_of_tensors(model))
    return [(name, tensor if param is None else param.sharded_param, param) for name, tensor, param in found]


def sharded_parameters(states: Iterable[FSDPState]) -> dict[int, FSDPParam]:
    """Return the units' parameters by the ids of the tensors that may be registered for them."""
    params = [param for state in states for param in (*state.params, *(shared for _, shared in state.shared))]
    tensors = ((tensor, param) for param in params for tensor in (param.sharded_param, param.unsharded.param))
    return {id(tensor): param for tensor, param in tensors if tensor is not None}
