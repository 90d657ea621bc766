"""Which ranks share a parameter's shards and which hold replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from ..expect import shown, unexpected
from .spec import Group

# Groups of all or some ranks of another process group, by that and their size. Units share them, because each
# communicator costs memory and time to create.
_more_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()
# The ranks of each group along a mesh dimension, by the one of them that this rank is in.
_siblings: WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, ...]]] = WeakKeyDictionary()


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

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise ValueError("at least one of shard_mesh_dim and replicate_mesh_dim must be given, got neither")
        for name, cls in (("shard_mesh_dim", FSDPMeshInfo), ("replicate_mesh_dim", DDPMeshInfo)):
            if isinstance(self, cls) and getattr(self, name) is None:
                raise ValueError(f"{type(self).__name__}: {name} must be given, got None")

    @property
    def dp_dims(self) -> list[int]:
        """Indices of the data-parallel dimensions in the full mesh, those that shard first."""
        if self.dp_mesh_dims is None or self.spmd_mesh is None:
            return []
        names: tuple[str, ...] = self.spmd_mesh.mesh_dim_names or ()
        return [names.index(name) for name in (*self.dp_mesh_dims.shard_names, *self.dp_mesh_dims.replicate_names)]

    @property
    def device(self) -> torch.device:
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
    def shard_mesh_size(self) -> int:
        """Ranks over which parameters are sharded."""
        return 1 if self.shard_mesh_dim is None else self.mesh.size(self.shard_mesh_dim)

    @property
    def shard_mesh_rank(self) -> int:
        """This rank's index among them."""
        return 0 if self.shard_mesh_dim is None else self.mesh.get_local_rank(self.shard_mesh_dim)

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

    def another_group(self, size: int) -> Group:
        """Return the group of the ``size`` neighbours among the ranks that shard of which this rank is one.

        It is a second group if they are all; the default if they are one. Every rank must make the first call.
        """
        if size == 1:
            return Group()
        shard_group = self.mesh.get_group(self.shard_mesh_dim)
        first = self.shard_mesh_rank // size * size
        group = group_of_ranks(shard_group, dist.get_process_group_ranks(shard_group)[first : first + size])
        cuts = [slice(first, first + size) for first in range(0, self.shard_mesh_size, size)]
        note_siblings(group, (each[cut] for each in siblings_of(shard_group) for cut in cuts))
        return Group(group.group_name, size)

    def _group(self, mesh_dim: int | None) -> Group:
        if mesh_dim is None or self.mesh.size(mesh_dim) == 1:
            return Group()
        return Group(self.mesh.get_group(mesh_dim).group_name, self.mesh.size(mesh_dim))


def note_siblings(group: dist.ProcessGroup, ranks: Iterable[Sequence[int]]) -> None:
    """Note the ranks of the groups along the same mesh dimension as ``group``, for :func:`siblings_of`."""
    _siblings.setdefault(group, set()).update(map(tuple, ranks))


def siblings_of(group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """Return the ranks of ``group``, and of the groups along the same dimension of each mesh that was sharded over.

    Replicas of a parameter are in different ones of them; all of them get the same list.
    """
    return sorted({tuple(dist.get_process_group_ranks(group)), *_siblings.get(group, ())})


def group_of_ranks(known: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return another group, of ranks that ``known`` and their number tell; every one must make the first call."""
    made = _more_groups.setdefault(known, {})
    if len(ranks) not in made:
        made[len(ranks)] = dist.new_group(list(ranks), use_local_synchronization=True)
    return made[len(ranks)]


@dataclass(frozen=True)
class FSDPMeshInfo(DataParallelMeshInfo):
    """Parameters are sharded: ``shard_mesh_dim`` is needed."""


@dataclass(frozen=True)
class DDPMeshInfo(DataParallelMeshInfo):
    """Parameters are replicated: ``replicate_mesh_dim`` is needed."""


@dataclass(frozen=True)
class ScalarMeshInfo(DDPMeshInfo):
    """A parameter without dimensions is replicated over all ranks of ``mesh``, of any dimensions: ``everyone``."""

    everyone: Group = field(default_factory=Group)

    @property
    def replicas(self) -> Group:
        return self.everyone


@dataclass(frozen=True)
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """Parameters are sharded over one mesh dimension, and the shards replicated over the other; both are needed."""


@dataclass(frozen=True)
class ShardPlacementResult:
    """What ``shard_placement_fn`` may return: the dimension to shard, and the mesh, None for the unit's."""

    placement: Shard
    mesh_info: FSDPMeshInfo | None = None
