"""Shards the parameters that were found and checked, and installs properties and hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..hooks.context import states_below
from ..hooks.lookup import new_unit_name, units_of
from ..hooks.state import FSDPState
from ..module import FSDPModule
from ..param.param import FSDPParam
from ..param.placement import ParamPlacement
from ..param.properties import TracedCall, own, rebase
from ..param.unit import Unit, UnitConfig
from .parameters import FoundParameters, is_managed, modules_outside_units
from .plan import PlacementPlan


def shard(
    modules: Sequence[nn.Module],
    found: FoundParameters,
    placements: Sequence[ParamPlacement],
    plan: PlacementPlan,
    reshard: bool | int | None,
    ignored: set[nn.Parameter],
) -> FSDPState:
    """Make a unit of ``modules`` and return its state.

    Args:
        modules: of the unit.
        found: its parameters.
        placements: of each parameter that is the unit's own.
        plan: of the unit.
        reshard: after forward; None is decided by whether the unit is the outermost one.
        ignored: parameters to leave alone.
    """
    _move_to_device(modules, plan.mesh_info.device, ignored)
    size = 0 if isinstance(reshard, bool | None) else reshard
    unit = Unit(UnitConfig(new_unit_name(modules), reshard_after_forward=bool(reshard), post_forward_size=size))
    params = [
        FSDPParam(info, placement, unit, name, param)
        for (name, param, info), placement in zip(found.own, placements, strict=True)
    ]
    state = FSDPState(modules, params, plan.mp_policy, reshard is None, unit, plan.mesh_info.device)
    _install(modules, state)
    for _, taken, places in found.shared:
        _share(state, taken, places)
    _adopt_units_below(modules, state)
    return state


def _move_to_device(modules: Sequence[nn.Module], device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Move what the unit manages, and the buffers beside it; meta tensors stay."""
    for _, module in modules_outside_units(modules):
        for name, param in module._parameters.items():
            if param is not None and param not in ignored and not is_managed(module, name):
                _move(param, device)
        for buffer in module._buffers.values():
            if buffer is not None:
                _move(buffer, device)


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device.type != "meta" and tensor.device != device:
        tensor.data = tensor.data.to(device)


def _install(modules: Sequence[nn.Module], state: FSDPState) -> None:
    """Give the unit's modules their properties, their state and the methods of FSDPModule."""
    _own(((place, param) for param in state.params for place in param.info.places()), state)
    for module in modules:
        module.__dict__["_fsdp_state"] = state
        rebase(module, add=(FSDPModule, TracedCall))


def _share(state: FSDPState, param: FSDPParam, places: Sequence[tuple[nn.Module, str]]) -> None:
    """Share a parameter of another unit with modules of this one."""
    (owner,) = [unit for unit in units_of(param.info.module) if param in unit.params]
    state.share(owner, param, places)
    _own(((place, param) for place in places), state)


def _own(params: Iterable[tuple[tuple[nn.Module, str], FSDPParam]], state: FSDPState) -> None:
    """Make modules read parameters of ``state`` at these places, all of a module's at once."""
    owned: dict[nn.Module, dict[str, FSDPParam]] = {}
    for (module, name), param in params:
        owned.setdefault(module, {})[name] = param
    for module, by_name in owned.items():
        own(module, by_name, state)


def _adopt_units_below(modules: Sequence[nn.Module], state: FSDPState) -> None:
    """Give the units below their full names, now that there is an outer one."""
    names: dict[nn.Module, str] = {}
    for index, root in enumerate(modules):
        prefix = str(index) if len(modules) > 1 else ""
        for name, module in root.named_modules(prefix=prefix):
            names.setdefault(module, name)
    for below in states_below(modules):
        if below is not state:
            params = {param: f"{names[param.info.module]}.{param.info.name}" for param in below.params}
            below.adopt(state, names[below.modules[0]], params)
            for module in below.modules:
                rebase(module, drop=TracedCall)
