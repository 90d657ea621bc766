"""Whole steps on a GPU: numbers, memory, and that the host never waits for it."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

MODES = ["eager", "full"]
WIDTH = 512


def _model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    return nn.Sequential(*blocks).cuda()


def _shard(model, mode, **kwargs):
    for block in model:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    return torch.compile(model, fullgraph=True) if mode == "full" else model


def _loss(call, x):
    return F.mse_loss(call(x).float(), x.roll(1, dims=-1))


@pytest.mark.parametrize("mode", MODES)
def test_one_nccl_rank_trains_like_one_process(mode, one_rank):
    torch._dynamo.reset()
    alone = _model()
    model = copy.deepcopy(alone)
    call = _shard(model, mode)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for _ in range(3):
        x = torch.randn(32, WIDTH, device="cuda")
        want, got = _loss(alone, x), _loss(call, x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
        for loss, optimizer in zip((want, got), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_memory_returns_to_the_sharded_size(mode, many_ranks):
    torch._dynamo.reset()
    model = _model()
    whole = sum(param.numel() * param.element_size() for param in model.parameters())
    call = _shard(model, mode)
    x = torch.randn(32, WIDTH, device="cuda")
    after = []
    for _ in range(4):
        _loss(call, x).backward()
        for param in model.parameters():
            param.grad = None
        gc.collect()
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_allocated())
    assert after[2] == after[3]
    sharded = sum(param.to_local().numel() * param.element_size() for param in model.parameters())
    assert sharded < whole / 7


@pytest.mark.parametrize("mode", MODES)
def test_the_host_never_waits_in_a_step(mode, many_ranks):
    torch._dynamo.reset()
    model = _model()
    call = _shard(model, mode, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x = torch.randn(32, WIDTH, device="cuda")
    for _ in range(3):
        _loss(call, x).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            _loss(call, x).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_shards_on_the_cpu(one_rank):
    alone = _model()
    model = copy.deepcopy(alone).cpu()
    call = _shard(model, "eager", offload_policy=CPUOffloadPolicy())
    x = torch.randn(32, WIDTH, device="cuda")
    for _ in range(2):
        want, got = _loss(alone, x), _loss(call, x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
        want.backward()
        got.backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert ours.grad.to_local().is_cpu
            torch.testing.assert_close(ours.grad.to_local(), theirs.grad.cpu(), rtol=1e-3, atol=1e-5)
