"""Expert parallelism: experts over one mesh, everything else over another; tokens travel to experts and back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_compiled import fully_shard, step_on_shards, stream_parameters
from fsdp_compiled.regions.block import RegionModule
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    assert_close,
    assert_trains_like_one_process,
    batches,
    each_with_regions,
    eager_and_full,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
)
from tests.support.variants import thorough

WIDTH, HIDDEN, EXPERTS, CHOSEN = 10, 12, 6, 2
each_exchange = pytest.mark.parametrize("exchange", ["capacity", "splits"])


class Experts(nn.Module):
    """A stack of experts of which each rank of ``mesh`` has a part; tokens travel to their experts and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)  # [experts, out, in]
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)
        self.mesh = None

    def part(self, mesh, as_dtensor=True):
        """Keep the experts of this rank of ``mesh``."""
        self.mesh = mesh
        for name, param in list(self.named_parameters()):
            part = distribute_tensor(param.detach(), mesh, [Shard(0)])
            setattr(self, name, nn.Parameter(part if as_dtensor else part.to_local()))

    def weights(self):
        """This rank's experts."""
        return [each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down)]

    def exchange(self, x, receive=None, send=None):
        """Send ``x``, in equal parts or ``send`` rows to each rank, and return what has come."""
        return x if self.mesh is None else funcol.all_to_all_single_autograd(x, receive, send, self.mesh.get_group())


class WithCapacity(Experts):
    """Takes ``[experts, capacity, width]``. Every rank sends as many rows to each."""

    def forward(self, x):
        ranks = 1 if self.mesh is None else self.mesh.size()
        x = self.exchange(x.contiguous())  # [ranks * its experts, capacity, width]
        # [this rank's experts, ranks * capacity, width]
        x = x.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)
        up, down = self.weights()
        x = torch.bmm(F.silu(torch.bmm(x, up.mT)), down.mT)
        return self.exchange(x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous())


class WithSplits(Experts):
    """Takes tokens in the order of their experts, ``[tokens, width]``, and how many each expert gets."""

    def forward(self, x, counts):
        ranks = 1 if self.mesh is None else self.mesh.size()
        coming = counts  # for each rank, the tokens that it has for each of this rank's experts
        if self.mesh is not None:
            coming = funcol.all_to_all_single(counts, None, None, self.mesh.get_group())
        send, receive = (each.view(ranks, -1).sum(1).tolist() for each in (counts, coming))
        x = self.exchange(x, receive, send)
        here = EXPERTS // ranks
        expert = torch.arange(here).repeat(ranks).repeat_interleave(coming, output_size=sum(receive))
        up, down = (weight[expert] for weight in self.weights())  # for GPUs, sort and use a grouped product
        x = torch.bmm(down, F.silu(torch.bmm(up, x.unsqueeze(-1)))).squeeze(-1)
        return self.exchange(x, send, receive)


class Block(nn.Module):
    """A dense layer, a router, and experts for the tokens that it sends to them."""

    def __init__(self, exchange):
        super().__init__()
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = {"capacity": WithCapacity, "splits": WithSplits}[exchange]()

    def forward(self, x):
        x = self.norm(x + self.dense(x))
        weights, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        route = self.by_capacity if isinstance(self.experts, WithCapacity) else self.by_splits
        return x + route(x, weights, chosen)

    def by_capacity(self, x, weights, chosen):
        """Every expert has a place for each token, so that none is dropped."""
        weight = torch.zeros(len(x), EXPERTS).scatter(1, chosen, weights).T.unsqueeze(-1)  # [experts, tokens, 1]
        return (weight * self.experts((weight != 0) * x)).sum(0)

    def by_splits(self, x, weights, chosen):
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
        y = self.experts(x[order // CHOSEN], counts) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // CHOSEN, y)


class Mixture(nn.Module):
    def __init__(self, exchange="capacity"):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(exchange) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _shard(model, mode, as_dtensor=True):
    """Experts over 2 ranks, each half sharded over the 2 ranks that have it; the rest over all 4."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    for block in model.blocks:
        block.experts.part(mesh["ep"], as_dtensor)
        fully_shard(block.experts, mesh=mesh["dp"], reshard_after_forward=True)
        block.experts.set_gradient_divide_factor(mesh.size())  # they see the tokens of all ranks
    return mesh, shard(model, mode, mesh=everyone)


@row("experts")
@each_exchange
@each_with_regions
@thorough(when=lambda mode, exchange: mode != "eager" and (exchange == "capacity") != (mode == "regional"))
@on_ranks(4)
def test_experts_beside_data_parallel_ranks(mode, exchange):
    alone, model = Mixture(exchange), Mixture(exchange)
    torch._dynamo.utils.counters.clear()
    _, call = _shard(model, mode)
    assert model.blocks[0].experts.up.to_local().shape == (2 if dist.get_rank() < 2 else 1, HIDDEN, WIDTH)
    assert_trains_like_one_process(model, call, alone, batches(3, 32, WIDTH))
    if mode == "regions" and torch.__version__ >= "2.13":  # see with_regions
        assert all(isinstance(block, RegionModule) for block in model.blocks)
    if mode in ("full", "regions"):
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for name, complete in stream_parameters(model):
        torch.testing.assert_close(complete, alone.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


@row("experts", "gradient division")
@eager_and_full
@on_ranks(4)
def test_local_parts_of_the_stack_as_plain_parameters(mode):
    alone, model = Mixture(), Mixture()
    mesh, call = _shard(model, mode, as_dtensor=False)
    (batch,) = batches(1, 32, WIDTH)
    square_loss(alone, batch).backward()
    square_loss(call, my_part(batch)).backward()
    want = full_grads(alone)
    for name in want:
        if ".experts." in name:
            want[name] = want[name].chunk(2)[mesh["ep"].get_local_rank()]
    assert_close(full_grads(model), want)


@row("experts", "optimizers and evaluation")
@eager_and_full
@on_ranks(4)
def test_clipping_and_an_optimizer_over_both_meshes(mode):
    alone, model = Mixture(), Mixture()
    _, call = _shard(model, mode)
    optimizers = [torch.optim.AdamW(alone.parameters(), lr=1e-2)]
    optimizers += [step_on_shards(torch.optim.AdamW(model.parameters(), lr=1e-2))]
    for batch in batches(3, 32, WIDTH):
        square_loss(alone, batch).backward()
        square_loss(call, my_part(batch)).backward()
        want, got = nn.utils.clip_grad_norm_(alone.parameters(), 0.1), _clip(model, 0.1)
        assert want > 0.1
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(full_params(model), full_params(alone), rtol=1e-4)


def _clip(model, max_norm):
    """As ``clip_grad_norm_``, which refuses gradients on several meshes."""
    meshes = {}
    for param in model.parameters():
        meshes.setdefault(param.device_mesh, []).append(param)
    norms = [nn.utils.get_total_norm([param.grad for param in each]).full_tensor() for each in meshes.values()]
    norm = nn.utils.get_total_norm(norms)
    for each in meshes.values():
        nn.utils.clip_grads_with_norm_(each, max_norm, norm)
    return norm
