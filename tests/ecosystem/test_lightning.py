"""Lightning's Fabric and Trainer with ModelParallelStrategy, unmodified."""

from __future__ import annotations

import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("lightning")

import lightning
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy

from fsdp_compiled import FSDPModule, as_torch_fsdp, fully_shard
from tests.ecosystem.training import BACKEND, assert_equal_losses, assert_mode, each_mode, watch
from tests.support.collectives import counted
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    batches,
    full_params,
    mean_over_ranks,
    my_part,
    square_loss,
    train,
)

STEPS = 3


@contextmanager
def _launched_by_torchrun():
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "test"}
    with mock.patch.dict(os.environ, names):
        yield


def _parallelize(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def _fabric():
    strategy = FabricStrategy(_parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    return fabric


def _set_up(fabric, mode):
    model = MLP()
    call = torch.compile(model, backend=BACKEND, fullgraph=True) if mode == "full" else model
    call = fabric.setup_module(call)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    return model, call, optimizer


@each_mode
@on_ranks(2)
def test_fabric_trains_like_one_process(mode, tmp_path):
    alone, data = MLP(), batches(STEPS, 8, 10)
    want = train(alone, alone, data, square_loss, sharded=False)
    with _launched_by_torchrun(), watch() as seen:
        fabric = _fabric()
        model, call, optimizer = _set_up(fabric, mode)
        got = []
        for batch in data:
            loss = square_loss(call, my_part(batch))
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            got.append(mean_over_ranks(loss))
        trained = full_params(model)
        fabric.save(tmp_path / "checkpoint", {"model": call, "optimizer": optimizer, "step": STEPS})
        for param in model.parameters():
            nn.init.zeros_(param)
        rest = fabric.load(tmp_path / "checkpoint", {"model": call, "optimizer": optimizer})
        assert rest["step"] == STEPS
    assert_equal_losses(got, want)
    assert_close(trained, full_params(alone))
    assert_close(full_params(model), trained)
    assert_mode(seen, mode, len(list(model.parameters())))


@each_mode
@on_ranks(2)
def test_fabric_without_backward_sync(mode):
    """Micro-batches before the last reduce nothing, and the last one gives one process's gradients."""
    alone, (data,) = MLP(), batches(1, 24, 10)
    micro = data.chunk(3)
    for each in micro:
        square_loss(alone, each).backward()
    with _launched_by_torchrun(), watch():
        fabric = _fabric()
        model, call, _ = _set_up(fabric, mode)
        for index, each in enumerate(micro):
            with fabric.no_backward_sync(call, enabled=index < 2), counted() as counts:
                fabric.backward(square_loss(call, my_part(each)))
                assert (counts["reduce_scatter"] > 0) == (index == 2)
            grads = [param.grad for param in model.parameters()]
            assert all(grad is None for grad in grads) if index < 2 else None not in grads
    got = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    assert_close(got, {name: param.grad for name, param in alone.named_parameters()})


class Lit(lightning.LightningModule):
    """Shards in configure_model, by the name that torch has for it."""

    def __init__(self, mode):
        super().__init__()
        self.model, self.mode, self.losses = MLP(), mode, []

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for block in self.model.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
        if self.mode == "full":
            self.model.compile(backend=BACKEND, fullgraph=True)

    def training_step(self, batch):
        loss = square_loss(self.model, my_part(batch))
        self.losses.append(mean_over_ranks(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@each_mode
@on_ranks(2)
def test_a_trainer_with_model_parallel_strategy(mode, tmp_path):
    alone, data = MLP(), batches(STEPS, 8, 10)
    want = train(alone, alone, data, square_loss, sharded=False)
    with _launched_by_torchrun(), watch() as seen, as_torch_fsdp():
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            plugins=[TorchElasticEnvironment()],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=tmp_path,
        )
        lit = Lit(mode)
        trainer.fit(lit, torch.utils.data.DataLoader(data, batch_size=None))
        trainer.save_checkpoint(tmp_path / "checkpoint")
    assert isinstance(lit.model, FSDPModule)
    assert_equal_losses(lit.losses, want)
    assert_close(full_params(lit.model), full_params(alone))
    assert_mode(seen, mode, len(list(lit.model.parameters())))
