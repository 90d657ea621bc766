"""How a sharded parameter is laid out as a DTensor, also on top of tensor or expert parallelism.

The private names of torch's DTensors, meshes and process groups that sharding needs are used here alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Checked on torch 2.11.0, 2.13.0 and 2.15.0; a graph holds a group's name only.
from torch.distributed.distributed_c10d import GroupName, Store, _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

# Checked on torch 2.11.0, 2.13.0 and 2.15.0: DTensor(local, spec) costs a few microseconds where the public
# DTensor.from_local costs ten times that for every gradient of every step.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..expect import expect, unexpected
from .local_types import LocalTypes, local_types
from .mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    group_of_ranks,
    note_siblings,
)
from .spec import Group

_WITHOUT_PEERS = ("fake", "threaded")  # backends whose ranks are all in this process
_TAKES_GRAD_PLACEMENTS = "grad_placements" in inspect.signature(DTensor.from_local).parameters


def process_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(GroupName(name))


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the store in which a group's ranks have their keys to themselves; None if no other process is in it."""
    if group.size() == 1 or dist.get_backend(group) in _WITHOUT_PEERS:
        return None
    return group.get_group_store()


def first_rank(mesh: DeviceMesh) -> int:
    """Return the rank at the mesh's origin, also where a FakeTensorMode makes all tensors fake."""
    with _disable_current_modes():
        return int(mesh.mesh.flatten()[0])


def note_groups(mesh: DeviceMesh) -> None:
    """Note the ranks of all groups along each dimension of a mesh, of which this rank is in one."""
    with _disable_current_modes():
        for dim, size in enumerate(mesh.shape):
            if size > 1:
                note_siblings(mesh.get_group(dim), mesh.mesh.movedim(dim, -1).reshape(-1, size).tolist())


def group_of_all(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a process group of all ranks of a mesh, in its order; every one of them must make the first call."""
    if mesh.ndim == 1:
        return mesh.get_group()
    with _disable_current_modes():
        ranks: list[int] = mesh.mesh.flatten().tolist()
        if dist.group.WORLD is not None and ranks == dist.get_process_group_ranks(dist.group.WORLD):
            return dist.group.WORLD
        return group_of_ranks(mesh.get_group(mesh.ndim - 1), ranks)


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, not differentiable and sharing its memory; any other tensor itself."""
    # to_local() would be differentiable, and an in-place change of its result would not reach the DTensor.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor, one object for all that share it; None of a layout or transform without any."""
    try:
        return local_of(tensor).untyped_storage()
    except NotImplementedError:
        return None


def dtensor_like(like: Tensor, local: Tensor) -> DTensor:
    """Return a DTensor as ``like`` is, over another local tensor."""
    # Without DTensor.__init__, which does nothing but leave Dynamo, for 2 us a gradient.
    return DTensor.__new__(DTensor, local, like._spec, requires_grad=False)  # type: ignore[attr-defined]


def laid_out_like(like: Tensor, local: Tensor) -> DTensor:
    """Return a DTensor with the layout of ``like``, of the dtype and on the device of its local tensor ``local``."""
    spec: Any = like._spec  # type: ignore[attr-defined]
    if local.dtype != like.dtype:
        spec = spec.shallow_copy_with_tensor_meta(spec.tensor_meta._replace(dtype=local.dtype))
    # Not from_local(), which would move what is offloaded to the mesh's devices.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def set_local(tensor: Tensor, local: Tensor) -> None:
    tensor._local_tensor = local  # type: ignore[attr-defined]


class _ToLocal(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        return local_of(args[0]).detach()


def count_as_one(tensor: Tensor) -> None:
    """Let autograd count writes to a DTensor as writes to its local tensor, too, and those to that as its own."""
    with torch.no_grad(), _ToLocal():
        set_local(tensor, tensor.detach())  # it takes the counter of what it is detached from, whatever that returned


def local_part(tensor: DTensor) -> tuple[slice, ...]:
    """Return which part of the whole tensor its local tensor is."""
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


@dataclass(frozen=True)
class OuterParallelism:
    """What an unsharded parameter is where other mesh dimensions shard it too: a DTensor over them.

    If the original was a plain tensor with types, it is the local part of that DTensor.
    """

    spec: DTensorSpec  # of the original parameter
    dp_dims: frozenset[int] = frozenset()  # data-parallel dimensions of its mesh; they do not redistribute gradients
    types: LocalTypes | None = None  # of a plain parameter
    reduction: torch.dtype = torch.float32  # in which gradients are reduced; over the other dimensions, or wider
    # Decides how gradients are reduced, if need be. It takes a local tensor if it ``_wraps``, else a DTensor of it.
    _opaque: Callable[[Tensor], DTensor] | None = field(init=False, repr=False, compare=False, default=None)

    @property
    def _wraps(self) -> bool:
        return bool(self.dp_dims) and not _TAKES_GRAD_PLACEMENTS

    def __post_init__(self) -> None:
        if self.dp_dims or any(self._may_be_partial(dim) for dim in range(self.spec.mesh.ndim)):
            function = _WrapLocal if self._wraps else _ReduceGradient

            # A function of this object's own: Dynamo hands such a function nothing but tensors and constants.
            def opaque(tensor: Tensor) -> DTensor:
                return function.apply(tensor, self)

            object.__setattr__(self, "_opaque", torch.compiler.allow_in_graph(opaque))

    def _may_be_partial(self, dim: int) -> bool:
        """Tell whether gradients may have to be summed over a mesh dimension; not over data-parallel ones."""
        if dim in self.dp_dims:
            return False
        if self.types is not None:
            return self.types.grad_placements[dim].is_partial()
        return self.spec.placements[dim].is_replicate()

    def wrap(self, local: Tensor) -> Tensor:
        """Return the unsharded parameter, differentiable, from its local tensor; Dynamo traces this."""
        if self.types is None:
            return self.dtensor(local)
        if self._opaque is None:
            return local
        return self.dtensor(local).to_local(grad_placements=self.types.grad_placements)

    def dtensor(self, local: Tensor) -> DTensor:
        """Return the DTensor of which ``local`` is this rank's part, differentiable."""
        if self._opaque is not None and self._wraps:
            return self._opaque(local)
        spec = self.spec
        options: dict[str, Any] = {"run_check": False, "shape": spec.shape, "stride": spec.stride}
        if self.dp_dims:  # each data-parallel rank computes a gradient from its own data
            options["grad_placements"] = self._of_own_data(spec.placements)
        param = DTensor.from_local(local, spec.mesh, spec.placements, **options)
        return param if self._opaque is None else self._opaque(param)

    def reduced(self, grad: DTensor) -> DTensor:
        """Return the gradient with the parameter's placements, except over data-parallel dimensions."""
        wanted = tuple(
            got if dim in self.dp_dims else want
            for dim, (got, want) in enumerate(zip(grad.placements, self.spec.placements, strict=True))
        )
        if wanted == grad.placements:
            return grad
        summand: Any = grad.to(torch.promote_types(grad.dtype, self.reduction))
        return summand.redistribute(placements=wanted)

    def _of_own_data(self, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """Return placements of a gradient that each data-parallel rank has from its own data."""
        return tuple(Partial() if dim in self.dp_dims else each for dim, each in enumerate(placements))

    def of_this_rank(self, grad: DTensor) -> DTensor:
        """Return the gradient as one of several that data-parallel ranks have from their own data.

        It may call itself the same on all of them, as the inputs that it comes from do; autograd would divide it.
        """
        placements = self._of_own_data(grad.placements)
        if placements == grad.placements:
            return grad
        options: dict[str, Any] = {"run_check": False, "shape": grad.shape, "stride": grad.stride()}
        return DTensor.from_local(grad.to_local(), grad.device_mesh, placements, **options)

    def parameter(self, local: Tensor) -> nn.Parameter:
        """Return the unsharded parameter of eager mode from its local tensor."""
        if self.types is None:
            return nn.Parameter(DTensor(local, self.spec, requires_grad=False), requires_grad=False)
        param = nn.Parameter(local, requires_grad=False)
        self.types.annotate(param)
        return param

    def unreduced(self, grad: Tensor) -> Tensor:
        """Return an unsharded gradient that data-parallel ranks have not summed; ``grad`` is its local part."""
        if self.types is not None:
            return grad
        placements = self._of_own_data(self.spec.placements)
        return DTensor(grad, replace(self.spec, placements=placements), requires_grad=False)

    def local_grad(self, grad: Tensor) -> Tensor:
        """Return the local part of :meth:`reduced`."""
        if not isinstance(grad, DTensor):
            if self.types is None:
                return grad
            grad = DTensor(grad, replace(self.spec, placements=self.types.grad_placements), requires_grad=False)
        local = self.reduced(grad).to_local()
        return local.wait() if hasattr(local, "wait") else local


class _ReduceGradient(torch.autograd.Function):
    """The identity; its backward sums over other ranks in a dtype that autograd would not, see ``reduced``.

    And it calls the gradient one of this rank's own data, see ``of_this_rank``.
    """

    @staticmethod
    def forward(ctx: Any, param: Tensor, outer: OuterParallelism) -> Tensor:
        ctx.outer = outer
        return param.detach()

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        return ctx.outer.of_this_rank(ctx.outer.reduced(grad).to(grad.dtype)), None


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


def outer_parallelism(name: str, info: DataParallelMeshInfo, param: Tensor) -> OuterParallelism | None:
    """Return what ``param`` is beyond data parallelism; None for a plain tensor without types."""
    types = None
    if not isinstance(param, DTensor):
        types = local_types(name, param, info)
        if types is None or info.spmd_mesh is None:
            return None
        param = DTensor.from_local(param.detach(), info.spmd_mesh, types.placements, run_check=False)
    return OuterParallelism(param._spec, frozenset(info.dp_dims), types)


def groups_of(tensor: Tensor | OuterParallelism | None) -> list[Group]:
    """Return the groups over which a DTensor, or a parameter's other parallelism, is made complete."""
    if not isinstance(tensor, DTensor | OuterParallelism):
        return []
    spec = tensor._spec if isinstance(tensor, DTensor) else tensor.spec
    pairs = zip(spec.mesh.get_all_groups(), spec.placements, strict=True)
    return [Group(group.group_name, group.size()) for group, placement in pairs if not placement.is_replicate()]


def sharded_spec(info: DataParallelMeshInfo, param: Tensor, outer: OuterParallelism | None, dim: int) -> DTensorSpec:
    """Return the spec of the sharded parameter made from original ``param`` by sharding dimension ``dim``."""
    if outer is None:
        meta = TensorMeta(param.shape, torch.empty(param.shape, device="meta").stride(), param.dtype)
        return DTensorSpec(info.mesh, info.placements(Shard(dim)), tensor_meta=meta)
    spec = outer.spec
    meta = TensorMeta(spec.shape, spec.stride, param.dtype)
    if info.dp_mesh_dims is None:
        mesh = DeviceMesh._concatenate([info.mesh, spec.mesh])
        mine = info.placements(_strided(dim, spec, range(spec.mesh.ndim)))
        return DTensorSpec(mesh, (*mine, *spec.placements), tensor_meta=meta)
    if len(info.dp_mesh_dims.shard_names) > 1:
        return _flattened_spec(info, spec, dim, meta)
    placements = list(spec.placements)
    for index in info.dp_dims[: len(info.dp_mesh_dims.shard_names)]:
        placements[index] = _strided(dim, spec, range(index + 1, spec.mesh.ndim))
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta)


def _flattened_spec(info: DataParallelMeshInfo, spec: DTensorSpec, dim: int, meta: TensorMeta) -> DTensorSpec:
    """Put the data-parallel mesh, whose several sharding dimensions are one, in place of the first of them."""
    dims = info.dp_dims
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
    placed = ((index, spec.placements[index]) for index in mesh_dims)
    cutting = [index for index, each in placed if isinstance(each, (Shard, _StridedShard)) and each.dim == dim]
    factor = prod(map(spec.mesh.size, cutting))
    return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)


def data_parallel_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> DataParallelMeshInfo:
    """Return the roles of the dimensions of ``mesh`` as ``fully_shard`` takes them; it documents errors, too.

    Without a mesh it is 1-D, over the default process group, which is initialised if need be.
    """
    if mesh is None and dims is None:
        if not dist.is_initialized():
            dist.init_process_group()
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        mesh = init_device_mesh("cpu" if accelerator is None else accelerator.type, (dist.get_world_size(),))
    expect("mesh", mesh, DeviceMesh, "a DeviceMesh or None" if dims is None else "a DeviceMesh for dp_mesh_dims")
    assert mesh is not None
    if dims is not None:
        return _named_mesh(mesh, dims)
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.ndim != 2:
        do = "pass the data-parallel part of it, for example mesh['replicate', 'shard']"
        raise unexpected("mesh", "a 1-D (shard) or 2-D (replicate, shard) DeviceMesh", f"{mesh.ndim}-D {mesh}", do)
    if mesh.mesh_dim_names is None:
        raise ValueError(f"mesh: a 2-D mesh needs mesh_dim_names, got {mesh}; name them in init_device_mesh")
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def _named_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMeshInfo:
    expect("dp_mesh_dims", dims, DataParallelMeshDims, "DataParallelMeshDims or None")
    if mesh.mesh_dim_names is None:
        raise ValueError(f"mesh: dp_mesh_dims needs a mesh with mesh_dim_names, got {mesh}")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise unexpected("dp_mesh_dims", f"names among {mesh.mesh_dim_names}", repr(name))
    if not dims.shard_names:
        return DDPMeshInfo(_one_dim(mesh, dims.replicate_names), None, 0, dims, mesh)
    shard = _one_dim(mesh, dims.shard_names)
    if not dims.replicate_names:
        return FSDPMeshInfo(shard, 0, None, dims, mesh)
    # Checked on torch 2.11.0, 2.13.0 and 2.15.0; there is no public way to put two submeshes side by side.
    both = DeviceMesh._concatenate([_one_dim(mesh, dims.replicate_names), shard])
    return HSDPMeshInfo(both, 1, 0, dims, mesh)


def _one_dim(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    if len(names) > 1:
        return mesh[names]._flatten("_".join(names))
    return mesh if mesh.mesh_dim_names == names else mesh[names[0]]
