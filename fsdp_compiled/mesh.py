"""Which ranks share a parameter's shards and which hold replicas. It knows no parameters and no modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard


@dataclass(frozen=True)
class DataParallelMeshInfo:
    """A device mesh and the role of its dimensions in data parallelism; use one of the subclasses.

    Args:
        mesh: one rank per device.
        shard_mesh_dim: mesh dimension over which parameters are sharded, or None.
        replicate_mesh_dim: mesh dimension over which shards are replicated, or None.

    Raises:
        ValueError: both dimensions are None.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise ValueError("at least one of shard_mesh_dim and replicate_mesh_dim must be given, got neither")

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        module = torch.get_device_module(self.mesh.device_type)
        return torch.device(self.mesh.device_type, module.current_device())

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
    def shard_group(self) -> str:
        """Name of the process group that shards; "" where it would have one rank."""
        return self._group_name(self.shard_mesh_dim)

    @property
    def replicate_group(self) -> str:
        """Name of the process group that replicates; "" where it would have one rank."""
        return self._group_name(self.replicate_mesh_dim)

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Return the DTensor placements of a parameter sharded along its dimension ``dim``."""
        by_mesh_dim: list[Placement] = [Replicate()] * self.mesh.ndim
        if self.shard_mesh_dim is not None:
            by_mesh_dim[self.shard_mesh_dim] = Shard(dim)
        return tuple(by_mesh_dim)

    def _group_name(self, mesh_dim: int | None) -> str:
        if mesh_dim is None or self.mesh.size(mesh_dim) == 1:
            return ""
        return self.mesh.get_group(mesh_dim).group_name


@dataclass(frozen=True)
class FSDPMeshInfo(DataParallelMeshInfo):
    """Parameters are sharded.

    Raises:
        ValueError: ``shard_mesh_dim`` is None.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_mesh_dim is None:
            raise ValueError(f"{type(self).__name__}: shard_mesh_dim must be given, got None")


@dataclass(frozen=True)
class DDPMeshInfo(DataParallelMeshInfo):
    """Parameters are replicated.

    Raises:
        ValueError: ``replicate_mesh_dim`` is None.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicate_mesh_dim is None:
            raise ValueError(f"{type(self).__name__}: replicate_mesh_dim must be given, got None")


@dataclass(frozen=True)
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """Parameters are sharded over one mesh dimension, and the shards replicated over the other."""


def data_parallel_mesh(mesh: DeviceMesh | None) -> DataParallelMeshInfo:
    """Return the roles of the dimensions of ``mesh`` as ``fully_shard`` takes them.

    Args:
        mesh: 1-D, sharding; or 2-D with names, (replicate, shard). None makes a 1-D mesh over the default
            process group, which is initialised if need be.

    Raises:
        TypeError: not a DeviceMesh.
        ValueError: other than one or two dimensions, or a 2-D mesh without dimension names.
    """
    if mesh is None:
        mesh = _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh or None, got {mesh!r} of {type(mesh).__name__}")
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.ndim != 2:
        raise ValueError(
            f"mesh: expected a 1-D (shard) or 2-D (replicate, shard) DeviceMesh, got {mesh.ndim}-D {mesh}; "
            "pass the data-parallel part of it, for example mesh['replicate', 'shard']"
        )
    if mesh.mesh_dim_names is None:
        raise ValueError(f"mesh: a 2-D mesh needs mesh_dim_names, got {mesh}; name them in init_device_mesh")
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device_type = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))
