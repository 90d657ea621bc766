"""Ranks whose inputs differ in size start the same collectives in the same order, whatever the sizes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fsdp_compiled import SchedulePolicy
from fsdp_compiled.inspect import capture
from fsdp_compiled.inspect.reading import Scheduled
from fsdp_compiled.passes import CLUSTERS, post_grad
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.passes.graph.anchors import AnchoredCompute
from fsdp_compiled.testing.llama import Config, Llama
from tests.support.graphs import record
from tests.support.training import shard

# compute and communication take about as long as each other, so that times decide
EVEN = replace(
    CLUSTERS["H100"],
    flops_16bit=2e11,
    flops_32bit=2e11,
    memory_bytes_per_s=1e11,
    kernel_us=0.1,
    inter=replace(CLUSTERS["H100"].inter, latency_us=3.0, hop_us=0.1, bytes_per_s=3e7),
)
POLICIES = [SchedulePolicy(cluster=cluster) for cluster in (EVEN, CLUSTERS["H100"], CLUSTERS["CPU"])]


class Biased(nn.Module):
    """Norms and maps with biases, gates, attention without a kernel, and a part of a table for each length."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(50, width), nn.Embedding(4096, width)
        self.blocks = nn.ModuleList(BiasedBlock(width, heads) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 50)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), targets.flatten())


class BiasedBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate, self.shift = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind()
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + torch.tanh(self.gate * self.down(F.gelu(self.up(x))) + self.shift) * self.gate


class Experts(nn.Module):
    """Each expert takes as many tokens as its capacity says, which follows from the batch."""

    def __init__(self, width: int = 24, experts: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(ExpertsBlock(width, experts) for _ in range(2))
        self.out = nn.Linear(width, 50, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x.flatten(0, 1)).view_as(x)
        return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


class ExpertsBlock(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / 9)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / 9)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x := self.norm(x)).softmax(-1)
        share, chosen = share.t().topk(max(1, x.shape[0] // share.shape[1]), -1)
        out = F.silu(x[chosen] @ self.up) @ self.down * share[..., None]
        return torch.zeros_like(x).index_add(0, chosen.flatten(), out.flatten(0, 1))


class Images(nn.Module):
    """Convolutions; images of any size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, 8, 3, padding=1, stride=2), nn.GroupNorm(2, 8), nn.SiLU()) for c in (3, 8, 8)
        )
        self.out = nn.Linear(8, 10)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        return F.cross_entropy(self.out(images.mean((2, 3))), targets)


def _llama() -> nn.Module:
    model = Llama(Config(vocab=100, width=40, layers=2, heads=5, kv_heads=5, hidden=88, max_seq=4096))
    model.init_weights(0)
    return model


def _tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return (torch.zeros(batch, length, dtype=torch.int64),) * 2


def _images(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 8 + length // 32, 8 + length // 16), torch.zeros(batch, dtype=torch.int64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor, Tensor]]]] = {
    "llama": (_llama, _tokens),
    "biased": (Biased, _tokens),
    "experts": (Experts, _tokens),
    "images": (Images, _images),
}


@pytest.fixture
def ranks_64():
    dist.init_process_group("fake", rank=0, world_size=64)
    yield
    dist.destroy_process_group()


def _lengths(seed: int) -> Iterator[tuple[int, int]]:
    """Batch and length: uniform, uniform in the logarithm, near another, and dimensions of the models."""
    rng = random.Random(seed)
    near = rng.randint(100, 4000)
    yield from ((rng.choice([1, 2, 3]), rng.randint(100, 4000)) for _ in range(2))
    yield rng.choice([1, 2]), int(100 * 40 ** rng.random())
    yield from ((1, int(near * rng.uniform(0.95, 1.05))) for _ in range(2))
    yield from ((1, 88), (2, 40), (3, 24))


@cache
def traced(name: str, batch: int, length: int, dynamic: bool | None, meets: int = 0) -> list[fx.Graph]:
    """The last forward and backward graph before the passes; ``meets`` is a length that came before, if any."""
    make, inputs = MODELS[name]
    model = make()
    shard(model, "eager", reshard_after_forward=True)
    call, recorder = record(model, lower=False, dynamic=dynamic)
    for each in filter(None, (meets, length)):
        call(*inputs(batch, each)).backward()
    return [graph for _, graph in recorder.before[-2:]]


def contracts(graphs: list[fx.Graph], policy: SchedulePolicy) -> list[Any]:
    """What ranks compare before they run the graphs."""
    found = []
    for graph in map(copy.deepcopy, graphs):
        for run in post_grad(policy):
            run(graph)
        found.append(nodes.contract_at(next(filter(nodes.is_launch, graph.nodes))).collectives)
    return found


@pytest.mark.usefixtures("ranks_64")
@pytest.mark.parametrize("name", MODELS)
def test_no_size_of_an_input_changes_a_collective(name):
    """Nine sizes, fixed, varying and as Dynamo finds out: every two of them are a pair of ranks."""
    want = [contracts(traced(name, 2, 300, False), policy) for policy in POLICIES]
    assert len({str(each) for each in want}) > 1  # or nothing that is estimated would matter
    for number, (batch, length) in enumerate(_lengths(len(name))):
        graphs = traced(name, batch, length, (False, True, None)[number % 3])
        assert [contracts(graphs, policy) for policy in POLICIES] == want, (batch, length)


@pytest.mark.usefixtures("ranks_64")
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_that_compiles_again_starts_what_the_others_start(name):
    """One rank has met two lengths, and has graphs for any; another has kept the graph of its only length."""
    once, again = traced(name, 2, 300, None), traced(name, 2, 700, None, meets=500)
    for policy in POLICIES:
        assert contracts(again, policy) == contracts(once, policy)


@pytest.mark.usefixtures("ranks_64")
def test_the_number_of_tokens_in_the_policy_changes_the_schedule():
    graphs = traced("llama", 2, 300, False)
    few, many = (contracts(graphs, SchedulePolicy(cluster=EVEN, tokens=tokens)) for tokens in (1024, 65536))
    assert few != many


@pytest.mark.usefixtures("ranks_64")
def test_reports_estimate_with_the_sizes_that_are_there():
    def total_us(length):
        (forward, _) = map(copy.deepcopy, traced("llama", 2, length, False))
        for run in post_grad(POLICIES[0]):
            run(forward)
        return Scheduled(forward, POLICIES[0]).timeline.total_us

    assert total_us(300) < total_us(700)


@pytest.mark.usefixtures("ranks_64")
def test_regions_cost_what_their_blocks_cost():
    def nominal_us(mode):
        model = _llama()
        shard(model, mode, reshard_after_forward=True)
        graphs = [each.before.graph for each in capture(model, *_tokens(2, 300), code=False).graphs]
        return [sum(AnchoredCompute(graph, nodes.travels, 8192).time(EVEN)) for graph in graphs]

    assert nominal_us("regions") == pytest.approx(nominal_us("eager"), rel=0.02)
