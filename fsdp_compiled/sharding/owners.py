"""Which rank works on which matrix, and in which round: decided from costs and sizes, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import zip_longest

ROUND_BYTES = 128 * 2**20  # that an owner receives in one round
LEAST_ROUNDS = 4  # so that the exchange of one runs while others compute
_HOME_LOAD = 1.1  # of the mean; below, matrices that a rank has completely stay there


def owners_of(costs: Sequence[float], world: int, homes: Sequence[Sequence[int]] = ()) -> list[int]:
    """Return the owner of each matrix: the most expensive first, each to the rank that has least to do.

    Args:
        costs: of each matrix, in any unit.
        world: number of ranks.
        homes: for each matrix the ranks that have all of it, if any. It stays with one of these, unless the busiest
            then had more to do than a tenth above the mean, and more than the largest matrix.

    *Source:* longest processing time first; R. L. Graham, Bounds on Multiprocessing Timing Anomalies (1969).
    """
    order = sorted(range(len(costs)), key=lambda at: (-costs[at], at))
    owners, loads = [-1] * len(costs), [0.0] * world
    for at in order:
        if homes and homes[at]:
            owners[at] = min(homes[at], key=lambda rank: (loads[rank], rank))
            loads[owners[at]] += costs[at]
    if max(loads) > max(_HOME_LOAD * sum(costs) / world, max(costs, default=0.0)):
        owners, loads = [-1] * len(costs), [0.0] * world
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapify(heap)
    for at in order:
        if owners[at] < 0:
            load, owners[at] = heap[0]
            heapreplace(heap, (load + costs[at], owners[at]))
    return owners


def loads_of(costs: Sequence[float], owners: Sequence[int], world: int) -> list[float]:
    loads = [0.0] * world
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def rounds_of(sizes: Sequence[int], costs: Sequence[float], owners: Sequence[int]) -> list[list[int]]:
    """Return the matrices of each round, the most expensive of each owner in the first.

    In a round an owner has matrices of at most ``ROUND_BYTES``, one at least, and at most a quarter of what the
    busiest owner receives in all. ``sizes`` are the matrices' bytes.
    """
    of_owner: dict[int, list[int]] = {}
    for at in sorted(range(len(sizes)), key=lambda at: (-costs[at], at)):
        of_owner.setdefault(owners[at], []).append(at)
    busiest = max((sum(sizes[at] for at in each) for each in of_owner.values()), default=0)
    limit = min(ROUND_BYTES, -(-busiest // LEAST_ROUNDS))
    cut = [_cut(each, sizes, limit) for _, each in sorted(of_owner.items())]
    return [sorted(at for each in rounds for at in each) for rounds in zip_longest(*cut, fillvalue=())]


def _cut(matrices: Sequence[int], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return one owner's matrices in runs of at most ``limit`` bytes, or of one."""
    runs, room = list[list[int]](), 0
    for at in matrices:
        if sizes[at] > room:
            runs.append([])
            room = limit
        runs[-1].append(at)
        room -= sizes[at]
    return runs
