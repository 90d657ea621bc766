"""The time and the buffers of a step of matrices by owners."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_compiled.passes.cost import CLUSTERS
from fsdp_compiled.passes.cost.matrix_cost import (
    all_to_all_us,
    newton_schulz_flops,
    newton_schulz_us,
    owners_us,
    rounds_bytes,
)

H100 = CLUSTERS["H100"]
MIB = 2**20


def test_flops_are_those_of_the_three_products():
    assert newton_schulz_flops((2, 3), steps=1) == 2 * 2 * 3 * 2 + 2 * 2 * 2 * 2 + 2 * 2 * 2 * 3
    assert newton_schulz_flops((3, 2)) == 5 * newton_schulz_flops((2, 3), steps=1)
    tall, wide = newton_schulz_us([(4096, 1024), (1024, 4096)], H100)
    at_peak_us = 1e6 * newton_schulz_flops((1024, 4096)) / H100.flops_16bit
    assert tall == wide >= at_peak_us / H100.efficiency


def test_an_all_to_all_leaves_the_node_where_ranks_do():
    inside, between = (all_to_all_us(64 * MIB, ranks, H100) for ranks in (range(8), range(0, 64, 8)))
    assert 0 < 4 * inside < between
    assert all_to_all_us(64 * MIB, [0], H100) == 0.0


def test_a_step_takes_what_the_busiest_owner_computes_and_the_first_and_last_exchange():
    free = replace(H100, intra=replace(H100.intra, latency_us=0, hop_us=0, bytes_per_s=1e18))
    assert owners_us([3.0, 2.0, 2.0], 3, range(2), 2, False, free) == pytest.approx(4.0)
    bound = owners_us([1.0] * 8, 2**33, range(8), 8, False, H100)
    there = all_to_all_us(2 * 2**33 / 8, range(8), H100)
    assert bound == pytest.approx(2 * there * (1 + 1 / 4))


def test_replicas_share_what_takes_long_to_compute():
    ranks = range(16)
    for us, better in ((1e5, True), (1.0, False)):
        alike, shared = (owners_us([us] * 32, 32 * 2**20, ranks, 8, shares, H100) for shares in (False, True))
        assert (shared < alike) == better


def test_buffers_are_of_two_rounds_or_of_the_largest_matrix():
    assert rounds_bytes([(1024, 1024)] * 64, 8) == 6 * 4 * MIB  # a quarter of an owner's eight matrices
    assert rounds_bytes([(8192, 28672)] * 64, 8) == 6 * 448 * MIB
    assert rounds_bytes([(1024, 1024)] * 10**5, 8) == 6 * 128 * MIB
    assert rounds_bytes([], 8) == 0
