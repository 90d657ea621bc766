"""Which sizes estimates are made from, and that ranks whose inputs differ a little decide the same schedule."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from model import Config, Llama

from fsdp_compiled import SchedulePolicy
from fsdp_compiled.inspect.reading import Scheduled
from fsdp_compiled.passes import CLUSTERS, post_grad
from fsdp_compiled.passes.cost.extents import counted, model_extents
from tests.builder import Builder
from tests.graphs import record
from tests.training import shard


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 6, 8, 12, 512, 768, 1024, 1536, 4096, 3 * 2**20])
def test_usual_sizes_count_as_they_are(size):
    assert counted(size, frozenset()) == size


@pytest.mark.parametrize(
    ("low", "high", "middle"),
    [(5, 6, 6), (7, 9, 8), (444, 627, 512), (628, 886, 768), (887, 1254, 1024), (3548, 5016, 4096)],
)
def test_the_classes(low, high, middle):
    assert {counted(size, frozenset()) for size in range(low, high + 1)} == {middle}
    assert counted(low - 1, frozenset()) < middle < counted(high + 1, frozenset())


@given(st.integers(1, 2**40), st.integers(1, 2**40))
def test_rounding_keeps_the_order_and_changes_little(one, other):
    small, large = sorted((one, other))
    assert counted(small, frozenset()) <= counted(large, frozenset())
    rounded = counted(one, frozenset())
    assert counted(rounded, frozenset()) == rounded
    assert 2 * rounded**2 <= 3 * one**2
    assert 3 * rounded**2 >= 2 * one**2


def test_a_step_comes_before_rounding():
    assert counted(9, frozenset(), step=8) == 16
    assert counted(520, frozenset(), step=8) == 512
    assert counted(1, frozenset(), step=8) == 1
    assert counted(50257, frozenset({50264}), step=8) == 50264


def test_the_models_extents():
    """Of 5 heads with 24 features, and 520 tokens."""
    b = Builder()
    x = b.input("x", 4, 520, 120)
    heads = b.call(torch.ops.aten.view.default, x, [4, 520, 5, 24])
    b.call(torch.ops.aten.view.default, heads, [4, 520, 120])
    b.call(torch.ops.aten.view.default, x, [2080, 120])
    merged = b.input("merged", 520, 7, 11)
    b.call(torch.ops.aten.reshape.default, merged, [520, 77])
    found = model_extents([(120, 11_008), (77,)], b.graph)
    assert {120, 11_008, 5, 24, 7, 11, 77} <= found
    assert {8, 80} <= found  # 5 and 77, padded for products on a GPU
    assert found.isdisjoint({4, 520, 2080})
    assert [counted(size, found) for size in (120, 11_008, 5, 520, 2080)] == [120, 11_008, 5, 512, 2048]


# ---- schedules ----

# Nothing of it but the layers is a power of two, nor 1.5 times one.
CONFIG = Config(vocab=100, width=40, layers=2, heads=5, kv_heads=5, hidden=88, max_seq=1024)


@pytest.fixture
def ranks_64():
    dist.init_process_group("fake", rank=0, world_size=64)
    yield
    dist.destroy_process_group()


@cache
def traced(batch, length, dynamic=False):
    """The forward and the backward graph before the passes, of a model that is sharded over 64 ranks."""
    model = Llama(CONFIG)
    model.init_weights(0)
    shard(model, "eager")
    call, recorder = record(model, lower=False, dynamic=dynamic)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    call(tokens, tokens).backward()
    return [graph for _, graph in recorder.before]


def scheduled(graphs, cluster):
    policy = SchedulePolicy(cluster=CLUSTERS[cluster])
    found = []
    for graph in map(copy.deepcopy, graphs):
        for run in post_grad(policy):
            run(graph)
        found.append(Scheduled(graph, policy))
    return found


def decided(graphs, cluster):
    """Everything that was decided, and the estimates that it was decided from, to the last bit."""
    return [
        (
            [each.bucket for each in read.buckets],
            [(action.verb, action.kind, action.index) for action in read.actions],
            [read.load.clock[action.position] for action in read.actions],
            list(read.timeline.collectives.values()),
            read.timeline.total_us,
        )
        for read in scheduled(graphs, cluster)
    ]


@pytest.mark.usefixtures("ranks_64")
@pytest.mark.parametrize("cluster", ["H100", "CPU"])
@pytest.mark.parametrize("length", [444, 520, 627])
def test_lengths_of_one_class_give_one_schedule(cluster, length):
    assert decided(traced(4, length), cluster) == decided(traced(4, 512), cluster)


@pytest.mark.usefixtures("ranks_64")
@pytest.mark.parametrize("cluster", ["H100", "CPU"])
@pytest.mark.parametrize("length", [14, 19])
@pytest.mark.parametrize("batch", [1, 2])
def test_short_lengths_of_one_class_give_one_schedule(cluster, batch, length):
    assert decided(traced(batch, length), cluster) == decided(traced(batch, 16), cluster)


@pytest.mark.usefixtures("ranks_64")
@pytest.mark.parametrize("cluster", ["H100", "CPU"])
def test_a_length_that_varies_gives_the_schedule_of_a_fixed_one(cluster):
    """A rank that has met another length compiles again; one that has not keeps the graph that it has."""
    assert decided(traced(4, 520, dynamic=True), cluster) == decided(traced(4, 512), cluster)


@pytest.mark.usefixtures("ranks_64")
@pytest.mark.parametrize("cluster", ["H100", "CPU"])
def test_estimates_do_see_a_length_of_another_class(cluster):
    (short, _), (long, _) = decided(traced(4, 512), cluster), decided(traced(4, 768), cluster)
    assert short[-1] < long[-1]
