"""Ranks that are about to start different collectives: all of them say so, and none starts one."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import SchedulePolicy, set_rank_agreement
from fsdp_compiled.passes import CLUSTERS, Link, cost
from tests.faults.steps import (
    MACHINE,
    MODES,
    Model,
    assert_all_end,
    assert_all_refuse,
    launched,
    trainer,
)
from tests.support.ranks import on_ranks

ODD = 1  # the rank that does something else


def _is_odd() -> bool:
    return dist.get_rank() == ODD


def _another_path(mode, order):
    """The odd rank takes another path; then all go on alike, and nothing is left of it."""
    training = trainer(mode)
    if _is_odd():
        training.model.order = order
    said = ("about to start different collectives", "rank 1: ")
    first = (
        "bias" if mode == "full" else "weight"
    )  # a graph's buckets are in order of names where positions are equal
    assert_all_refuse(
        training.step, *said, "blocks.0." if order[0] == 0 else f"rank 1: all-gather of blocks.1.{first}"
    )
    torch.compiler.reset()
    training.model.order = [0, 1, 2]
    assert training.step() == trainer("eager").step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [[1, 2], [1, 0, 2]], ids=["another layer", "another order"])
@on_ranks(2, timeout_s=30)
def test_another_path(mode, order):
    _another_path(mode, order)


@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(4, timeout_s=30)
def test_another_path_on_4_ranks(mode):
    _another_path(mode, [1, 0, 2])


@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2, timeout_s=30)
def test_another_path_after_steps_alike(mode):
    """The odd rank asks for what is new to it; the other has agreed on what it starts, and waits for it there."""
    set_rank_agreement(deadline=timedelta(seconds=3))
    training = trainer(mode)
    for number in range(2):
        training.step(number)
    if _is_odd():
        training.model.order = [2, 1, 0]
    said = "rank 0 neither came to all-gather of blocks." if _is_odd() else "rank 1 raised RankMismatchError: rank 0 "
    assert_all_end(training.step, said)
    set_rank_agreement()


@on_ranks(2, timeout_s=30)
def test_another_size_of_inputs_is_no_mismatch():
    slower = replace(MACHINE, intra=Link(300.0, 1.0, 1e6))
    losses = []
    for mode in ("eager", "full"):
        training = trainer(mode, schedule=SchedulePolicy(cluster=slower))
        training.rows = 1024 if _is_odd() else 2
        losses.append([training.step(number) for number in range(2)])
    torch.testing.assert_close(*losses)


def _another_policy():
    schedule = SchedulePolicy(bucket="none" if _is_odd() else "unit")
    training = trainer("full", schedule=schedule)
    assert_all_refuse(
        training.step,
        "rank 1: all-gather of 1 parameters, the last blocks.0.bias",
        "they compile with different SchedulePolicy objects: give the same one on every rank",
        "rank 1: SchedulePolicy(bucket='none'",
    )


@on_ranks(2, timeout_s=30)
def test_another_schedule_policy():
    _another_policy()


@on_ranks(4, timeout_s=30)
def test_another_schedule_policy_on_4_ranks():
    _another_policy()


def _another_cluster():
    cluster = replace(MACHINE, ranks_per_node=1 if _is_odd() else 4)
    assert_all_refuse(
        trainer("full", schedule=SchedulePolicy(cluster=cluster)).step,
        "Likely they estimate for different machines: give all ranks the same SchedulePolicy(cluster=...)",
        "rank 1: CPU, 1 ranks on a node",
    )


@on_ranks(2, timeout_s=30)
def test_another_cluster_and_another_schedule():
    _another_cluster()


@on_ranks(4, timeout_s=30)
def test_another_cluster_and_another_schedule_on_4_ranks():
    _another_cluster()


@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2, timeout_s=30)
def test_ranks_take_the_cluster_that_the_first_one_finds(mode):
    sees = {"LOCAL_WORLD_SIZE": "1" if _is_odd() else "4"}
    with patch.dict(os.environ, sees), patch.dict(CLUSTERS, CPU=MACHINE):
        training = trainer(mode)
        got = [training.step(number) for number in range(2)]
        found = cost.detect(torch.device("cpu"))
        assert (found.intra, found.ranks_per_node) == (MACHINE.intra, 4)
    alike = trainer("eager")
    assert got == [alike.step(number) for number in range(2)]


def _one_compiles(odd):
    training = trainer("full" if _is_odd() == odd else "eager")
    who = "rank 1 runs" if odd else "rank" + ("s 0, 2, 3" if dist.get_world_size() == 4 else " 0") + " runs"
    message = f"{who} a compiled graph where others do not; compile on every rank or on none"
    assert_all_refuse(training.step, message)


@pytest.mark.parametrize("odd", [True, False])
@on_ranks(2, timeout_s=30)
def test_one_rank_compiles(odd):
    _one_compiles(odd)


@on_ranks(4, timeout_s=30)
def test_one_rank_of_4_compiles():
    _one_compiles(True)


@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(4, timeout_s=30)
def test_hybrid_sharding(mode):
    """Only one shard group differs; the other waits for it where replicas meet, and learns of it there."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    training = trainer(mode, mesh=mesh)
    dist.barrier()
    if _is_odd():
        training.model.order = [1, 0, 2]
    before = launched()
    assert_all_end(training.step, "rank 1", "different collectives")
    if dist.get_rank() in (0, ODD):
        assert launched() == before


@on_ranks(2, timeout_s=30)
def test_a_mismatch_in_backward():
    class Backward(Model):
        def forward(self, x):
            first, second = self.blocks[0](x), self.blocks[1](x)
            return first if _is_odd() else second

    training = trainer("eager", Backward(2))
    assert_all_end(training.step, "rank 0: ", "rank 1: ", "different collectives")
