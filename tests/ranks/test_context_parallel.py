"""Context parallelism: ranks of one mesh share a sequence; parameters are sharded over those and the data's ranks."""

from __future__ import annotations

import unittest

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.graphs import record, sequence
from tests.support.ranks import on_ranks
from tests.support.training import (
    assert_close,
    batches,
    each_with_regions,
    full_grads,
    full_params,
    mean_over_ranks,
    shard,
)
from tests.support.variants import thorough

WIDTH, HEADS, LENGTH, BATCH = 12, 2, 8, 4


class Attention(nn.Module):
    """Causal attention of this rank's queries on the keys and values of all ranks of ``mesh``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mesh = None

    def forward(self, x):
        batch, length, _ = x.shape
        q, *keys_and_values = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        first = 0
        if self.mesh is not None:
            first = self.mesh.get_local_rank() * length
            keys_and_values = [
                funcol.all_gather_tensor_autograd(each.contiguous(), 2, self.mesh) for each in keys_and_values
            ]
        k, v = keys_and_values
        is_past = first + torch.arange(length).unsqueeze(1) >= torch.arange(k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=is_past)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _loss(call, x, target):
    return (call(x) - target).square().mean()


@each_with_regions
@thorough(when=lambda mode: mode in ("regional", "regions"))
@on_ranks(4)
def test_ranks_that_share_a_sequence_train_as_one_process(mode):
    if mode == "regions" and torch.__version__ < "2.13":
        raise unittest.SkipTest("torch before 2.13 makes no regions of blocks that communicate")
    if mode == "full" and torch.__version__.startswith("2.12"):
        raise unittest.SkipTest("torch 2.12 breaks the graph at all_gather_tensor_autograd along another dimension")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    alone, model = Model(), Model()
    for block in model.blocks:
        block.mesh = mesh["context"]
    call = shard(model, mode, mesh=mesh["data", "context"]._flatten("shards"))
    if mode == "full":
        call, recorder = record(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    data, context = mesh["data"].get_local_rank(), mesh["context"].get_local_rank()
    for x in batches(3, BATCH, LENGTH, WIDTH):
        target = x.roll(1, 1)
        mine = [each.chunk(2, 0)[data].chunk(2, 1)[context].contiguous() for each in (x, target)]
        want, got = _loss(alone, x, target), _loss(call, *mine)
        want.backward()
        got.backward()
        torch.testing.assert_close(mean_over_ranks(got.detach()), want.item(), rtol=1e-5, atol=0)
        assert_close(full_grads(model), full_grads(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(full_params(model), full_params(alone))
    if mode == "full":
        assert len(sequence(recorder.only("forward"), "all_gather_into_tensor")) == 2 * len(model.blocks)
