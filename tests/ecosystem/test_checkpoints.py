"""Asynchronous distributed checkpoints, loaded by another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    batches,
    full_params,
    mean_over_ranks,
    my_part,
    shard,
    square_loss,
)


def _step(call, optimizer, batch):
    loss = square_loss(call, my_part(batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return mean_over_ranks(loss)


def _made(mode):
    model = MLP()
    return model, shard(model, mode), torch.optim.AdamW(model.parameters(), lr=1e-2)


@on_ranks(2)
def _write(path, mode):
    """Save while training goes on; what is saved is the state at the call."""
    model, call, optimizer = _made(mode)
    data = batches(4, 8, 10)
    for batch in data[:2]:
        _step(call, optimizer, batch)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    process_group = dist.new_group(backend="gloo")
    saving = dcp.async_save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path, process_group=process_group
    )
    at_save = full_params(model)
    losses = [_step(call, optimizer, batch) for batch in data[2:]]
    saving.result()
    if dist.get_rank() == 0:
        torch.save((at_save, losses), Path(path) / "continued.pt")
    dist.barrier()


@on_ranks(4)
def _read(path, mode):
    model, call, optimizer = _made(mode)
    at_save, want = torch.load(Path(path) / "continued.pt")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_close(full_params(model), at_save, rtol=0)
    got = [_step(call, optimizer, batch) for batch in batches(4, 8, 10)[2:]]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", ["eager", "full"])
def test_an_async_save_on_2_ranks_continues_on_4(tmp_path, mode):
    _write(path=str(tmp_path), mode=mode)
    _read(path=str(tmp_path), mode=mode)
