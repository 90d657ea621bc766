"""Every schedule trains as one process does, is the same on every rank, and leaves fp32 numbers as they are."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config

import fsdp_compiled
from fsdp_compiled import SchedulePolicy, fully_shard, passes
from fsdp_compiled.inspect import capture
from fsdp_compiled.passes.graph import nodes
from tests.support.graphs import after_inductors_passes, record, without_code
from tests.support.parity import row
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.training import (
    MLP,
    WITH_REGIONS,
    assert_close,
    assert_sizes_may_vary,
    assert_trains_like_one_process,
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
    train_replicas,
)
from tests.support.variants import thorough

SCHEDULES = {
    "unit": SchedulePolicy(bucket="unit", prefetch=1),
    "none": SchedulePolicy(bucket="none", prefetch=3),
    "auto": SchedulePolicy(),
    "small bound": SchedulePolicy(in_flight_bytes=2_000),
    "caps": SchedulePolicy(bucket=700, prefetch=0),
    "kept": SchedulePolicy(keep_unsharded_bytes=1_000),
}


@row("training", mode="full")
@pytest.mark.parametrize("name", ["unit", "small bound", "caps", "kept"])
@on_ranks(2)
def test_training_with_a_schedule(name):
    one = MLP()
    data = batches(4, 8, 10)
    expected = train(one, one, data, square_loss, sharded=False)
    model = MLP()
    shard(model, "eager", reshard_after_forward=True if name == "kept" else None)
    schedule = SCHEDULES[name]
    code = name == "unit"  # else graphs run as they are
    call = fsdp_compiled.compile(model, schedule=schedule, fullgraph=True) if code else record(model, schedule)[0]
    losses = train(model, call, data, square_loss)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert_close(full_params(model), full_params(one))


@row("training", mode="full")
@on_ranks(2)
def test_training_where_results_are_taken_from_parts():
    one, model = MLP(layers=1), MLP(layers=1)
    shard(model, "eager")
    call = fsdp_compiled.compile(model, fullgraph=True)
    with mock.patch.object(nodes, "PART", 1), config.patch(force_disable_caches=True):
        assert_trains_like_one_process(model, call, one)
        captured = capture(model, batches(1, 4, 10)[0], code=False)
    plain = capture(model, batches(1, 4, 10)[0], code=False)
    for cut, uncut in zip(captured.graphs, plain.graphs, strict=True):
        assert any(map(nodes.is_part, cut.module.graph.nodes))
        assert not any(map(nodes.is_part, uncut.module.graph.nodes))
        assert [each.params for each in cut.collectives] == [each.params for each in uncut.collectives]
        assert cut.peak_unsharded_bytes == uncut.peak_unsharded_bytes


@pytest.mark.parametrize("inductor", [False, True])
@thorough(when=lambda inductor: not inductor)
@on_ranks(2)
def test_sizes_that_vary_compile_once_more(inductor):
    alone, model = MLP(), MLP()
    assert_sizes_may_vary(model, shard(model, "full", inductor=inductor), alone)


@row("meshes", mode="full")
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


def _traced_only(schedule):
    """A backend without Inductor, whose own fusions round differently: our passes if given a schedule, then eager."""

    def partition(joint, inputs, **kwargs):
        for run in passes.joint(schedule) if schedule else ():
            run(joint.graph)
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def compiled(module, inputs):
        return without_code(module, schedule)

    return aot_autograd(fw_compiler=compiled, bw_compiler=compiled, partition_fn=partition)


def _one_step(model, batch, schedule, hooks=False):
    torch._dynamo.reset()
    call = model if hooks else torch.compile(model, backend=_traced_only(schedule), fullgraph=True)
    loss = square_loss(call, my_part(batch))
    loss.backward()
    grads = full_grads(model)
    for param in model.parameters():
        param.grad = None
    return {"loss": loss.detach(), **grads}


def _check_that_no_bit_changes(**kwargs):
    model = MLP()
    shard(model, "eager", **kwargs)
    batch = batches(1, 8, 10)[0]
    without = _one_step(model, batch, None)
    steps = {"hooks": _one_step(model, batch, None, hooks=True)}
    steps |= {name: _one_step(model, batch, schedule) for name, schedule in SCHEDULES.items()}
    for step, found in steps.items():
        for name, expected in without.items():
            assert torch.equal(found[name], expected), f"{step}: {name}"


@row("training", mode="full")
@on_ranks(2)
def test_hooks_and_graphs_of_any_schedule_agree_bit_by_bit_in_fp32():
    """Two terms add to the same sum in either order, so that on two ranks nothing may differ."""
    _check_that_no_bit_changes()


@on_ranks(4)
def test_hooks_and_graphs_of_any_schedule_agree_bit_by_bit_on_four_ranks():
    """Each rank adds four terms in the same order, wherever in a bucket they are."""
    _check_that_no_bit_changes()


@row("meshes", mode="full")
@thorough()
@on_ranks(4)
def test_hooks_and_graphs_over_replicas_agree_bit_by_bit_in_fp32():
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _check_that_no_bit_changes(mesh=mesh)


def _check_lengths(mode, lengths):
    """Sequences of other lengths on every rank; gradients are means over ranks."""
    alone, model = llama(), llama()
    call = shard(model, mode)
    mine = lengths[dist.get_rank()]

    for step, tokens in enumerate(token_batches(4)):
        data = tokens[None, :, : mine[step % len(mine)] + 1]
        want = train_replicas(alone, alone, data, llama_loss)
        got = train(model, call, data, llama_loss)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)
    assert_close(full_params(model), full_params(alone))


@row("lengths that differ")
@pytest.mark.parametrize("mode", WITH_REGIONS)
@pytest.mark.parametrize(
    "lengths",
    [
        [(2,), (16,)],
        [(5,), (7, 7, 9, 16)],  # the second rank compiles again, alone
        [(16, 3, 11), (4, 12, 4, 8)],
    ],
)
@thorough(when=lambda lengths, mode: mode != "eager" and len(lengths[0]) == 1)
@on_ranks(2)
def test_ranks_whose_batches_differ_in_length(mode, lengths):
    _check_lengths(mode, lengths)


@row("lengths that differ", mode="full")
@thorough()
@on_ranks(4)
def test_4_ranks_whose_batches_differ_in_length():
    _check_lengths("full", [(16,), (2, 3), (9, 9, 4), (8,)])


class Normed(nn.Module):
    """A norm before a map whose weight backward needs, unless torch compiles an empty batch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class NormedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Normed(), Normed())

    def forward(self, x):
        return self.blocks(x)


@on_ranks(2)
def test_a_rank_whose_batch_is_empty_where_its_graph_is_of_any_size():
    alone, model = NormedBlocks(), NormedBlocks()
    call = shard(model, "full")
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        for step, size in enumerate(((2, 4, 0, 1), (0, 3, 4, 2))[dist.get_rank()]):

            def loss_of(call, x, size=size):
                x = x[:size].clone()
                torch._dynamo.mark_dynamic(x, 0)
                return call(x).square().sum()

            data = batches(1, 8, 6, seed=step)
            train_replicas(alone, alone, data, loss_of, lr=0.01)
            train(model, call, data, loss_of, lr=0.01)
    assert_close(full_params(model), full_params(alone))


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


def _check_all_ranks_agree(schedule):
    model = Uneven()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["fsdp_compiled.inspect.capture"], "compile_fx_inner", after_inductors_passes)
        captured = capture(model, torch.randn(3, 7), schedule=schedule)
    same_on_ranks(str(captured))
    same_on_ranks([graph.collectives for graph in captured.graphs])
    same_on_ranks([str(graph.module.graph) for graph in captured.graphs])
    same_on_ranks([graph.memory for graph in captured.graphs])
    assert all(graph.peak_unsharded_bytes <= graph.bound_bytes for graph in captured.graphs)


@row("uneven shards", mode="full")
@on_ranks(3)
def test_3_ranks_produce_the_same_graphs_and_reports():
    _check_all_ranks_agree(SchedulePolicy(in_flight_bytes=600))


@row("uneven shards", mode="full")
@on_ranks(4)
def test_4_ranks_produce_the_same_graphs_and_reports():
    _check_all_ranks_agree(SchedulePolicy(bucket="unit"))
