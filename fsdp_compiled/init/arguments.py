"""Checks what users pass to ``fully_shard``. It changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..expect import expect, unexpected
from ..hooks.state import states_below
from ..module import FSDPModule
from ..policy import MixedPrecisionPolicy, OffloadPolicy
from ..sharding.mesh import DataParallelMeshInfo
from ..tracing.dynamo import module_inside
from ..tracing.sharded_module import user_class

_PEFT_ATTENTION = "peft.tuners.lora.layer.MultiheadAttention"  # checked on peft 0.21.2
_TENSORDICT_PARAMS = "tensordict.nn.params.TensorDictParams"  # checked on tensordict 0.15.3


def checked_modules(module: Any) -> list[nn.Module]:
    """Return the unit's modules: those given, or inside compiled ones, without modules below others of the list."""
    modules = [module_inside(each) for each in (module if isinstance(module, list) else [module])]
    if not modules:
        raise unexpected("module", "a module or a non-empty list of modules", "an empty list")
    for each in modules:
        _check_module(each)
    below = {inner for each in modules for inner in list(each.modules())[1:]}
    modules = [each for each in dict.fromkeys(modules) if each not in below]
    _check_no_unit_above(modules)
    _check_complete_units_below(modules)
    return modules


def _check_module(module: nn.Module) -> None:
    expect("module", module, nn.Module, "nn.Module or a list of them")
    cls = type(module).__name__
    if isinstance(module, FSDPModule):
        got, do = "one that fully_shard has already been applied to", "apply it once to each module"
        raise unexpected(cls, "a module that is not sharded yet", got, do)
    for name, below in module.named_modules():
        if isinstance(below, torch.jit.ScriptModule) and (not name or next(below.parameters(), None) is not None):
            got = f"a {type(below).__name__}, whose compiled code would not see its parameters change"
            raise unexpected(name or cls, "a Python module", got, "shard the module that it was made from")
        kind = f"{type(below).__module__}.{type(below).__name__}"
        if kind == _PEFT_ATTENTION:
            got, do = f"PEFT's {type(below).__name__}, which replaces them in every forward", "adapt other modules"
            raise unexpected(name or cls, "a module that keeps its parameters", got, do, NotImplementedError)
        if kind == _TENSORDICT_PARAMS:
            got, do = "TensorDictParams, whose values would stay the original ones, untrained", "shard other modules"
            raise unexpected(name or cls, "a module that reads its parameters", got, do, NotImplementedError)
    without_forward = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward in without_forward:
        got, do = "a container without one, whose hooks would never run", "apply fully_shard to each of its members"
        raise unexpected(cls, "a module with a forward", got, do)


def check_options(
    mp_policy: object, offload_policy: object, ignored_params: Iterable[object] | None, shard_placement_fn: object
) -> None:
    """Raise TypeError for a wrong type."""
    expect("mp_policy", mp_policy, MixedPrecisionPolicy, "a MixedPrecisionPolicy")
    expect("offload_policy", offload_policy, OffloadPolicy | None, "an OffloadPolicy")
    expect("shard_placement_fn", shard_placement_fn, Callable | None, "a function or None")
    expect("ignored_params", ignored_params, set | frozenset | None, "a set of parameters")
    for param in ignored_params or ():
        if not isinstance(param, nn.Parameter):
            raise unexpected("ignored_params", "parameters", f"a {type(param).__name__} among them", error=TypeError)


def checked_reshard(value: bool | int | None, mesh_info: DataParallelMeshInfo) -> bool | int | None:
    """Return ``reshard_after_forward``; group sizes of 1 and of all ranks become False and True."""
    if value is None or isinstance(value, bool):
        return value
    expect("reshard_after_forward", value, int, "True, False, None or the size of a smaller group")
    world = mesh_info.shard_mesh_size
    if value < 1 or world % value:
        raise unexpected("reshard_after_forward", f"a divisor of the shard world size {world}", value)
    return value == world if value in (1, world) else value


def _check_complete_units_below(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if a unit lies only in part below ``modules``."""
    below = {module for root in modules for module in root.modules()}
    for state in states_below(modules):
        outside = [module for module in state.modules if module not in below]
        if outside:
            expected = f"every module of this list unit below {type(modules[0]).__name__}"
            got, do = f"a {type(outside[0]).__name__} outside it", "apply fully_shard to a module that holds them all"
            raise unexpected(state.unit.config.name, expected, got, do)


def _check_no_unit_above(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if a unit around ``modules`` has taken the parameters there."""
    units = {unit for root in modules for module in root.modules() for unit in module.__dict__.get("_fsdp_units", ())}
    for unit in units:
        around = {module for outer in unit.modules for module in outer.modules()} - set(unit.modules)
        if around.intersection(modules):
            name, got = user_class(modules[0]).__name__, f"those of {unit.unit.config.name}"
            do = "apply fully_shard to inner modules first and to the outermost one last"
            raise unexpected(name, "parameters that no unit around it has taken", got, do)


def check_device(mesh_info: DataParallelMeshInfo) -> None:
    """Raise ValueError unless this machine has the mesh's kind of device."""
    device_type = mesh_info.mesh.device_type
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        do = "use init_device_mesh('cpu', ...) with gloo"
        raise unexpected("mesh", "a mesh of a device that this machine has", f"device type {device_type!r}", do)
