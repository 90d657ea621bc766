"""Checks what users pass to ``fully_shard`` and finds the parameters it is about. It changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .extension import check_extension, is_extended
from .lookup import states_below
from .mesh import DataParallelMeshInfo, FSDPMeshInfo, ShardPlacementResult
from .module import FSDPModule
from .owner import ShardedModule
from .param import FSDPParam, ParamModuleInfo, TakenOriginal
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .spmd import local_of
from .unit import ParamPlacement

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


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
) -> None:
    """Raise TypeError for a wrong type."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy, got {mp_policy!r}")
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"offload_policy: expected an OffloadPolicy, got {offload_policy!r}")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn: expected a function or None, got {shard_placement_fn!r}")
    if ignored_params is None:
        return
    if not isinstance(ignored_params, (set, frozenset)):
        raise TypeError(f"ignored_params: expected a set of parameters, got {type(ignored_params).__name__}")
    for param in ignored_params:
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
    if value in (1, world):
        return value == world
    return value


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


Place = tuple[nn.Module, str]


@dataclass(frozen=True)
class FoundParameters:
    """What a new unit is about.

    Args:
        own: (name, parameter, places) of every parameter that no unit has taken yet.
        shared: (name, parameter of another unit, places in this one).
    """

    own: list[tuple[str, nn.Parameter, ParamModuleInfo]]
    shared: list[tuple[str, FSDPParam, list[Place]]]


def managed_parameters(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> FoundParameters:
    """Return the parameters below ``modules`` and outside the units there."""
    places: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in modules_outside_units(modules):
        for name, param in module._parameters.items():
            if param is not None and param not in ignored and not is_managed(module, name):
                places.setdefault(param, []).append((f"{prefix}{name}", module, name))
    found = FoundParameters([], [])
    for param, ((full_name, module, name), *others) in places.items():
        shared = [(m, n) for _, m, n in others]
        taken = next((ref.taken_by for ref in weakref.getweakrefs(param) if isinstance(ref, TakenOriginal)), None)
        if taken is not None:
            found.shared.append((full_name, taken, [(module, name), *shared]))
            continue
        _check_parameter(full_name, param)
        found.own.append((full_name, param, ParamModuleInfo(module, name, tuple(shared))))
    return found


def check_smaller_group(name: str, param: nn.Parameter, placement: ParamPlacement, size: int) -> None:
    """Raise if a parameter cannot be kept sharded over ``size`` ranks after forward.

    Raises:
        ValueError: the ranks that it is sharded over are no multiple.
        NotImplementedError: it has an all-gather extension.
    """
    world = placement.mesh_info.shard_world
    if world % size and world != 1:
        raise ValueError(
            f"{name}: expected reshard_after_forward to be a divisor of the {world} ranks that it is sharded over, "
            f"got {size}"
        )
    if world > 1 and is_extended(local_of(param.detach())):
        raise NotImplementedError(
            f"{name}: reshard_after_forward as a group size is not implemented for parameters with an all-gather "
            "extension; use True or False"
        )


def check_shared(name: str, taken: FSDPParam, placement: ParamPlacement) -> None:
    """Raise ValueError unless a unit that shares another's parameter means to shard it the same way."""
    original = taken.original()
    assert original is not None  # this unit's modules hold it
    for what, there, here in (
        ("mesh", taken.placement.mesh_info.mesh, placement.mesh_info.mesh),
        ("mp_policy", taken.placement.mp_policy, placement.mp_policy.for_param(name, original)),
        ("offload_policy", taken.placement.offload, placement.offload),
    ):
        if there != here:
            raise ValueError(
                f"{name}: is the same parameter as {taken.name} of unit {taken.status.name}; expected the same "
                f"{what} for both, got {there} there and {here} here"
            )


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


@dataclass(frozen=True)
class PlacementPlan:
    """Decides each parameter's mesh and shard dimension."""

    mesh_info: DataParallelMeshInfo
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    choose: ShardPlacementFn | None

    def placement(self, name: str, param: nn.Parameter) -> ParamPlacement:
        """Return how to shard ``param``.

        Raises:
            TypeError: ``choose`` returned something other than a Shard, a ShardPlacementResult or None, or the
                policy's function returned no dtype.
            ValueError: the parameter has no such dimension, it is uneven and not dimension 0, it may not have the
                dtype that function returned, or it is a DTensor on a mesh that does not fit.
        """
        info, dim = self._chosen(name, param)
        check_dtensor(name, param, info)
        check_extension(name, local_of(param.detach()))
        dim = _checked_dim(name, local_of(param), dim, info.shard_world)
        policy = self.mp_policy.for_param(name, param)
        return replace(self.default, mesh_info=info, dim=dim, mp_policy=policy, device=info.device)

    @property
    def default(self) -> ParamPlacement:
        """How the unit shards a parameter unless told otherwise."""
        offload = self.offload_policy if isinstance(self.offload_policy, CPUOffloadPolicy) else None
        return ParamPlacement(self.mesh_info, 0, self.mp_policy, self.mesh_info.device, offload)

    def _chosen(self, name: str, param: nn.Parameter) -> tuple[DataParallelMeshInfo, int]:
        chosen = None if self.choose is None else self.choose(param)
        info = self.mesh_info
        if isinstance(chosen, ShardPlacementResult):
            info, chosen = chosen.mesh_info or info, chosen.placement
            if not isinstance(info, FSDPMeshInfo):
                raise ValueError(
                    f"{name}: expected ShardPlacementResult.mesh_info to be an FSDPMeshInfo or HSDPMeshInfo, got "
                    f"{type(info).__name__}"
                )
        if chosen is None:
            return info, 0
        if type(chosen) is not Shard:
            raise TypeError(
                f"{name}: expected shard_placement_fn to return a Shard, a ShardPlacementResult or None, got "
                f"{chosen!r}"
            )
        return info, chosen.dim


def _checked_dim(name: str, local: Tensor, dim: int, world: int) -> int:
    if not -local.dim() <= dim < local.dim():
        raise ValueError(
            f"{name}: expected a shard dimension of a {local.dim()}-D parameter, got Shard({dim}); use "
            f"Shard(0) to Shard({local.dim() - 1})"
        )
    dim %= local.dim()
    if dim > 0 and local.shape[dim] % world:
        raise ValueError(
            f"{name}: dim {dim} ({local.shape[dim]}) must be divisible by {world} shards for Shard({dim}); "
            "use Shard(0) or pad the parameter"
        )
    return dim


def check_dtensor(name: str, param: Tensor, info: DataParallelMeshInfo) -> None:
    """Raise ValueError unless ``param``, a DTensor or not, fits the data-parallel mesh."""
    if not isinstance(param, DTensor):
        if info.spmd_mesh is not None and info.spmd_mesh.size() != info.mesh.size():
            raise ValueError(
                f"{name}: expected a DTensor on the mesh given to fully_shard, since dp_mesh_dims leaves out some of "
                f"its dimensions {info.spmd_mesh.mesh_dim_names}, got a plain parameter; use distribute_module first"
            )
        return
    mesh = param.device_mesh
    if mesh.device_type != info.mesh.device_type:
        raise ValueError(
            f"{name}: expected a DTensor on a {info.mesh.device_type} mesh as given to fully_shard, got one on "
            f"{mesh.device_type}"
        )
    if info.dp_mesh_dims is None:
        if mesh.mesh_dim_names is None or info.mesh.mesh_dim_names is None:
            raise ValueError(
                f"{name}: expected meshes with dimension names for a parameter that is a DTensor already, got {mesh} "
                f"and {info.mesh}; take both from one init_device_mesh(..., mesh_dim_names=...)"
            )
        return
    if mesh != info.spmd_mesh:
        raise ValueError(f"{name}: expected a DTensor on the mesh given to fully_shard, {info.spmd_mesh}, got {mesh}")
    for role, names in (("shard", info.dp_mesh_dims.shard_names), ("replicate", info.dp_mesh_dims.replicate_names)):
        for dim_name in names:
            placement = param.placements[mesh.mesh_dim_names.index(dim_name)]  # type: ignore[union-attr]
            if not placement.is_replicate():
                raise ValueError(
                    f"{name}: expected Replicate() on data-parallel {role} dimension {dim_name!r}, got {placement}"
                )
