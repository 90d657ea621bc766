"""The parameters that a new unit is about, and each one's mesh and shard dimension. It changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..expect import shown, unexpected
from ..hooks.root import modules_outside_replicate
from ..module import FSDPModule
from ..param.extension import check_extension, inner_tensors
from ..param.param import FSDPParam
from ..param.placement import ParamPlacement, Place, TakenOriginal
from ..sharding.dtensor import group_of_all, local_of
from ..sharding.layout import ShardLayout
from ..sharding.local_types import local_types
from ..sharding.mesh import DataParallelMeshInfo, FSDPMeshInfo, ScalarMeshInfo, ShardPlacementResult
from ..sharding.spec import Group
from ..torch_fsdp.registry import own_record
from ..tracing.sharded_module import is_managed

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


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
    for prefix, module in modules_outside_replicate(modules, skipped=FSDPModule):
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


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if nn.parameter.is_lazy(param):
        raise unexpected(name, "a parameter with a shape", "one of a lazy module", "run the module once before")
    if param.layout != torch.strided:
        do = "replace it by nn.Parameter(param.to_dense()), or leave it alone with ignored_params"
        raise unexpected(name, "a dense parameter", f"layout {param.layout}", do)
    if not param.is_contiguous():
        got = f"shape {tuple(param.shape)} with strides {param.stride()}"
        raise unexpected(name, "a contiguous parameter", got, "replace it by nn.Parameter(param.contiguous())")
    if param.grad_dtype not in (None, param.dtype) and not param.grad_dtype.is_floating_point:
        raise unexpected(name, "grad_dtype to be floating point or None", param.grad_dtype)


def _check_shared(name: str, taken: FSDPParam, placement: ParamPlacement) -> None:
    """Raise ValueError unless the unit of ``taken`` shards it as the unit that shares it would."""
    original = taken.original()
    assert original is not None  # this unit's modules hold it
    policy, dtype = placement.mp_policy.for_param(name, original), original.dtype
    own = replace(placement, mp_policy=policy).following(original)
    for what, there, here in (
        ("mesh", taken.placement.mesh_info.mesh, placement.mesh_info.mesh),
        ("param_dtype and reduce_dtype", taken.placement.dtypes(dtype)[:2], own.dtypes(dtype)[:2]),
        ("offload_policy", taken.placement.offload, placement.offload),
    ):
        if there != here:
            raise ValueError(
                f"{name}: is the same parameter as {taken.name} of unit {taken.unit.config.name}; expected the same "
                f"{what} for both, got {there} there and {here} here"
            )


def checked_placements(
    found: FoundParameters, default: ParamPlacement, choose: ShardPlacementFn | None, reshard: bool | int | None
) -> list[ParamPlacement]:
    """Return how to shard each of a unit's own parameters: by ``default`` where ``choose`` returns None."""
    placements = []
    for name, param, _ in found.own:
        info, dim = _chosen(name, None if choose is None else own_record(choose(param)), default.mesh_info)
        _check_dtensor(name, param, info)
        local = local_of(param.detach())
        check_extension(name, local, 1 if isinstance(reshard, bool | None) else info.shard_mesh_size)
        if local.dim():
            dim = _checked_dim(name, local, dim, info.shard_mesh_size)
        else:
            info, dim = _replicated(name, param, info), 0
        layout = ShardLayout(tuple(local.shape), dim, info.shard_mesh_size)
        inner_tensors(name, local, layout)  # whether it can be sharded
        if not isinstance(reshard, bool | None) and info.shard_mesh_size % reshard and info.shard_mesh_size != 1:
            ranks = f"the {info.shard_mesh_size} ranks that it is sharded over"
            raise unexpected(name, f"reshard_after_forward to be a divisor of {ranks}", reshard)
        policy = default.mp_policy.for_param(name, param)
        own = default.following(param)
        placements.append(replace(own, mesh_info=info, dim=dim, mp_policy=policy, device=info.device))
    for name, taken, _ in found.shared:
        _check_shared(name, taken, default)
    return placements


def _chosen(name: str, chosen: object, info: DataParallelMeshInfo) -> tuple[DataParallelMeshInfo, int]:
    """Return the mesh and the dimension of what ``shard_placement_fn`` returned."""
    if isinstance(chosen, ShardPlacementResult):
        info, chosen = chosen.mesh_info or info, chosen.placement
        if not isinstance(info, FSDPMeshInfo):
            expected = "ShardPlacementResult.mesh_info to be an FSDPMeshInfo or HSDPMeshInfo"
            raise unexpected(name, expected, type(info).__name__)
    if chosen is None:
        return info, 0
    if type(chosen) is not Shard:
        expected = "shard_placement_fn to return a Shard, a ShardPlacementResult or None"
        raise unexpected(name, expected, shown(chosen), error=TypeError)
    return info, chosen.dim


def _replicated(name: str, param: Tensor, info: DataParallelMeshInfo) -> DataParallelMeshInfo:
    """Return the mesh of a scalar, which all ranks have, and whose gradient they average."""
    if isinstance(param, DTensor) or info.dp_mesh_dims is not None:
        got = f"a scalar on {param.device_mesh if isinstance(param, DTensor) else info.spmd_mesh}"
        raise unexpected(name, "at least 1 dimension", got, "make it a 1-D parameter of one element")
    ranks = info.mesh.size()
    everyone = Group(group_of_all(info.mesh).group_name, ranks) if ranks > 1 else Group()
    return ScalarMeshInfo(info.mesh, replicate_mesh_dim=0, everyone=everyone)


def _checked_dim(name: str, local: Tensor, dim: int, world: int) -> int:
    if not -local.dim() <= dim < local.dim():
        do = f"use Shard(0) to Shard({local.dim() - 1})"
        raise unexpected(name, f"a shard dimension of a {local.dim()}-D parameter", f"Shard({dim})", do)
    dim %= local.dim()
    if dim > 0 and local.shape[dim] % world:
        raise ValueError(
            f"{name}: dim {dim} ({local.shape[dim]}) must be divisible by {world} shards for Shard({dim}); "
            "use Shard(0) or pad the parameter"
        )
    return dim


def _check_dtensor(name: str, param: Tensor, info: DataParallelMeshInfo) -> None:
    """Raise ValueError unless ``param``, a DTensor or not, fits the data-parallel mesh."""
    if not isinstance(param, DTensor):
        if local_types(name, param, info) is not None:
            return
        if info.spmd_mesh is not None and info.spmd_mesh.size() != info.mesh.size():
            left_out = f"since dp_mesh_dims leaves out some of its dimensions {info.spmd_mesh.mesh_dim_names}"
            expected = f"a DTensor on the mesh given to fully_shard, {left_out}"
            raise unexpected(name, expected, "a plain parameter without types", "use distribute_module first")
        return
    mesh = param.device_mesh
    if mesh.device_type != info.mesh.device_type:
        expected = f"a DTensor on a {info.mesh.device_type} mesh as given to fully_shard"
        raise unexpected(name, expected, f"one on {mesh.device_type}")
    if info.dp_mesh_dims is None:
        if mesh.mesh_dim_names is None or info.mesh.mesh_dim_names is None:
            expected = "meshes with dimension names for a parameter that is a DTensor already"
            do = "take both from one init_device_mesh(..., mesh_dim_names=...)"
            raise unexpected(name, expected, f"{mesh} and {info.mesh}", do)
        return
    if mesh != info.spmd_mesh:
        raise unexpected(name, f"a DTensor on the mesh given to fully_shard, {info.spmd_mesh}", mesh)
    for role, names in (("shard", info.dp_mesh_dims.shard_names), ("replicate", info.dp_mesh_dims.replicate_names)):
        for dim_name in names:
            placement = param.placements[mesh.mesh_dim_names.index(dim_name)]  # type: ignore[union-attr]
            if not placement.is_replicate():
                raise unexpected(name, f"Replicate() on data-parallel {role} dimension {dim_name!r}", placement)
