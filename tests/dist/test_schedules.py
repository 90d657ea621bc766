"""Every schedule trains as one process does, is the same on every rank, and leaves fp32 numbers as they are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compiled
from fsdp_compiled import SchedulePolicy, fully_shard, passes
from fsdp_compiled.inspect import capture
from tests.ranks import on_ranks, same_on_ranks
from tests.training import (
    MLP,
    assert_close,
    batches,
    full_grads,
    full_params,
    llama,
    llama_loss,
    my_part,
    shard,
    square_loss,
    token_batches,
    train,
)

SCHEDULES = {
    "auto": SchedulePolicy(),
    "unit": SchedulePolicy(bucket="unit", prefetch=1),
    "none": SchedulePolicy(bucket="none", prefetch=3),
    "small bound": SchedulePolicy(in_flight_bytes=40_000),
    "caps": SchedulePolicy(bucket=5_000, prefetch=0),
    "kept": SchedulePolicy(keep_unsharded_bytes=6_000),
}


@pytest.mark.parametrize("name", list(SCHEDULES))
@on_ranks(2)
def test_training_with_a_schedule(name):
    one = llama()
    data = token_batches(4)
    expected = train(one, one, data, llama_loss, sharded=False)
    model = llama()
    shard(model, "eager", reshard_after_forward=True if name == "kept" else None)
    call = fsdp_compiled.compile(model, schedule=SCHEDULES[name], fullgraph=True)
    losses = train(model, call, data, llama_loss)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert_close(full_params(model), full_params(one))


@on_ranks(4)
def test_hsdp_with_a_schedule():
    one = MLP()
    data = batches(3, 8, 10)
    expected = train(one, one, data, square_loss, sharded=False)
    model = MLP()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard(model, "eager", mesh=mesh)
    losses = train(model, fsdp_compiled.compile(model, schedule=SCHEDULES["unit"]), data, square_loss)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert_close(full_params(model), full_params(one))


def _one_step(call, model, tokens):
    torch._dynamo.reset()
    loss = llama_loss(call, my_part(tokens))
    loss.backward()
    grads = full_grads(model)
    for param in model.parameters():
        param.grad = None
    return {"loss": loss.detach(), **grads}


@on_ranks(2)
def test_the_passes_do_not_change_a_bit_in_fp32():
    """Two terms add to the same sum in either order, so that on two ranks nothing may differ."""
    model = llama()
    shard(model, "eager")
    tokens = token_batches(1)[0]
    passes.uninstall()
    without = _one_step(torch.compile(model, fullgraph=True), model, tokens)
    passes.install()
    for schedule in SCHEDULES.values():
        found = _one_step(fsdp_compiled.compile(model, schedule=schedule, fullgraph=True), model, tokens)
        for name, expected in without.items():
            assert torch.equal(found[name], expected), f"{schedule}: {name}"


class Uneven(nn.Module):
    """Lengths that neither 3 nor 4 divide, and one shorter than the world."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 2), nn.Linear(2, 7)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


def _check_all_ranks_agree():
    model = Uneven()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    for schedule in (SchedulePolicy(), SchedulePolicy(bucket="unit"), SchedulePolicy(in_flight_bytes=600)):
        captured = capture(model, torch.randn(3, 7), schedule=schedule)
        same_on_ranks(str(captured))
        same_on_ranks([graph.collectives for graph in captured.graphs])
        same_on_ranks([str(graph.module.graph) for graph in captured.graphs])
        same_on_ranks([graph.memory for graph in captured.graphs])
        assert all(graph.peak_unsharded_bytes <= graph.bound_bytes for graph in captured.graphs)


@on_ranks(3)
def test_3_ranks_produce_the_same_graphs_and_reports():
    _check_all_ranks_agree()


@on_ranks(4)
def test_4_ranks_produce_the_same_graphs_and_reports():
    _check_all_ranks_agree()
