"""Which ranks share a parameter's shards and which hold replicas. It knows no parameters and no modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Checked on torch 2.11.0, 2.13.0 and 2.15.0; a graph holds a group's name only.
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import Placement, Replicate, Shard

from ..expect import expect, shown, unexpected
from .spec import Group

# Groups of all or some ranks of another process group, by that and their size. Units share them, because each
# communicator costs memory and time to create.
_more_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name."""
    return _resolve_process_group(GroupName(name))


@dataclass(frozen=True)
class SmallerGroup:
    """The process group of neighbours among the ranks that share a parameter's shards, and this rank's index."""

    group: Group
    rank: int


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which dimensions of a full mesh are data parallel.

    Args:
        shard: name, or names, of the dimensions over which parameters are sharded.
        replicate: name, or names, of those over which they are replicated.

    Raises:
        TypeError: not names.
        ValueError: neither has any, or both have the same.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for role in ("shard", "replicate"):
            value = getattr(self, role)
            if not all(isinstance(name, str) for name in (value if isinstance(value, tuple) else (value or "",))):
                expected = "a name, a tuple of names or None"
                raise unexpected(f"dp_mesh_dims.{role}", expected, shown(value), error=TypeError)
        if not self.shard_names and not self.replicate_names:
            raise ValueError("dp_mesh_dims: at least one of shard and replicate must be given, got neither")
        if both := set(self.shard_names).intersection(self.replicate_names):
            raise unexpected("dp_mesh_dims", "each dimension once", f"{sorted(both)} for shard and replicate")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return (self.replicate,) if isinstance(self.replicate, str) else tuple(self.replicate or ())


@dataclass(frozen=True)
class DataParallelMeshInfo:
    """A device mesh and the role of its dimensions in data parallelism; use one of the subclasses.

    Args:
        mesh: one rank per device.
        shard_mesh_dim: mesh dimension over which parameters are sharded, or None.
        replicate_mesh_dim: mesh dimension over which shards are replicated, or None.
        dp_mesh_dims: the names of these dimensions in ``spmd_mesh``.
        spmd_mesh: the full mesh on which the original parameters are DTensors, or None.

    Raises:
        ValueError: both dimensions are None, or one that the subclass needs is.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)
    _needed: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise ValueError("at least one of shard_mesh_dim and replicate_mesh_dim must be given, got neither")
        for name in self._needed:
            if getattr(self, name) is None:
                raise ValueError(f"{type(self).__name__}: {name} must be given, got None")

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        module = torch.get_device_module(self.mesh.device_type)
        return torch.device(self.mesh.device_type, module.current_device())

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The dimension of ``mesh`` that shards; ``mesh`` itself if it has one dimension only, no names, or none."""
        names = self.mesh.mesh_dim_names
        if self.mesh.ndim == 1 or names is None or self.shard_mesh_dim is None:
            return self.mesh
        return self.mesh[names[self.shard_mesh_dim]]

    @property
    def shard_world(self) -> int:
        """Ranks over which parameters are sharded."""
        return 1 if self.shard_mesh_dim is None else self.mesh.size(self.shard_mesh_dim)

    @property
    def shard_rank(self) -> int:
        """This rank's index among them."""
        return 0 if self.shard_mesh_dim is None else self.mesh.get_local_rank(self.shard_mesh_dim)

    @property
    def replicate_world(self) -> int:
        """Ranks that hold the same shard."""
        return 1 if self.replicate_mesh_dim is None else self.mesh.size(self.replicate_mesh_dim)

    @property
    def shards(self) -> Group:
        """The process group that shards; the default where that is this rank alone."""
        return self._group(self.shard_mesh_dim)

    @property
    def replicas(self) -> Group:
        """The process group that replicates; the default where that is this rank alone."""
        return self._group(self.replicate_mesh_dim)

    def placements(self, sharded: Placement) -> tuple[Placement, ...]:
        """Return DTensor placements over ``mesh``: ``sharded`` where it shards, replicated elsewhere."""
        return tuple(sharded if dim == self.shard_mesh_dim else Replicate() for dim in range(self.mesh.ndim))

    def smaller_group(self, size: int) -> SmallerGroup | None:
        """Return the ``size`` neighbours that this rank is one of, or None if they would be one rank, or all.

        The first call makes their process group; every rank must make it.
        """
        if not 1 < size < self.shard_world:
            return None
        return SmallerGroup(self._another_group(size), self.shard_rank % size)

    def separate_reduce_scatter_group(self) -> Group:
        """Return a second process group of the ranks that shard; every rank must make the first call."""
        return Group() if self.shard_world == 1 else self._another_group(self.shard_world)

    def _another_group(self, size: int) -> Group:
        """Return the group of the ``size`` neighbours that this rank is one of, which the first call makes."""
        shard_group = self.mesh.get_group(self.shard_mesh_dim)
        made = _more_groups.setdefault(shard_group, {})
        if size not in made:
            first = self.shard_rank // size * size
            ranks = dist.get_process_group_ranks(shard_group)[first : first + size]
            made[size] = dist.new_group(ranks, use_local_synchronization=True)
        return Group(made[size].group_name, size)

    def _group(self, mesh_dim: int | None) -> Group:
        if mesh_dim is None or self.mesh.size(mesh_dim) == 1:
            return Group()
        return Group(self.mesh.get_group(mesh_dim).group_name, self.mesh.size(mesh_dim))


@dataclass(frozen=True)
class FSDPMeshInfo(DataParallelMeshInfo):
    """Parameters are sharded: ``shard_mesh_dim`` is needed."""

    _needed: ClassVar[tuple[str, ...]] = ("shard_mesh_dim",)


@dataclass(frozen=True)
class DDPMeshInfo(DataParallelMeshInfo):
    """Parameters are replicated: ``replicate_mesh_dim`` is needed."""

    _needed: ClassVar[tuple[str, ...]] = ("replicate_mesh_dim",)


@dataclass(frozen=True)
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """Parameters are sharded over one mesh dimension, and the shards replicated over the other; both are needed."""

    _needed = ("shard_mesh_dim", "replicate_mesh_dim")


@dataclass(frozen=True)
class ShardPlacementResult:
    """What ``shard_placement_fn`` may return: the dimension to shard, and the mesh, None for the unit's."""

    placement: Shard
    mesh_info: FSDPMeshInfo | None = None


def data_parallel_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> DataParallelMeshInfo:
    """Return the roles of the dimensions of ``mesh`` as ``fully_shard`` takes them.

    Args:
        mesh: 1-D, sharding; or 2-D with names, (replicate, shard). None makes a 1-D mesh over the default
            process group, which is initialised if need be.
        dims: which dimensions of a mesh of any number of named dimensions are data parallel.

    Raises:
        TypeError: not a DeviceMesh, or not DataParallelMeshDims.
        ValueError: other than one or two dimensions, a 2-D mesh without dimension names, or a name in ``dims``
            that the mesh does not have.
    """
    if mesh is None and dims is None:
        if not dist.is_initialized():
            dist.init_process_group()
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        mesh = init_device_mesh("cpu" if accelerator is None else accelerator.type, (dist.get_world_size(),))
    expect("mesh", mesh, DeviceMesh, "a DeviceMesh or None")
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
