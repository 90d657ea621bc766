"""Plain parameters that the package spmd_types has annotated: what they are on the full mesh.

Its types say per mesh axis what a rank's local tensor is: R and I, the same everywhere, with gradients that are yet
to be summed (R) or are not (I); S(dim), a part. They are looked up only where the user has imported the package.

*Source:* the table of forward and backward types in
https://github.com/meta-pytorch/spmd_types/blob/main/docs/local_spmd_types.md.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement

from ..expect import unexpected
from .mesh import DataParallelMeshInfo


@dataclass(frozen=True)
class LocalTypes:
    """The types of one parameter on each dimension of the full mesh, as placements of a DTensor."""

    placements: tuple[Placement, ...]
    grad_placements: tuple[Placement, ...]  # of what autograd computes as its gradient
    annotation: dict[Any, Any]  # of the local tensor, by the axes on which the user computes
    partition: Any  # the annotated partition, if any

    def annotate(self, unsharded: Tensor) -> None:
        _package().assert_type(unsharded, self.annotation, partition_spec=self.partition)


def _package() -> Any:
    return sys.modules.get("spmd_types")


def unchecked() -> AbstractContextManager[None]:
    """Return a context in which the package checks no operation."""
    return nullcontext() if _package() is None else _package().no_typecheck()


def keeps_types(function: type[torch.autograd.Function]) -> None:
    """Let the package know that outputs of ``function`` have the types of its inputs."""
    if (spmd := _package()) is not None and spmd.is_type_checking():
        spmd.register_local_autograd_function(function)


def local_types(name: str, param: Tensor, info: DataParallelMeshInfo) -> LocalTypes | None:
    """Return the types of the original parameter called ``name``; None if it has none.

    Raises:
        ValueError: they do not fit the mesh, or that has no other dimensions than data-parallel ones.
    """
    spmd = _package()
    if spmd is None or not (own := spmd.get_local_type(param)):
        return None
    mesh, dims = info.spmd_mesh, info.dp_mesh_dims
    if mesh is None or dims is None or mesh.mesh_dim_names is None:
        do = "call fully_shard(..., mesh=full mesh, dp_mesh_dims=DataParallelMeshDims(...))"
        raise unexpected(name, "a full mesh for a parameter with types of spmd_types", str(info.mesh), do)
    found, partition = dict(own), spmd.get_partition_spec(param)
    for dim, axes in enumerate(partition or ()):
        of_dim = axes if isinstance(axes, tuple) else (axes,) if axes is not None else ()
        found |= {axis: spmd.S(dim) for axis in of_dim}
    axes = {each: spmd.MeshAxis.of(mesh.get_group(each)) for each in mesh.mesh_dim_names}
    others = {each: axis for each, axis in axes.items() if each not in (*dims.shard_names, *dims.replicate_names)}
    for axis, of_axis in found.items():
        if axis in others.values():
            continue
        if not axis.isorthogonal(*others.values()):
            raise unexpected(name, f"types on the axes of {mesh.mesh_dim_names}", f"{of_axis!r} on {axis}")
        if of_axis is not spmd.R:
            do = "gradients are summed over data-parallel ranks by fully_shard"
            raise unexpected(name, f"the type R on data-parallel axis {axis}", repr(of_axis), do)
    types = []
    for each in mesh.mesh_dim_names:
        of_axis = found.get(axes[each], None if each in others and mesh[each].size() > 1 else spmd.R)
        if of_axis not in (spmd.R, spmd.I) and not isinstance(of_axis, spmd.Shard):
            raise unexpected(name, f"a type R, I or S(dim) on mesh dimension {each!r}", repr(of_axis))
        types.append(of_axis)
    return LocalTypes(
        tuple(map(spmd.spmd_type_to_dtensor_placement, types)),
        tuple(spmd.spmd_type_to_dtensor_placement(each.backward_type()) for each in types),
        _annotation(name, dict(own), mesh.size(), axes),
        partition,
    )


def _annotation(name: str, own: dict[Any, Any], ranks: int, axes: dict[str, Any]) -> dict[Any, Any]:
    """Return the types of a local tensor on the axes on which the user computes: R where it has none."""
    spmd = _package()
    if prod(axis.size() for axis in own) == ranks:
        return own
    computed_on = spmd.current_mesh() or frozenset(axes.values())
    if unknown := own.keys() - computed_on:
        do = "annotate it on them, or call fully_shard in spmd_types.set_current_mesh(...)"
        raise unexpected(name, f"types on the axes {sorted(map(str, computed_on))}", sorted(map(str, unknown)), do)
    return {axis: own.get(axis, spmd.R) for axis in computed_on}
