from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fsdp_compiled import fully_shard
from fsdp_compiled.sharding.dtensor import data_parallel_mesh, group_of_all, process_group
from fsdp_compiled.sharding.mesh import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from fsdp_compiled.sharding.spec import Group

pytestmark = pytest.mark.usefixtures("fake_group")


def test_one_dimension_shards():
    info = data_parallel_mesh(init_device_mesh("cpu", (4,)))
    assert type(info) is FSDPMeshInfo
    assert (info.shard_mesh_size, info.shard_mesh_rank, info.replicas.world) == (4, 0, 1)
    assert info.placements(Shard(1)) == (Shard(1),)
    assert info.shards.name != ""
    assert info.replicas.name == ""


def test_no_mesh_is_one_over_all_ranks():
    assert data_parallel_mesh(None).shard_mesh_size == 4


def test_two_dimensions_replicate_and_shard():
    info = data_parallel_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    assert type(info) is HSDPMeshInfo
    assert (info.shard_mesh_size, info.replicas.world) == (2, 2)
    assert info.placements(Shard(0)) == (Replicate(), Shard(0))
    assert info.shards != info.replicas


def test_replicas_only():
    info = DDPMeshInfo(init_device_mesh("cpu", (4,)), replicate_mesh_dim=0)
    assert (info.shard_mesh_size, info.shard_mesh_rank, info.replicas.world, info.shards.name) == (1, 0, 4, "")
    assert info.placements(Shard(0)) == (Replicate(),)


def test_smaller_groups_within_a_part_of_the_world():
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=5, world_size=16)
    mesh = init_device_mesh("cpu", (8, 2), mesh_dim_names=("data", "model"))["data"]  # ranks 1, 3, 5, ... 15
    info = data_parallel_mesh(mesh)
    small = info.another_group(4)
    assert (small.world, info.shard_mesh_rank) == (4, 2)
    assert dist.get_process_group_ranks(process_group(small.name)) == [1, 3, 5, 7]
    assert info.another_group(4) == small  # made once
    assert info.another_group(1) == Group() and info.another_group(8) != info.shards


def test_roles_are_required():
    mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(ValueError, match="at least one of shard_mesh_dim and replicate_mesh_dim must be given"):
        FSDPMeshInfo(mesh)
    with pytest.raises(ValueError, match="FSDPMeshInfo: shard_mesh_dim must be given"):
        FSDPMeshInfo(mesh, replicate_mesh_dim=0)
    with pytest.raises(ValueError, match="DDPMeshInfo: replicate_mesh_dim must be given"):
        DDPMeshInfo(mesh, shard_mesh_dim=0)


def test_scalars_of_fake_models_have_the_group_of_all_ranks():
    """The mesh's tensor is no fake one, and its ranks decide which group that is."""
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with FakeTensorMode():
        model = nn.Linear(8, 8)
        model.register_parameter("gain", nn.Parameter(torch.ones(())))
        fully_shard(model, mesh=hybrid)
    assert model._fsdp_params["gain"].spec.reduction.replicas == Group(group_of_all(hybrid).group_name, 4)
