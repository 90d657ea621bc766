"""The spec of a parameter is a function of its name, layout, dtype, placement and its unit's configuration."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import CPUOffloadPolicy, FSDPMeshInfo, HSDPMeshInfo, MixedPrecisionPolicy
from fsdp_compiled.param.placement import ParamPlacement, comm_spec
from fsdp_compiled.param.unit import UnitConfig
from fsdp_compiled.sharding.layout import ShardLayout

pytestmark = pytest.mark.usefixtures("fake_group")


def spec_of(config: UnitConfig, info=None, offload=None):
    info = info or FSDPMeshInfo(init_device_mesh("cpu", (4,)), shard_mesh_dim=0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    placement = ParamPlacement(info, 0, policy, torch.device("cpu"), offload)
    return comm_spec("unit.weight", ShardLayout((8, 3), 0, info.shard_mesh_size), torch.float32, placement, config)


def test_what_travels():
    spec = spec_of(UnitConfig("unit", reshard_after_forward=False, reshards_by_default=True))
    assert (spec.param.name, spec.param.unit, spec.param.shape) == ("unit.weight", "unit", (8, 3))
    assert (spec.all_gather.dtype, spec.reduction.dtype) == (torch.bfloat16, torch.float32)
    assert spec.all_gather.group == spec.reduction.shards and spec.all_gather.group.world == 4
    assert not spec.reshard and not spec.reshard_is_set and not spec.reduction.to_host
    assert spec == spec_of(UnitConfig("unit", reshard_after_forward=False, reshards_by_default=True))


def test_what_the_user_sets():
    config = UnitConfig("unit", divide_factor=2.0, reduce_hook="hook", all_gather_comm="own")
    spec = spec_of(config, offload=CPUOffloadPolicy(pin_memory=False))
    assert (spec.all_gather.comm, spec.all_gather.device, spec.reduction.hook) == ("own", "cpu", "hook")
    assert spec.reduction.to_host and spec.reduction.scaling.post_divide == 2.0 and spec.reshard_is_set


def test_groups_of_its_own():
    spec = spec_of(UnitConfig("unit", separate_reduce_group=True, post_forward_size=2))
    assert spec.reduction.shards.world == 4 and spec.reduction.shards != spec.all_gather.group
    assert spec.post_forward.world == 2
    assert spec_of(UnitConfig("unit", reshard_after_forward=False, post_forward_size=2)).post_forward.world == 1
    assert spec_of(UnitConfig("unit", post_forward_size=4)).post_forward.world == 1  # all ranks


def test_replicas():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reduction = spec_of(UnitConfig("unit"), HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)).reduction
    assert (reduction.shards.world, reduction.replicas.world, reduction.scaling.op) == (2, 2, "avg")
