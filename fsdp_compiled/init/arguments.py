"""Checks what users pass to ``fully_shard``. It changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule  # checked on torch 2.11.0, 2.13.0 and 2.15.0

from ..hooks.context import states_below
from ..module import FSDPModule
from ..policy import MixedPrecisionPolicy, OffloadPolicy
from ..sharding.mesh import DataParallelMeshInfo


def checked_modules(module: Any) -> list[nn.Module]:
    """Return the unit's modules: what was given, or compiled, without modules below others of the list."""
    listed: list[nn.Module] = module if isinstance(module, list) else [module]
    given = [each._orig_mod if isinstance(each, OptimizedModule) else each for each in listed]
    if not given:
        raise ValueError("module: expected a module or a non-empty list of modules, got an empty list")
    for one in given:
        _check_module(one)
    below = {id(m) for one in given for m in list(one.modules())[1:]}
    return list({id(one): one for one in given if id(one) not in below}.values())


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected nn.Module or a list of them, got {type(module).__name__}")
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"{type(module).__name__}: expected a module that is not sharded yet, got one that fully_shard has "
            "already been applied to; apply it once to each module"
        )
    for name, below in module.named_modules():
        if isinstance(below, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or type(module).__name__}: expected a Python module, got a {type(below).__name__}, whose "
                "compiled code would not see its parameters change; shard the module that it was made from"
            )
    without_forward = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward in without_forward:
        raise ValueError(
            f"{type(module).__name__}: expected a module with a forward, got a container without one, whose "
            "hooks would never run; apply fully_shard to each of its members"
        )


def check_options(
    mp_policy: object, offload_policy: object, ignored_params: object, shard_placement_fn: object
) -> None:
    """Raise TypeError for a wrong type."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy, got {mp_policy!r}")
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"offload_policy: expected an OffloadPolicy, got {offload_policy!r}")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn: expected a function or None, got {shard_placement_fn!r}")
    if not isinstance(ignored_params, set | frozenset | None):
        raise TypeError(f"ignored_params: expected a set of parameters, got {type(ignored_params).__name__}")
    for param in ignored_params or ():
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"ignored_params: expected parameters, got a {type(param).__name__} among them")


def checked_reshard(value: object, mesh_info: DataParallelMeshInfo) -> bool | int | None:
    """Return ``reshard_after_forward``; group sizes of 1 and of all ranks become False and True."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise TypeError(
            f"reshard_after_forward: expected True, False, None or the size of a smaller group, got {value!r} of "
            f"{type(value).__name__}"
        )
    world = mesh_info.shard_world
    if value < 1 or world % value:
        raise ValueError(f"reshard_after_forward: expected a divisor of the shard world size {world}, got {value}")
    return value == world if value in (1, world) else value


def check_complete_units_below(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if a unit lies only in part below ``modules``."""
    below = {module for root in modules for module in root.modules()}
    for state in states_below(modules):
        outside = [module for module in state.modules if module not in below]
        if outside:
            raise ValueError(
                f"{state.unit.config.name}: expected every module of this list unit below "
                f"{type(modules[0]).__name__}, got a {type(outside[0]).__name__} outside it; apply fully_shard to a "
                "module that holds them all"
            )


def check_no_unit_above(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if a unit around ``modules`` has taken the parameters there."""
    units = {unit for root in modules for module in root.modules() for unit in module.__dict__.get("_fsdp_units", ())}
    for unit in units:
        around = {module for outer in unit.modules for module in outer.modules()} - set(unit.modules)
        if around.intersection(modules):
            cls = getattr(modules[0], "_fsdp_user_class", type(modules[0]))
            raise ValueError(
                f"{cls.__name__}: expected parameters that no unit around it has taken, got those of "
                f"{unit.unit.config.name}; apply fully_shard to inner modules first and to the outermost one last"
            )


def check_device(mesh_info: DataParallelMeshInfo) -> None:
    """Raise ValueError unless this machine has the mesh's kind of device."""
    device_type = mesh_info.mesh.device_type
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        raise ValueError(
            f"mesh: expected a mesh of a device that this machine has, got device type {device_type!r}; "
            "use init_device_mesh('cpu', ...) with gloo"
        )
