"""How a sharded parameter is laid out as a DTensor, also on top of tensor or expert parallelism.

It knows DTensor specs and mesh dimensions; it must not know modules or collectives.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

# Checked on torch 2.11.0, 2.13.0 and 2.15.0: DTensor(local, spec) costs a few microseconds where the public
# DTensor.from_local costs ten times that for every gradient of every step.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from .mesh import DataParallelMeshInfo

_TAKES_GRAD_PLACEMENTS = "grad_placements" in inspect.signature(DTensor.from_local).parameters


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, not differentiable and sharing its memory; any other tensor itself."""
    # to_local() would be differentiable, and an in-place change of its result would not reach the DTensor.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_part(tensor: DTensor) -> tuple[slice, ...]:
    """Return which part of the whole tensor its local tensor is."""
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


@dataclass(frozen=True)
class OuterParallelism:
    """What an unsharded parameter is where other mesh dimensions shard it too: a DTensor over them."""

    spec: DTensorSpec  # of the original parameter
    dp_dims: frozenset[int] = frozenset()  # data-parallel dimensions of its mesh; they do not redistribute gradients
    _wrap_opaquely: Callable[[Tensor], DTensor] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.dp_dims and not _TAKES_GRAD_PLACEMENTS:

            def wrap_opaquely(local: Tensor) -> DTensor:
                return _WrapLocal.apply(local, self)

            # A function of this object's own: Dynamo hands such a function nothing but tensors and constants.
            object.__setattr__(self, "_wrap_opaquely", torch.compiler.allow_in_graph(wrap_opaquely))

    def wrap(self, local: Tensor) -> DTensor:
        """Return the unsharded parameter, differentiable, from its local tensor; Dynamo traces this."""
        if self._wrap_opaquely is not None:
            return self._wrap_opaquely(local)
        spec = self.spec
        options: dict[str, Any] = {"run_check": False, "shape": spec.shape, "stride": spec.stride}
        if self.dp_dims:  # each data-parallel rank computes a gradient from its own data
            partial = [Partial() if dim in self.dp_dims else want for dim, want in enumerate(spec.placements)]
            options["grad_placements"] = partial
        return DTensor.from_local(local, spec.mesh, spec.placements, **options)

    def leaf(self, local: Tensor) -> DTensor:
        """Return a DTensor that shares memory with ``local`` and is no function of it."""
        return DTensor(local, self.spec, requires_grad=False)

    def local_grad(self, grad: Tensor) -> Tensor:
        """Return the local gradient with the parameter's placements, except over data-parallel dimensions."""
        if not isinstance(grad, DTensor):
            return grad
        wanted = tuple(
            got if dim in self.dp_dims else want
            for dim, (got, want) in enumerate(zip(grad.placements, self.spec.placements, strict=True))
        )
        if wanted != grad.placements:
            grad = grad.redistribute(placements=wanted)
        local = grad.to_local()
        return local.wait() if hasattr(local, "wait") else local


class _WrapLocal(torch.autograd.Function):
    """``DTensor.from_local`` with ``grad_placements``, for torch 2.11, which has none.

    Not for newer ones: there Dynamo makes a mesh an input of the graph, and one hidden in here would be another.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, outer: OuterParallelism) -> DTensor:
        ctx.outer = outer
        return DTensor(local.view_as(local), copy.copy(outer.spec), requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.outer.local_grad(grad), None


def outer_parallelism(info: DataParallelMeshInfo, param: Tensor) -> OuterParallelism | None:
    """Return what ``param`` is beyond data parallelism; None for a plain tensor."""
    return OuterParallelism(param._spec, frozenset(_dp_dims(info))) if isinstance(param, DTensor) else None


def _dp_dims(info: DataParallelMeshInfo) -> list[int]:
    """Return the indices of the data-parallel dimensions in the full mesh, those that shard first."""
    if info.dp_mesh_dims is None or info.spmd_mesh is None:
        return []
    names: tuple[str, ...] = info.spmd_mesh.mesh_dim_names or ()
    return [names.index(name) for name in (*info.dp_mesh_dims.shard_names, *info.dp_mesh_dims.replicate_names)]


def sharded_spec(info: DataParallelMeshInfo, param: Tensor, dim: int) -> DTensorSpec:
    """Return the spec of the sharded parameter made from original ``param`` by sharding dimension ``dim``."""
    if not isinstance(param, DTensor):
        meta = TensorMeta(param.shape, torch.empty(param.shape, device="meta").stride(), param.dtype)
        return DTensorSpec(info.mesh, info.placements(Shard(dim)), tensor_meta=meta)
    spec = param._spec
    meta = TensorMeta(spec.shape, spec.stride, param.dtype)
    if info.dp_mesh_dims is None:
        mesh = DeviceMesh._concatenate([info.mesh, spec.mesh])
        mine = info.placements(_strided(dim, spec, range(spec.mesh.ndim)))
        return DTensorSpec(mesh, (*mine, *spec.placements), tensor_meta=meta)
    if len(info.dp_mesh_dims.shard_names) > 1:
        return _flattened_spec(info, spec, dim, meta)
    placements = list(spec.placements)
    for index in _dp_dims(info)[: len(info.dp_mesh_dims.shard_names)]:
        placements[index] = _strided(dim, spec, range(index + 1, spec.mesh.ndim))
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta)


def _flattened_spec(info: DataParallelMeshInfo, spec: DTensorSpec, dim: int, meta: TensorMeta) -> DTensorSpec:
    """Put the data-parallel mesh, whose several sharding dimensions are one, in place of the first of them."""
    dims = _dp_dims(info)
    meshes, placements = list[DeviceMesh](), list[Placement]()
    for index, placement in enumerate(spec.placements):
        if index == dims[0]:
            behind = [i for i in range(index + 1, spec.mesh.ndim) if i not in dims]
            meshes.append(info.mesh)
            placements += info.placements(_strided(dim, spec, behind))
        elif index not in dims:
            meshes.append(spec.mesh[spec.mesh.mesh_dim_names[index]])  # type: ignore[index]
            placements.append(placement)
    return DTensorSpec(DeviceMesh._concatenate(meshes), tuple(placements), tensor_meta=meta)


def _strided(dim: int, spec: DTensorSpec, mesh_dims: Iterable[int]) -> Placement:
    """Return the placement of data parallelism whose chunks lie inside those that other mesh dimensions cut."""
    factor = 1
    for index in mesh_dims:
        placement = spec.placements[index]
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
            factor *= spec.mesh.size(index)
    return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
