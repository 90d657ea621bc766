"""What an optimizer's step of matrices takes that go to owners and back, see ``fsdp_compiled.optim``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from ...sharding.owners import LEAST_ROUNDS, ROUND_BYTES, loads_of, owners_of
from .cluster import Cluster

BF16_BYTES = 2


def newton_schulz_flops(shape: Sequence[int], steps: int = 5) -> float:
    """Return the FLOPs of Newton-Schulz iterations on a matrix.

    *Source:* the three products of each iteration of Keller Jordan's Muon, on the matrix or its transpose.
    """
    short, long = sorted(shape)
    return steps * (4.0 * short * short * long + 2.0 * short**3)


def newton_schulz_us(shapes: Iterable[Sequence[int]], cluster: Cluster, steps: int = 5) -> list[float]:
    """Return the time on each matrix, by its products."""

    @cache
    def of_one(short: int, long: int) -> float:
        products = ((short, long, short), (short, short, short), (short, short, long))
        us = sum(
            cluster.product_us(2.0 * m * k * n, BF16_BYTES * (m * k + k * n + m * n), BF16_BYTES)
            for m, k, n in products
        )
        return steps * us

    return [of_one(*sorted(shape)) for shape in shapes]


def all_to_all_us(sent_bytes: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Return the time of an all-to-all among ``ranks`` in which each sends so many bytes, its own among them.

    *Source:* each sends ``(world - 1) / world`` of them over its link, as each receives in an all-gather of as many.
    """
    return cluster.link_of(ranks).collective_us(int(sent_bytes), len(ranks)) if len(ranks) > 1 else 0.0


def owners_us(
    costs_us: Sequence[float], elements: int, ranks: Sequence[int], shards: int, shares: bool, cluster: Cluster
) -> float:
    """Return the time of a step: what the busiest owner computes, and exchanges as far as they exceed that.

    Args:
        costs_us: of each matrix.
        elements: of all together.
        ranks: that hold a parameter: groups of ``shards`` ranks, each of which has all of it.
        shares: whether replicas share the owners; else each group of shards does all.
    """
    group, replicas = (ranks if shares else ranks[:shards]), len(ranks) // shards
    busiest = max(loads_of(costs_us, owners_of(costs_us, len(group)), len(group)))
    sent = BF16_BYTES * elements / shards
    exchange_us = all_to_all_us(sent / (replicas if shares else 1), group, cluster)
    exchange_us += all_to_all_us(sent, group, cluster)  # back, to every replica
    return max(busiest, exchange_us) + exchange_us / LEAST_ROUNDS  # nothing hides the first and the last


def rounds_bytes(shapes: Sequence[Sequence[int]], world: int) -> int:
    """Return what the buffers of a step take on an owner: of two rounds, with matrices and updates.

    They are about six times what an owner gets in a round: two packed buffers and two outputs of all-to-alls under
    way, complete matrices and their updates.
    """
    sizes = [BF16_BYTES * rows * columns for rows, columns in shapes]
    a_round = min(ROUND_BYTES, sum(sizes) // (world * LEAST_ROUNDS))
    return 6 * max(a_round, max(sizes, default=0))
