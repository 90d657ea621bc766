from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fsdp_compiled.mesh import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo, data_parallel_mesh

pytestmark = pytest.mark.usefixtures("fake_group")


def test_one_dimension_shards():
    info = data_parallel_mesh(init_device_mesh("cpu", (4,)))
    assert type(info) is FSDPMeshInfo
    assert (info.shard_world, info.shard_rank, info.replicate_world) == (4, 0, 1)
    assert info.placements(Shard(1)) == (Shard(1),)
    assert info.shard_group != ""
    assert info.replicate_group == ""


def test_no_mesh_is_one_over_all_ranks():
    assert data_parallel_mesh(None).shard_world == 4


def test_two_dimensions_replicate_and_shard():
    info = data_parallel_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    assert type(info) is HSDPMeshInfo
    assert (info.shard_world, info.replicate_world) == (2, 2)
    assert info.placements(Shard(0)) == (Replicate(), Shard(0))
    assert info.shard_group != info.replicate_group


def test_replicas_only():
    info = DDPMeshInfo(init_device_mesh("cpu", (4,)), replicate_mesh_dim=0)
    assert (info.shard_world, info.shard_rank, info.replicate_world, info.shard_group) == (1, 0, 4, "")
    assert info.placements(Shard(0)) == (Replicate(),)


def test_roles_are_required():
    mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(ValueError, match="at least one of shard_mesh_dim and replicate_mesh_dim must be given"):
        FSDPMeshInfo(mesh)
    with pytest.raises(ValueError, match="FSDPMeshInfo: shard_mesh_dim must be given"):
        FSDPMeshInfo(mesh, replicate_mesh_dim=0)
    with pytest.raises(ValueError, match="DDPMeshInfo: replicate_mesh_dim must be given"):
        DDPMeshInfo(mesh, shard_mesh_dim=0)
