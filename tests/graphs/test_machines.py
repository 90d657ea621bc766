"""Ranks start the same collectives where the groups that shard do not lie alike on machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import SchedulePolicy, fully_shard
from fsdp_compiled.passes import CLUSTERS
from fsdp_compiled.passes.graph import nodes
from tests.support.graphs import record

POLICY = SchedulePolicy(cluster=replace(CLUSTERS["H100"], ranks_per_node=6))


def started_by(rank: int, shape: tuple[int, ...], reshard: bool | int) -> list[tuple[object, ...]]:
    """The collectives of forward and backward, without the names of groups."""
    dist.init_process_group("fake", rank=rank, world_size=12)
    try:
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))
        )
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        call, recorder = record(model, POLICY)
        call(torch.randn(4, 256)).sum().backward()
    finally:
        dist.destroy_process_group()
    contracts = (nodes.contract_at(nodes.launches_of(graph)[0]) for _, graph in recorder.after)
    return [(each.kind, each.params, each.form) for contract in contracts for each in contract.collectives]


@pytest.mark.parametrize("shape, reshard", [((3, 4), True), ((12,), 4)])
def test_ranks_whose_group_lies_on_two_machines_start_what_the_others_start(shape, reshard):
    """Of three groups of 4 ranks on machines of 6; replicas, or smaller groups between forward and backward."""
    assert started_by(0, shape, reshard) == started_by(4, shape, reshard)
