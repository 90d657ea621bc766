"""Shards the parameters that were found and checked, and installs properties and hooks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..hooks.root import modules_outside_replicate
from ..hooks.state import FSDPState
from ..hooks.step import UnitInStep
from ..module import FSDPModule
from ..param.param import FSDPParam
from ..param.placement import ParamPlacement
from ..param.unit import UnitConfig
from ..passes import cost
from ..sharding.dtensor import note_groups
from ..torch_fsdp.registry import note_unit
from ..tracing.root_call import TracedCall
from ..tracing.sharded_module import own, rebase
from .parameters import FoundParameters


def shard(
    modules: Sequence[nn.Module],
    found: FoundParameters,
    placements: Sequence[ParamPlacement],
    default: ParamPlacement,
    reshard: bool | int | None,
) -> None:
    """Make a unit of ``modules``, sharded by ``placements`` of its own parameters.

    Its own parameters and buffers move to the mesh's device; meta tensors stay. Where ``reshard`` after forward is
    None, it is decided by whether the unit is the outermost one.
    """
    device = default.device
    outside = modules_outside_replicate(modules, skipped=FSDPModule)
    buffers = [buffer for _, module in outside for buffer in module._buffers.values()]
    for tensor in (*(param for _, param, _ in found.own), *buffers):
        if tensor is not None and tensor.device.type != "meta" and tensor.device != device:
            tensor.data = tensor.data.to(device)
    size = 0 if isinstance(reshard, bool | None) else reshard
    for mesh in {placement.mesh_info.mesh for placement in (default, *placements)}:
        note_groups(mesh)
    # A number of the unit would make the guards of the second model of a class differ from those of the first.
    unit = UnitInStep(UnitConfig(type(modules[0]).__name__, bool(reshard), reshard is None, size))
    params = [
        FSDPParam(places, placement, unit, name, param)
        for (name, param, places), placement in zip(found.own, placements, strict=True)
    ]
    state = FSDPState(modules, params, default, unit)
    for module, name in found.ignored:
        state.ignored.setdefault(module, set()).add(name)
    _install(modules, state, found)
    state.adopt_units_below()
    cost.share(device, default.mesh_info.spmd_mesh or default.mesh_info.mesh)


def _install(modules: Sequence[nn.Module], state: FSDPState, found: FoundParameters) -> None:
    """Give the unit's modules their properties, their state and the methods of FSDPModule."""
    owned: dict[nn.Module, dict[str, FSDPParam]] = {}
    for param in state.params:
        for module, name in param.places:
            owned.setdefault(module, {})[name] = param
    for _, param, places in found.shared:
        (owner,) = [unit for unit in param.places[0][0].__dict__["_fsdp_units"] if param in unit.params]
        state.share(owner, param, places)
        for module, name in places:
            owned.setdefault(module, {})[name] = param
    for module, by_name in owned.items():
        own(module, by_name, state)
    for module in modules:
        module.__dict__["_fsdp_state"] = state
        note_unit(module, state.unit, state)
        rebase(module, add=(FSDPModule, TracedCall))
