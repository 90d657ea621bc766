"""Ranks whose batches have drawn lengths: what each compiles, and the collectives that it would start.

Graphs are traced and not run, under a fake process group, so that a length of 4000 takes no longer than one of 100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._functorch import config

from fsdp_compiled import SchedulePolicy
from fsdp_compiled.passes import CLUSTERS, post_grad
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.testing.llama import Config, Llama
from tests.support.graphs import Recorder, copied
from tests.support.training import shard

# Compute and communication take about as long as each other, so that times decide.
EVEN = replace(
    CLUSTERS["H100"],
    flops_16bit=2e11,
    flops_32bit=2e11,
    memory_bytes_per_s=1e11,
    kernel_us=0.1,
    intra=replace(CLUSTERS["H100"].intra, latency_us=3.0, hop_us=0.1, bytes_per_s=6e7),
    inter=replace(CLUSTERS["H100"].inter, latency_us=3.0, hop_us=0.1, bytes_per_s=3e7),
)
POLICIES = tuple(SchedulePolicy(cluster=cluster) for cluster in (EVEN, CLUSTERS["H100"], CLUSTERS["CPU"]))
ALL_POLICIES = tuple(SchedulePolicy(cluster=cluster) for cluster in (EVEN, *CLUSTERS.values()))
WORLDS = (2, 4, 64)


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


class Masked(Biased):
    """Attention with a mask ``[batch, heads, length, length]`` that is added to scores, by torch's operator."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__(width, heads)
        self.blocks = nn.ModuleList(MaskedBlock(width, heads) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), targets.flatten())


class MaskedBlock(BiasedBlock):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(x))) * self.gate + self.shift


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


def _masked(batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    return *_tokens(batch, length), torch.zeros(batch, 3, length, length)


def _images(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 8 + length // 32, 8 + length // 16), torch.zeros(batch, dtype=torch.int64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "llama": (_llama, _tokens),
    "biased": (Biased, _tokens),
    "masked": (Masked, _masked),
    "experts": (Experts, _tokens),
    "images": (Images, _images),
}


# ---- what a rank compiles ----


@dataclass(frozen=True)
class Batch:
    """One call of the model: its loss and, unless it evaluates, the gradients."""

    rows: int
    length: int
    evaluates: bool = False


@dataclass(frozen=True)
class Rank:
    """A rank of a group, and the batches that it meets, in order."""

    model: str
    world: int
    dynamic: bool | None
    batches: tuple[Batch, ...]
    mode: str = "eager"  # or "regions": how the model is sharded that is compiled


class NotRunError(Exception):
    """A graph was compiled, and is not run."""


def _stop(*_: Any) -> Any:
    raise NotRunError


class _Tracer(Recorder):
    """Records graphs as Inductor gets them, and raises where one would run."""

    def _inner(self, gm: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        super()._inner(gm, example_inputs, **kwargs)
        return make_boxed_func(_stop)


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """A default process group of ``world`` ranks of which this process is the first; no collective runs."""
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _call(call: Callable[..., Any], rank: Rank) -> None:
    for batch in rank.batches:
        with (
            torch.no_grad() if batch.evaluates else nullcontext(),
            config.patch(force_non_lazy_backward_lowering=True),
            suppress(NotRunError),
        ):
            call(*MODELS[rank.model][1](batch.rows, batch.length))


@cache
def traced(rank: Rank) -> list[tuple[str, fx.Graph]]:
    """Return every graph that the rank compiles, before the passes, in order, each with its kind."""
    model = MODELS[rank.model][0]()
    shard(model, rank.mode, reshard_after_forward=True)
    torch._dynamo.reset()
    tracer = _Tracer(lower=False)
    _call(torch.compile(model, backend=tracer, fullgraph=True, dynamic=rank.dynamic), rank)
    return tracer.before


def count_graphs(rank: Rank, mode: str | None = None) -> int:
    """Return how often Dynamo compiles the model: unsharded, or sharded in ``mode``."""
    model, count = MODELS[rank.model][0](), 0
    if mode is not None:
        shard(model, mode)

    def backend(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        nonlocal count
        count += 1
        return _stop

    torch._dynamo.reset()
    _call(torch.compile(model, backend=backend, fullgraph=True, dynamic=rank.dynamic), rank)
    return count


def contracts(graph: fx.Graph, policy: SchedulePolicy) -> Any:
    """Return what ranks compare before they run the graph."""
    lowered = copied(graph)
    for run in post_grad(policy):
        run(lowered)
    return nodes.contract_at(next(filter(nodes.is_launch, lowered.nodes))).collectives


@cache
def wanted(
    model: str, world: int, policies: tuple[SchedulePolicy, ...] = POLICIES, mode: str = "eager"
) -> dict[str, list[Any]]:
    """Return the contracts of a rank that sees 300 tokens, by the kind of graph; one for each policy."""
    rank = Rank(model, world, False, (Batch(2, 300), Batch(2, 300, evaluates=True)), mode)
    return {kind: [contracts(graph, policy) for policy in policies] for kind, graph in traced(rank)}


def assert_starts_what_others_start(rank: Rank, policies: tuple[SchedulePolicy, ...] = POLICIES) -> None:
    """Every graph of ``rank`` has the contracts that any other rank's graph of its kind has."""
    graphs, want = traced(rank), wanted(rank.model, rank.world, policies, rank.mode)
    assert {kind for kind, _ in graphs} == {
        kind for each in rank.batches for kind in (["inference"] if each.evaluates else ["forward", "backward"])
    }
    for number, (kind, graph) in enumerate(graphs):
        assert [contracts(graph, policy) for policy in policies] == want[kind], (number, kind, rank)


# ---- drawing ----


@st.composite
def histories(draw: Any) -> tuple[Batch, ...]:
    """One to four batches: lengths uniform, uniform in the logarithm, or within a tenth of one before."""
    uniform = st.integers(100, 4000)
    logarithmic = st.floats(0, 1).map(lambda part: round(100 * 40**part))
    lengths = [draw(uniform | logarithmic)]
    for _ in range(draw(st.integers(0, 3))):
        near = st.floats(0.9, 1.1).map(lambda part: min(max(round(part * lengths[-1]), 100), 4000))
        lengths.append(draw(uniform | logarithmic | near))
    rows, evaluates = st.sampled_from([1, 2, 3]), st.sampled_from([False, False, True])
    return tuple(Batch(draw(rows), length, draw(evaluates)) for length in lengths)


# With dynamic=True numbers in a block vary, too, and torch makes no regions, on any rank.
SETTINGS = [(False, "eager"), (True, "eager"), (None, "eager"), (False, "regions"), (None, "regions")]
RANKS = st.builds(
    lambda model, world, setting, batches: Rank(model, world, setting[0], batches, setting[1]),
    *map(st.sampled_from, (list(MODELS), WORLDS, SETTINGS)),
    histories(),
)


@dataclass
class Compared:
    """The drawn ranks that start what others of their model and world start."""

    ranks: list[Rank] = field(default_factory=list)

    def check(self, rank: Rank) -> None:
        with fake_ranks(rank.world):
            assert_starts_what_others_start(rank, ALL_POLICIES)
            assert count_graphs(rank, rank.mode) == count_graphs(rank), rank
        traced.cache_clear()
        self.ranks.append(rank)

    def __str__(self) -> str:
        alike: dict[tuple[str, int], list[int]] = {}  # how many lengths each rank has met, by model and world
        for rank in self.ranks:
            alike.setdefault((rank.model, rank.world), []).append(len(rank.batches))
        pairs = [pair for counts in alike.values() for pair in combinations(counts, 2)]
        return f"{len(pairs)} pairs of ranks compared, {sum(a * b for a, b in pairs)} pairs of lengths"


def travels(node: fx.Node) -> bool:
    """Whether a node is an opaque one for which anything leaves this rank's compute."""
    if node not in nodes.opaque_nodes_of(node.graph):
        return False
    alone = nodes.asked_of(node)
    return alone.spec.local_steps(alone.params[0]) is None
