"""Finds the parameters that a new unit is about. It changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ..module import FSDPModule
from ..param.param import FSDPParam, TakenOriginal
from ..param.placement import ParamModuleInfo
from ..param.properties import ShardedModule

Place = tuple[nn.Module, str]


@dataclass(frozen=True)
class FoundParameters:
    """What a new unit is about: parameters that no unit has taken yet, and those of other units that it shares."""

    own: list[tuple[str, nn.Parameter, ParamModuleInfo]]  # with the full name
    shared: list[tuple[str, FSDPParam, list[Place]]]  # with the full name and the places in this unit


def managed_parameters(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> FoundParameters:
    """Return the parameters below ``modules`` and outside the units there."""
    names: dict[nn.Parameter, str] = {}
    places: dict[nn.Parameter, list[Place]] = {}
    for prefix, module in modules_outside_units(modules):
        for name, param in module._parameters.items():
            if param is not None and param not in ignored and not is_managed(module, name):
                names.setdefault(param, f"{prefix}{name}")
                places.setdefault(param, []).append((module, name))
    found = FoundParameters([], [])
    for param, full_name in names.items():
        (module, name), *others = places[param]
        taken = next((ref.taken_by for ref in weakref.getweakrefs(param) if isinstance(ref, TakenOriginal)), None)
        if taken is not None:
            found.shared.append((full_name, taken, places[param]))
        else:
            _check_parameter(full_name, param)
            found.own.append((full_name, param, ParamModuleInfo(module, name, tuple(others))))
    return found


def modules_outside_units(modules: Sequence[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    """Yield (name prefix, module), skipping everything below another unit."""
    seen: set[int] = set()
    for index, root in enumerate(modules):
        stack = [(f"{index}." if len(modules) > 1 else "", root)]
        while stack:
            prefix, module = stack.pop()
            if id(module) in seen or isinstance(module, FSDPModule):
                continue
            seen.add(id(module))
            yield prefix, module
            stack += reversed([(f"{prefix}{name}.", child) for name, child in module.named_children()])


def is_managed(module: nn.Module, name: str) -> bool:
    """Tell whether a unit has taken the parameter registered here."""
    return isinstance(module, ShardedModule) and name in module._fsdp_params


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if param.dim() == 0:
        raise ValueError(
            f"{name}: expected at least 1 dimension, got a scalar; make it a 1-D parameter of one element"
        )
    if not param.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous parameter, got shape {tuple(param.shape)} with strides "
            f"{param.stride()}; replace it by nn.Parameter(param.contiguous())"
        )
