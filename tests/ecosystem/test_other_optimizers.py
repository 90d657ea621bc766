"""Optimizers of other libraries, and torch's Muon, on sharded parameters."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    batches,
    full_params,
    shard,
    square_loss,
    train,
)

MODES = ("eager", "full")
each_mode = pytest.mark.parametrize("mode", MODES)
STEPS = 4


def _assert_same(mode, make, rtol=1e-5):
    """Train one process and 2 ranks with what ``make`` makes; compare losses and parameters."""
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    optimizers = [make(each) for each in (alone, model)]
    for each in optimizers:
        with suppress(AttributeError):
            each.train()  # schedule-free
    data = batches(STEPS, 8, 10)
    want = train(alone, alone, data, square_loss, sharded=False, optimizer=optimizers[0])
    got = train(model, call, data, square_loss, optimizer=optimizers[1])
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=rtol, atol=0)
    assert_close(full_params(model), full_params(alone), rtol=max(rtol, 1e-4))


@each_mode
@on_ranks(2)
def test_schedule_free(mode):
    schedulefree = pytest.importorskip("schedulefree")
    _assert_same(mode, lambda model: schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, foreach=False))


@each_mode
@on_ranks(2)
def test_muon(mode):
    def make(model):
        matrices = [param for param in model.parameters() if param.ndim == 2]
        return torch.optim.Muon(matrices, lr=1e-2)

    # Newton-Schulz runs in bf16, and in another order on DTensors.
    _assert_same(mode, make, rtol=2e-2)


@each_mode
@on_ranks(2)
def test_adamw_8bit(mode):
    """Its states are quantised by the block, which is another one on each rank: compare with FSDP2."""
    optim = pytest.importorskip("torchao.optim")
    import torch.distributed.fsdp as torch_fsdp

    theirs, model = MLP(32, 256), MLP(32, 256)
    for block in theirs.blocks:
        torch_fsdp.fully_shard(block)
    torch_fsdp.fully_shard(theirs)
    assert dist.get_world_size() == 2
    data = batches(STEPS, 8, 32)
    want = train(theirs, theirs, data, square_loss, optimizer=optim.AdamW8bit(theirs.parameters(), lr=1e-2))
    call = shard(model, mode)
    got = train(model, call, data, square_loss, optimizer=optim.AdamW8bit(model.parameters(), lr=1e-2))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=0)
