"""Ranks whose inputs differ in size start the same collectives in the same order, whatever the sizes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compiled import SchedulePolicy
from fsdp_compiled.inspect import capture
from fsdp_compiled.inspect.reading import Scheduled
from fsdp_compiled.passes import post_grad
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.passes.graph.anchors import AnchoredCompute
from tests.support.drawn_lengths import (
    EVEN,
    MODELS,
    POLICIES,
    WORLDS,
    Batch,
    Rank,
    assert_starts_what_others_start,
    contracts,
    count_graphs,
    fake_ranks,
    traced,
    travels,
    wanted,
)
from tests.support.training import shard
from tests.support.variants import thorough


@pytest.fixture
def ranks_64():
    with fake_ranks(64):
        yield


def _lengths(seed: int) -> Iterator[tuple[int, int]]:
    """Batch and length: uniform, uniform in the logarithm, and dimensions of a model."""
    rng = random.Random(seed)
    yield rng.choice([1, 2, 3]), rng.randint(100, 4000)
    yield rng.choice([1, 2]), int(100 * 40 ** rng.random())
    yield 3, 24


@pytest.mark.usefixtures("ranks_64")
@pytest.mark.parametrize("name", MODELS)
@thorough(when=lambda name: name in ("biased", "masked", "images"))
def test_no_size_of_an_input_changes_a_collective(name):
    """Four sizes, fixed, varying and as Dynamo finds out: every two are a pair of ranks. fuzz.py draws more."""
    for of_kind in wanted(name, 64).values():
        assert len(set(map(str, of_kind))) > 1  # or nothing that is estimated would matter
    for number, (rows, length) in enumerate(_lengths(len(name))):
        dynamic = (False, True, None)[number % 3]
        assert_starts_what_others_start(Rank(name, 64, dynamic, (Batch(rows, length),)))


# What one rank of a group meets: evaluation between steps, lengths that vary or stay, rows that change.
MET = [
    (None, (Batch(2, 300), Batch(2, 500), Batch(2, 700))),
    (None, (Batch(1, 3000), Batch(1, 3000, True), Batch(1, 130), Batch(1, 2900, True))),
    (False, (Batch(1, 1111), Batch(3, 1050), Batch(2, 400, True))),
    (True, (Batch(1, 100, True), Batch(1, 3900))),
]


@pytest.mark.parametrize("number", range(len(MET)))
@thorough(when=lambda number: number != 2)
def test_a_rank_that_compiles_again_starts_what_the_others_start(number):
    (dynamic, batches), world = MET[number], WORLDS[number % len(WORLDS)]
    with fake_ranks(world):
        assert_starts_what_others_start(Rank(list(MODELS)[number], world, dynamic, batches))


@pytest.mark.usefixtures("ranks_64")
@pytest.mark.parametrize("name, met", list(zip(["llama", "experts", "llama"], MET[:3], strict=True)))
@thorough(when=lambda name: name == "llama")
def test_a_rank_whose_blocks_are_regions_starts_what_the_others_start(name, met):
    rank = Rank(name, 64, *met, "regions")
    assert_starts_what_others_start(rank)
    assert any(nodes.region_of(node) for _, graph in traced(rank) for node in graph.nodes)


@pytest.mark.parametrize("world", WORLDS)
@thorough(when=lambda world: world == 4)
def test_times_decide_in_groups_of_every_size(world):
    with fake_ranks(world):
        assert len(set(map(str, wanted("llama", world)["backward"]))) > 1


@pytest.mark.usefixtures("ranks_64")
@pytest.mark.parametrize("number, name", list(enumerate(MODELS)))
@thorough(when=lambda name: name in ("biased", "masked"))
def test_a_mixture_of_lengths_compiles_no_more_often_than_unsharded(number, name):
    """Each model meets one of the four mixtures. fuzz.py draws more."""
    rank = Rank(name, 64, *MET[number % len(MET)])
    mode = "full" if rank.dynamic is not None else "regions"
    assert count_graphs(rank, mode) == count_graphs(rank) > 0


class Placed(nn.Module):
    """A place of its own for each of a fixed number of tokens; only batches vary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.place, self.map = nn.Parameter(torch.rand(16, width)), nn.Linear(width, width)

    def forward(self, x):
        return torch.sin(self.map(x + self.place))


class Looked(nn.Module):
    """Rows of a table by number, as many as there are tokens, and the first of another one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows, self.first = nn.Parameter(torch.rand(2048, width)), nn.Parameter(torch.rand(2048, width))
        self.map = nn.Linear(width, width)

    def forward(self, x):
        length = x.shape[1]
        x = torch.sin(x * self.rows[torch.arange(length) % 2048] + x[..., :1])
        return torch.sin(self.map(x * self.first[:length]))


class Pooled(nn.Module):
    """Sums over a length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))
        self.map = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.sin(self.map(torch.cos((x * self.scale + self.shift).sum(1, keepdim=True))))


@torch.library.custom_op("fsdp_compiled_tests::flash_attn", mutates_args=())
def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands for attention of other libraries, which takes [batch, length, heads, features]."""
    return q + k + v


flash_attn.register_fake(lambda q, k, v: torch.empty_like(q))
flash_attn.register_autograd(lambda ctx, grad: (flash_attn(grad, grad, grad), grad, grad))


class Attending(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, -1)).unbind(2)
        return x + self.out(flash_attn(q, k, v).flatten(2))


class Stacked(nn.Module):
    def __init__(self, kind: Callable[[int], nn.Module], width: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(width) for _ in range(2))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x).square().mean()


OTHERS: dict[str, Any] = {
    "placed": (lambda: Stacked(Placed), lambda batch, length: (torch.randn(batch * length, 16, 24),)),
    "looked": (lambda: Stacked(Looked), lambda batch, length: (torch.randn(batch, length, 24),)),
    "pooled": (lambda: Stacked(Pooled), lambda batch, length: (torch.randn(batch, length, 24),)),
    "attending": (lambda: Stacked(Attending), lambda batch, length: (torch.randn(batch, length, 24),)),
}


@pytest.mark.usefixtures("ranks_64")
@pytest.mark.parametrize("name", OTHERS)
def test_a_size_that_varies_starts_and_costs_what_a_fixed_one_does(monkeypatch, name):
    monkeypatch.setitem(MODELS, name, OTHERS[name])
    many, *others = (
        traced(Rank(name, 64, dynamic, (Batch(2, length),)))
        for dynamic, length in [(False, 1000), (True, 1000), (False, 3)]
    )
    for other in others:
        for (kind, one), (_, two) in zip(many, other, strict=True):
            assert [contracts(one, each) for each in POLICIES] == [contracts(two, each) for each in POLICIES], kind
            times = [AnchoredCompute(graph, travels, 8192).time(EVEN) for graph in (one, two)]
            assert times[0] == times[1], kind


@pytest.mark.usefixtures("ranks_64")
def test_the_number_of_tokens_in_the_policy_changes_the_schedule():
    graphs = traced(Rank("llama", 64, False, (Batch(2, 300),)))
    few, many = (
        [contracts(graph, SchedulePolicy(cluster=EVEN, tokens=tokens)) for _, graph in graphs]
        for tokens in (1024, 65536)
    )
    assert few != many


@pytest.mark.usefixtures("ranks_64")
def test_reports_estimate_with_the_sizes_that_are_there():
    def total_us(length):
        (_, graph), _ = traced(Rank("llama", 64, False, (Batch(2, length),)))
        forward = copy.deepcopy(graph)
        for run in post_grad(POLICIES[0]):
            run(forward)
        return Scheduled(forward, POLICIES[0]).timeline.total_us

    assert total_us(300) < total_us(700)


@pytest.mark.usefixtures("ranks_64")
def test_regions_cost_what_their_blocks_cost():
    def nominal_us(mode):
        make, inputs = MODELS["llama"]
        model = make()
        shard(model, mode, reshard_after_forward=True)
        graphs = [each.before.graph for each in capture(model, *inputs(2, 300), code=False).graphs]
        return [sum(AnchoredCompute(graph, travels, 8192).time(EVEN)) for graph in graphs]

    assert nominal_us("regions") == pytest.approx(nominal_us("eager"), rel=0.02)
