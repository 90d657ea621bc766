"""torch.distributed.pipelining over sharded stages: 2 pipeline ranks x 2 ranks that share each stage's parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from fsdp_compiled import fully_shard
from tests.ecosystem.training import BACKEND, MODES
from tests.support.collectives import counted
from tests.support.ranks import on_ranks
from tests.support.training import assert_close, batches, full_params

WIDTH, STEPS, MICROBATCHES = 8, 3, 4


def _blocks(count=4):
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH), nn.LayerNorm(WIDTH))
        for _ in range(count)
    ]


def _stage_module(blocks, mesh, mode):
    module = nn.Sequential(*blocks)
    for block in module:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    if mode == "full":
        module.compile(backend=BACKEND, fullgraph=True)
    return module


def _alone(data):
    model = nn.Sequential(*_blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in data:
        loss = F.mse_loss(model(batch), batch.roll(1, dims=-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {
        f"{index}.{name}": value for index, block in enumerate(model) for name, value in full_params(block).items()
    }


KINDS = [(kind, mode) for kind in (Schedule1F1B, ScheduleInterleaved1F1B) for mode in MODES]
# Not compiled: it runs a backward in two parts, which torch refuses of any compiled module.
KINDS.append((ScheduleInterleavedZeroBubble, "eager"))


@pytest.mark.parametrize(("kind", "mode"), KINDS, ids=lambda each: getattr(each, "__name__", each))
@on_ranks(4)
def test_trains_like_one_process(kind, mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    rank, part = mesh["stages"].get_local_rank(), mesh["shards"].get_local_rank()
    data = batches(STEPS, 16, WIDTH)
    want_losses, want = _alone(data)
    counters.clear()
    # Interleaved: the first rank has blocks 0 and 2 as stages of their own.
    owned = [[0, 1], [2, 3]][rank : rank + 1] if kind is Schedule1F1B else [[rank], [rank + 2]]
    modules = [_stage_module([_blocks()[index] for index in indices], mesh["shards"], mode) for indices in owned]
    count = 2 * len(modules)
    stages = [
        PipelineStage(module, rank + 2 * index, count, torch.device("cpu"), group=mesh["stages"].get_group())
        for index, module in enumerate(modules)
    ]
    schedule = kind(stages[0] if kind is Schedule1F1B else stages, MICROBATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD([param for module in modules for param in module.parameters()], lr=0.1)
    for batch, want_loss in zip(data, want_losses, strict=True):
        mine = batch.chunk(2)[part]
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(mine)
        else:
            schedule.step(target=mine.roll(1, dims=-1), losses=losses)
            loss = torch.stack(losses).mean().detach()
            torch.distributed.all_reduce(loss, group=mesh["shards"].get_group())
            torch.testing.assert_close(loss.item() / 2, want_loss, rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    for module, indices in zip(modules, owned, strict=True):
        got = {
            f"{index}.{n}": v
            for index, block in zip(indices, module, strict=True)
            for n, v in full_params(block).items()
        }
        assert_close(got, {name: want[name] for name in got})
    assert (counters["stats"]["unique_graphs"] > 0) == (mode == "full") and not counters["graph_break"]


@pytest.mark.parametrize("mode", MODES)
@on_ranks(4)
def test_an_interleaved_schedule_unshards_once_and_reduces_once_a_step(mode):
    """The schedule's UNSHARD, RESHARD and REDUCE_GRAD actions decide, not the micro-batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    rank = mesh["stages"].get_local_rank()
    modules = [_stage_module([_blocks()[index]], mesh["shards"], mode) for index in (rank, rank + 2)]
    stages = [
        PipelineStage(module, rank + 2 * index, 4, torch.device("cpu"), group=mesh["stages"].get_group())
        for index, module in enumerate(modules)
    ]
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=F.mse_loss)
    (batch,) = batches(1, 8, WIDTH)

    def step():
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)

    step()  # finds shapes
    with counted() as counts:
        step()
    assert counts == {"all_gather": 2, "reduce_scatter": 2}  # one unit of parameters in each of the two stages


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_groups_end_a_step_without_a_callback_after_them(mode):
    """As in OLMo-core's pipeline stages, where no backward knows that it is the last."""
    alone, blocks = nn.Sequential(*_blocks()), _blocks()
    model = _stage_module(blocks, init_device_mesh("cpu", (2,)), mode)
    models = (alone, model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]
    for data in batches(STEPS, 2, 8, WIDTH):
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        for batch in data:
            F.mse_loss(alone(batch), batch.roll(1, dims=-1)).backward()
            mine = batch.chunk(2)[torch.distributed.get_rank()]
            F.mse_loss(model(mine), mine.roll(1, dims=-1)).backward()
        model.set_is_last_backward(True)
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        for state in torch_fully_shard.state(model)._state_ctx.all_states:
            state._fsdp_param_group.post_backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(full_params(model), full_params(alone))
