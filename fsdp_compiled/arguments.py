"""Checks what users pass to ``fully_shard`` and finds the parameters it is about. It changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from .mesh import DataParallelMeshInfo
from .module import FSDPModule
from .owner import ShardedModule
from .param import ParamModuleInfo, TakenOriginal
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .state import states_below
from .unit import ParamPlacement

ShardPlacementFn = Callable[[nn.Parameter], Shard | None]


def checked_modules(module: Any) -> list[nn.Module]:
    """Return the unit's modules: what was given, without modules below others of the list."""
    given: list[nn.Module] = module if isinstance(module, list) else [module]
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
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and _lacks_forward(module):
        raise ValueError(
            f"{type(module).__name__}: expected a module with a forward, got a container without one, whose "
            "hooks would never run; apply fully_shard to each of its members"
        )


def _lacks_forward(module: nn.Module) -> bool:
    return type(module).forward in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def check_options(
    mp_policy: object,
    offload_policy: object,
    ignored_params: object,
    shard_placement_fn: object,
    dp_mesh_dims: object,
) -> None:
    """Raise TypeError for a wrong type and NotImplementedError for an option that does not exist yet."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy, got {mp_policy!r}")
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"offload_policy: expected an OffloadPolicy, got {offload_policy!r}")
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise NotImplementedError("offload_policy: CPUOffloadPolicy is not implemented yet")
    if dp_mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims is not implemented yet; pass a 1-D or 2-D mesh")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn: expected a function or None, got {shard_placement_fn!r}")
    if ignored_params is None:
        return
    if not isinstance(ignored_params, (set, frozenset)):
        raise TypeError(f"ignored_params: expected a set of parameters, got {type(ignored_params).__name__}")
    for param in ignored_params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"ignored_params: expected parameters, got a {type(param).__name__} among them")


def checked_reshard(value: object, mesh_info: DataParallelMeshInfo) -> bool | None:
    """Return ``reshard_after_forward`` as True, False or None; group sizes of 1 and of all ranks are those."""
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
    if value not in (1, world):
        raise NotImplementedError(
            f"reshard_after_forward={value}: resharding to a smaller group is not implemented yet; use True or False"
        )
    return value == world


def check_whole_units_below(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if a unit lies only in part below ``modules``."""
    below = {module for root in modules for module in root.modules()}
    for state in states_below(modules):
        for module in state.modules:
            if module not in below:
                raise ValueError(
                    f"{state.status.name}: expected every module of this list unit below "
                    f"{type(modules[0]).__name__}, got a {type(module).__name__} outside it; apply fully_shard to a "
                    "module that holds them all"
                )


def check_device(mesh_info: DataParallelMeshInfo) -> None:
    """Raise ValueError unless this machine has the mesh's kind of device."""
    device_type = mesh_info.mesh.device_type
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        raise ValueError(
            f"mesh: expected a mesh of a device that this machine has, got device type {device_type!r}; "
            "use init_device_mesh('cpu', ...) with gloo"
        )


FoundParameter = tuple[str, nn.Parameter, ParamModuleInfo]


def managed_parameters(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[FoundParameter]:
    """Return (name, parameter, places) of every parameter below ``modules`` that no unit has taken yet."""
    places: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in modules_outside_units(modules):
        for name, param in module._parameters.items():
            if param is not None and param not in ignored and not is_managed(module, name):
                places.setdefault(param, []).append((f"{prefix}{name}", module, name))
    found = []
    for param, ((full_name, module, name), *others) in places.items():
        _check_parameter(full_name, param)
        shared = tuple((m, n) for _, m, n in others)
        found.append((full_name, param, ParamModuleInfo(module, name, shared)))
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
    taken = next((ref.taken_by for ref in weakref.getweakrefs(param) if isinstance(ref, TakenOriginal)), None)
    if taken is not None:
        raise NotImplementedError(
            f"{name}: is the same parameter as {taken.name} of another unit; parameters tied across units are not "
            "implemented yet; give both modules to one call: fully_shard([a, b])"
        )
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"{name}: is already a DTensor with placements {param.placements}; sharding on top of tensor "
            "parallelism is not implemented yet"
        )
    if param.dim() == 0:
        raise ValueError(
            f"{name}: expected at least 1 dimension, got a scalar; make it a 1-D parameter of one element"
        )
    if not param.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous parameter, got shape {tuple(param.shape)} with strides "
            f"{param.stride()}; replace it by nn.Parameter(param.contiguous())"
        )


@dataclass(frozen=True)
class PlacementPlan:
    """Decides each parameter's shard dimension."""

    mesh_info: DataParallelMeshInfo
    mp_policy: MixedPrecisionPolicy
    choose: ShardPlacementFn | None

    def placement(self, name: str, param: nn.Parameter) -> ParamPlacement:
        """Return how to shard ``param``.

        Raises:
            TypeError: ``choose`` returned something other than a Shard or None.
            ValueError: the parameter has no such dimension, or it is uneven and not dimension 0.
        """
        chosen = None if self.choose is None else self.choose(param)
        if chosen is None:
            return ParamPlacement(self.mesh_info, 0, self.mp_policy)
        if type(chosen) is not Shard:
            raise TypeError(f"{name}: expected shard_placement_fn to return a Shard or None, got {chosen!r}")
        return ParamPlacement(self.mesh_info, self._checked_dim(name, param, chosen.dim), self.mp_policy)

    def _checked_dim(self, name: str, param: nn.Parameter, dim: int) -> int:
        if not -param.dim() <= dim < param.dim():
            raise ValueError(
                f"{name}: expected a shard dimension of a {param.dim()}-D parameter, got Shard({dim}); use "
                f"Shard(0) to Shard({param.dim() - 1})"
            )
        dim %= param.dim()
        world = self.mesh_info.shard_world
        if dim > 0 and param.shape[dim] % world:
            raise ValueError(
                f"{name}: dim {dim} ({param.shape[dim]}) must be divisible by {world} shards for Shard({dim}); "
                "use Shard(0) or pad the parameter"
            )
        return dim
