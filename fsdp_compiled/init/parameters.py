"""Finds the parameters that a new unit is about. It changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..expect import unexpected
from ..module import FSDPModule
from ..param.param import FSDPParam
from ..param.placement import Place, TakenOriginal
from ..torch_fsdp.registry import applied
from ..tracing.sharded_module import is_managed


@dataclass(frozen=True)
class FoundParameters:
    """What a new unit is about: parameters that no unit has taken yet, and those of other units that it shares."""

    own: list[tuple[str, nn.Parameter, list[Place]]]  # with the full name
    shared: list[tuple[str, FSDPParam, list[Place]]]  # with the full name and the places in this unit
    ignored: list[Place]


def managed_parameters(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> FoundParameters:
    """Return the parameters below ``modules`` and outside the units there."""
    names: dict[nn.Parameter, str] = {}
    places: dict[nn.Parameter, list[Place]] = {}
    found = FoundParameters([], [], [])
    for prefix, module in modules_outside_units(modules):
        for name, param in module._parameters.items():
            if param is not None and param in ignored:
                found.ignored.append((module, name))
            elif param is not None and not is_managed(module, name):
                names.setdefault(param, f"{prefix}{name}")
                places.setdefault(param, []).append((module, name))
    for param, full_name in names.items():
        taken = next((ref.taken_by for ref in weakref.getweakrefs(param) if isinstance(ref, TakenOriginal)), None)
        if taken is not None:
            found.shared.append((full_name, taken, places[param]))
        else:
            _check_parameter(full_name, param)
            found.own.append((full_name, param, places[param]))
    return found


def modules_outside_units(modules: Sequence[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    """Yield (name prefix, module), skipping everything below another unit or a module under ``replicate``."""
    seen: set[int] = set()
    for index, root in enumerate(modules):
        stack = [(f"{index}." if len(modules) > 1 else "", root)]
        while stack:
            prefix, module = stack.pop()
            if id(module) in seen or isinstance(module, FSDPModule) or "replicate" in applied(module):
                continue
            seen.add(id(module))
            yield prefix, module
            stack += reversed([(f"{prefix}{name}.", child) for name, child in module.named_children()])


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if nn.parameter.is_lazy(param):
        raise unexpected(name, "a parameter with a shape", "one of a lazy module", "run the module once before")
    if param.layout != torch.strided:
        do = "replace it by nn.Parameter(param.to_dense()), or leave it alone with ignored_params"
        raise unexpected(name, "a dense parameter", f"layout {param.layout}", do)
    if param.dim() == 0:
        raise unexpected(name, "at least 1 dimension", "a scalar", "make it a 1-D parameter of one element")
    if not param.is_contiguous():
        got = f"shape {tuple(param.shape)} with strides {param.stride()}"
        raise unexpected(name, "a contiguous parameter", got, "replace it by nn.Parameter(param.contiguous())")
