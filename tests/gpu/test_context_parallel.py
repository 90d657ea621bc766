"""PyTorch's own context parallelism: two ranks, which share one GPU, hold half of every sequence each."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdp_compiled
from fsdp_compiled import fully_shard
from fsdp_compiled.testing.processes import Setting
from tests.gpu.test_features import _on_processes
from tests.support import staged

DEVICE, WIDTH, HEADS, LENGTH, BATCH, LAYERS = "cuda", 128, 4, 256, 2, 4


class Block(nn.Module):
    """Causal attention and a product."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def _compiled(model, mode):
    if mode == "eager":
        return model
    regions = list(model) if mode == "regions" else "off"
    return fsdp_compiled.compile(model, regions=regions, fullgraph=True)


def _train(mode, rank):
    torch.manual_seed(0)
    alone = nn.Sequential(*(Block() for _ in range(LAYERS))).to(DEVICE)
    model, mesh = copy.deepcopy(alone), init_device_mesh(DEVICE, (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    call = _compiled(fully_shard(model, mesh=mesh), mode)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for _ in range(3):
        x, target = torch.randn(2, BATCH, LENGTH, WIDTH, device=DEVICE).unbind()
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            F.mse_loss(alone(x), target).backward()
            parts = [x.clone(), target.clone()]
            with context_parallel(mesh, buffers=parts, buffer_seq_dims=[1, 1]):
                assert parts[0].shape[1] == LENGTH // 2
                F.mse_loss(call(parts[0]), parts[1]).backward()
        for got, want in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-2, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["eager", "regions", "full"])
def test_trains_like_one_process(mode):
    _on_processes(2, partial(_train, mode), Setting(staged.NAME))
