"""Owners of matrices and rounds, on the shapes of real models: balanced, quickly, and the same in every process."""

from __future__ import annotations

import random
import time

import pytest

from fsdp_compiled.passes.cost.matrix_cost import newton_schulz_flops
from fsdp_compiled.sharding.owners import loads_of, owners_of, rounds_of

MIB = 2**20
BF16 = 2


def llama(layers, width, kv, hidden):
    return layers * [*2 * [(width, width)], *2 * [(kv, width)], *2 * [(hidden, width)], (width, hidden)]


def qwen3(layers, width, heads, kv, experts, hidden):
    attention = [(heads, width), (width, heads), *2 * [(kv, width)]]
    return layers * [*attention, *experts * [(hidden, width), (hidden, width), (width, hidden)]]


MODELS = {
    "8B": llama(32, 4096, 1024, 14336),
    "70B": llama(80, 8192, 1024, 28672),
    "Qwen3-30B": qwen3(48, 2048, 4096, 512, 128, 768),
    "Qwen3-235B": qwen3(94, 4096, 8192, 512, 128, 1536),
}


def balance(model, world):
    """The busiest owner's work beside the mean, and beside the largest matrix."""
    costs = list(map(newton_schulz_flops, MODELS[model]))
    busiest = max(loads_of(costs, owners_of(costs, world), world))
    return busiest / (sum(costs) / world), busiest / max(costs)


@pytest.mark.parametrize(
    ("model", "world", "at_most"),
    [("8B", 64, 1.07), ("70B", 64, 1.02), ("Qwen3-30B", 8, 1.02), ("Qwen3-30B", 64, 1.02), ("Qwen3-30B", 512, 1.02)],
)
def test_the_busiest_owner_is_near_the_mean(model, world, at_most):
    assert 1.0 <= balance(model, world)[0] <= at_most


def test_with_fewer_matrices_than_ranks_the_largest_matrix_bounds():
    assert balance("8B", 512)[1] == 1.0
    assert balance("8B", 512)[0] > 4


def test_a_large_plan_takes_less_than_a_second():
    shapes = MODELS["Qwen3-235B"]
    costs, sizes = list(map(newton_schulz_flops, shapes)), [BF16 * a * b for a, b in shapes]
    start = time.process_time()
    rounds_of(sizes, costs, owners_of(costs, 512))
    assert len(shapes) == 36_472 and time.process_time() - start < 1.0


@pytest.mark.parametrize("model", ["8B", "Qwen3-30B"])
def test_rounds_hold_each_matrix_once_and_bound_each_owners_bytes(model):
    shapes = MODELS[model]
    costs, sizes = list(map(newton_schulz_flops, shapes)), [BF16 * a * b for a, b in shapes]
    owners = owners_of(costs, 8)
    rounds = rounds_of(sizes, costs, owners)
    assert sorted(at for each in rounds for at in each) == list(range(len(shapes)))
    for each in rounds:
        for owner in range(8):
            mine = [at for at in each if owners[at] == owner]
            assert len(mine) <= 1 or sum(sizes[at] for at in mine) <= 128 * MIB
        busy = loads_of([costs[at] for at in each], [owners[at] for at in each], 8)
        if each is not rounds[-1]:
            assert min(busy) > 0.5 * max(busy)  # all owners work in each round


def test_little_work_still_has_four_rounds():
    assert len(rounds_of([100] * 32, [1.0] * 32, owners_of([1.0] * 32, 2))) == 4
    assert rounds_of([], [], []) == []


def test_matrices_stay_where_they_are_unless_few_ranks_have_them():
    costs = [1.0] * 16
    homes = [(at // 4,) for at in range(16)]
    assert owners_of(costs, 4, homes) == [at // 4 for at in range(16)]
    assert owners_of(costs, 8, homes) == owners_of(costs, 8)  # half of the ranks would have nothing to do
    replicas = [(at // 4, at // 4 + 4) for at in range(16)]
    assert loads_of(costs, owners_of(costs, 8, replicas), 8) == [2.0] * 8
    some = [*homes[:8], *[()] * 8]
    assert owners_of(costs, 4, some)[:8] == [0] * 4 + [1] * 4
    assert loads_of(costs, owners_of(costs, 4, some), 4) == [4.0] * 4


def test_no_owner_has_more_than_the_mean_and_a_matrix():
    """Graham's bound for whoever gives each matrix to the rank that has least."""
    draw = random.Random(0)
    for _ in range(200):
        costs = [draw.expovariate(1.0) for _ in range(draw.randrange(1, 40))]
        world = draw.randrange(1, 12)
        busiest = max(loads_of(costs, owners_of(costs, world), world))
        assert busiest <= sum(costs) / world + (1 - 1 / world) * max(costs) + 1e-9
