"""Whole steps on a GPU: numbers, memory, what waits for what, and that the host never waits for the GPU."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, step_on_shards
from fsdp_compiled.collectives import backend, streams
from fsdp_compiled.collectives.all_gather import ALL_GATHERS

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
MODES = ["eager", "full"]
WIDTH = 512


def _model(width=WIDTH):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(4)]
    return nn.Sequential(*blocks).cuda()


def _shard(model, mode, **kwargs):
    for block in model:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    return torch.compile(model, fullgraph=True) if mode == "full" else model


def _loss(call, x):
    return F.mse_loss(call(x).float(), x.roll(1, dims=-1))


def _trains_like(alone, model, call, rtol=1e-4):
    """Assert that three steps of SGD of both have equal losses; ranks share the batch."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(3):
        x = torch.randn(32, WIDTH, device="cuda", generator=generator)
        want, got = _loss(alone, x), _loss(call, x.chunk(world)[rank])
        mean = got.detach().clone()
        if world > 1:
            mean = mean.cpu()
            dist.all_reduce(mean)
        torch.testing.assert_close(mean.cuda() / world, want, rtol=rtol, atol=0)
        for loss, optimizer in zip((want, got), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_trains_like_one_process(mode, one_rank):
    torch._dynamo.reset()
    alone = _model()
    model = copy.deepcopy(alone)
    call = _shard(model, mode)
    _trains_like(alone, model, call)


def test_muon_steps_like_one_process(one_rank):
    alone = _model()
    model = copy.deepcopy(alone)
    _shard(model, "eager")
    params = [[param for param in each.parameters() if param.ndim == 2] for each in (alone, model)]
    optimizers = torch.optim.Muon(params[0]), step_on_shards(torch.optim.Muon(params[1]))
    for _ in range(3):
        for want, got in zip(*params, strict=True):
            want.grad = torch.randn_like(want)
            got.grad = torch.zeros_like(got)
            got.grad.to_local().copy_(want.grad)
        for optimizer in optimizers:
            optimizer.step()
    for want, got in zip(*params, strict=True):
        torch.testing.assert_close(got.to_local(), want, rtol=1e-5, atol=1e-6)


def _all_gather_late(monkeypatch):
    """Let every all-gather begin long after it was launched; return the names of those that were."""
    started = set()

    def late(name):
        start = getattr(backend, name)

        def call(*args):
            started.add(name)
            torch.cuda._sleep(10**8)  # about 50 ms
            return start(*args)

        monkeypatch.setattr(backend, name, call)

    late("all_gather")
    late("all_gather_coalesced")
    return started


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "width, by", [(64, "all_gather"), (4096, "all_gather_coalesced")]
)  # copied out, and into place
def test_compute_waits_for_late_all_gathers(mode, width, by, many_ranks, monkeypatch):
    torch._dynamo.reset()
    model, alone = _model(width), _model(width)
    call = _shard(model, mode)
    for param, sharded in zip(alone.parameters(), model.parameters(), strict=True):
        param.data = sharded.to_local().detach().repeat(8, *[1] * (param.ndim - 1))  # as eight equal ranks give it
    started = _all_gather_late(monkeypatch)
    x = torch.randn(32, width, device="cuda")
    for _ in range(3):
        got, want = (each(x) for each in (call, alone))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        got.sum().backward()
        with torch.no_grad():
            for param, sharded in zip(alone.parameters(), model.parameters(), strict=True):
                param.mul_(1.5)  # what memory holds from the last step is wrong now
                sharded.to_local().mul_(1.5)
    assert by in started


def test_nccl_gathers_on_a_side_stream(one_rank):
    device = torch.device("cuda", torch.cuda.current_device())
    parts = [torch.randn(numel, device="cuda") for numel in (10**6, 24, 7)]
    outs = [torch.empty_like(part) for part in parts]
    alone = torch.empty_like(parts[0])
    backend.all_gather(alone, parts[0], dist.group.WORLD).wait()  # makes the communicator, which takes long
    alone.zero_()
    torch.cuda.synchronize()

    def begin():
        torch.cuda._sleep(10**8)
        return backend.all_gather_coalesced(outs, parts, dist.group.WORLD)

    def finish(work):
        backend.wait(work, device)
        torch.cuda._sleep(10**8)
        backend.wait(backend.all_gather(alone, parts[0], dist.group.WORLD), device)

    streams.launch(ALL_GATHERS, device, begin, finish).wait()
    for out, part in zip([*outs, alone], [*parts, parts[0]], strict=True):
        assert torch.equal(out, part)


@pytest.mark.parametrize("mode", MODES)
def test_memory_returns_to_the_sharded_size(mode, many_ranks):
    torch._dynamo.reset()
    model = _model()
    whole = sum(param.numel() * param.element_size() for param in model.parameters())
    call = _shard(model, mode)
    x = torch.randn(32, WIDTH, device="cuda")
    after = []
    for _ in range(10):
        _loss(call, x).backward()
        for param in model.parameters():
            param.grad = None
        gc.collect()
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_allocated())
    assert after[-1] == after[-2]
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
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(2):
            _loss(call, x).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["eager", "full"])
def test_shards_on_the_cpu(one_rank, mode):
    alone = _model()
    model = copy.deepcopy(alone).cpu()
    call = _shard(model, mode, offload_policy=CPUOffloadPolicy())
    x = torch.randn(32, WIDTH, device="cuda")
    for _ in range(2):
        want, got = _loss(alone, x), _loss(call, x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
        want.backward()
        got.backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert ours.grad.to_local().is_cpu
            torch.testing.assert_close(ours.grad.to_local(), theirs.grad.cpu(), rtol=1e-3, atol=1e-5)


class Attention(nn.Module):
    """Grouped queries: four heads of keys and values for sixteen of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, 16 * 64, bias=False), nn.Linear(WIDTH, 2 * 4 * 64, bias=False)
        self.out = nn.Linear(16 * 64, WIDTH, bias=False)

    def forward(self, x):
        q, (k, v) = self.q(x).unflatten(-1, (16, 64)), self.kv(x).unflatten(-1, (2, 4, 64)).unbind(-3)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("mode", MODES)
def test_grouped_attention_in_bf16(mode, one_rank):
    torch._dynamo.reset()
    torch.manual_seed(0)
    alone = nn.Sequential(Attention(), Attention()).cuda()
    model = copy.deepcopy(alone)
    call = _shard(model, mode, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x = torch.randn(2, 128, WIDTH, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        want = _loss(alone, x)
    got = _loss(call, x)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=0)
    for loss in (want, got):
        loss.backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert (ours.grad.to_local() - theirs.grad).norm() < 0.03 * theirs.grad.norm()
