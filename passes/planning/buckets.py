"""Decides which all-gathers, and which reductions, share a collective.

Candidates of many sizes are scheduled and simulated; the one that ends first wins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic

from ..policy import MIB, SchedulePolicy
from .requests import Buckets, Request, Requests, load_of
from .schedule import decide
from .simulate import simulate
from .tasks import AllGatherTask, Load, ReductionTask, bytes_in_flight, least_bytes

LEAST_AUTO_BOUND = 64 * MIB  # below it, launches cost more than memory
_AS_GOOD = 1.002  # among schedules whose estimates differ by less, the one with the fewest collectives wins
_HALVINGS = 8  # of the bound: the sizes that are tried
_PARTS = 6  # and all bytes in up to so many equal parts
_RAMPS = (0, 2, 4)  # how many buckets, from the one that nothing can hide, are each half of the next


Bucket = tuple[Request, ...]


def decide_buckets(requests: Requests, policy: SchedulePolicy) -> Buckets:
    """Return the buckets that ``policy`` asks for, cut where the memory bound has no room for them.

    Raises:
        ValueError: ``policy.in_flight_bytes`` is less than what some node of the graph needs at once.
    """
    requests = requests.compressed()
    bound = auto_bound(requests) if policy.in_flight_bytes == "auto" else policy.in_flight_bytes
    if policy.bucket == "auto":
        return _shortest(requests, bound, None if policy.prefetch == "auto" else policy.prefetch)
    if policy.bucket == "unit":
        buckets = Buckets(_by_unit(requests.all_gathers), _by_unit(requests.reductions))
    else:
        cap = 0 if policy.bucket == "none" else policy.bucket
        buckets = Buckets(_filled(requests.all_gathers, cap), _filled(requests.reductions, cap))
    return _cut_to_fit(requests, buckets, bound)


def auto_bound(requests: Requests) -> int:
    """Return the bound that ``in_flight_bytes="auto"`` stands for, see :class:`SchedulePolicy`."""
    needed = max(least_bytes(load_of(requests, Buckets.alone(requests))))
    unsharded = _two_largest_units((r.param.unit, r.task.counted) for r in requests.all_gathers)
    reduced = _two_largest_units((r.param.unit, r.task.bytes) for r in requests.reductions)
    return max(LEAST_AUTO_BOUND, needed, unsharded + reduced)


def _two_largest_units(sizes: Iterable[tuple[str, int]]) -> int:
    total: dict[str, int] = {}
    for unit, size in sizes:
        total[unit] = total.get(unit, 0) + size
    return sum(sorted(total.values())[-2:])


# ---- filling ----


def _by_unit(requests: Sequence[Request]) -> tuple[Bucket[Request], ...]:
    return _pack(requests, lambda request: (request.key, request.param.unit), lambda _: None)


def _filled(requests: Sequence[Request], cap: int, ramp: int = 0, apart: bool = True) -> tuple[Bucket[Request], ...]:
    """Fill buckets up to ``cap`` bytes; the first ``ramp`` of each key are smaller, each half of the next.

    If ``apart``, what is kept until backward shares no bucket with what is not; it would hold its memory until the
    last member has been read.
    """
    return _pack(
        requests,
        lambda request: (request.key, apart and _is_kept(request.task)),
        lambda count: cap >> max(ramp - count, 0),
    )


def _filled_from_the_end(requests: Sequence[Request], cap: int, ramp: int) -> tuple[Bucket[Request], ...]:
    """Do the same from the last request backwards, so that the last buckets are the small ones."""
    return tuple(bucket[::-1] for bucket in reversed(_filled(requests[::-1], cap, ramp)))


@dataclass
class _Open(Generic[Request]):
    """A bucket that may still grow."""

    cap: int | None
    size: int = 0
    exists: int = 0  # position at which all inputs exist
    needed: int | None = None  # position by which the first result is needed
    requests: list[Request] = field(default_factory=list)

    def takes(self, request: Request) -> bool:
        if self.cap is not None and self.size + request.task.bytes > self.cap:
            return False
        return max(self.exists, _exists(request.task)) <= self._needed_with(request)

    def add(self, request: Request) -> None:
        self.size += request.task.bytes
        self.exists, self.needed = max(self.exists, _exists(request.task)), self._needed_with(request)
        self.requests.append(request)

    def _needed_with(self, request: Request) -> int:
        mine = _needed(request.task)
        return mine if self.needed is None else min(self.needed, mine)


def _exists(task: AllGatherTask | ReductionTask) -> int:
    return task.earliest if isinstance(task, AllGatherTask) else task.ready


def _is_kept(task: AllGatherTask | ReductionTask) -> bool:
    return isinstance(task, AllGatherTask) and task.kept_bytes > 0


def _needed(task: AllGatherTask | ReductionTask) -> int:
    return task.first if isinstance(task, AllGatherTask) else task.needed


def _pack(
    requests: Sequence[Request],
    key_of: Callable[[Request], Hashable],
    cap_of: Callable[[int], int | None],
) -> tuple[Bucket[Request], ...]:
    buckets: list[_Open[Request]] = []
    newest: dict[Hashable, _Open[Request]] = {}
    opened: dict[Hashable, int] = {}
    for request in requests:
        key = key_of(request)
        bucket = newest.get(key)
        if bucket is None or not bucket.takes(request):
            count = opened[key] = opened.get(key, -1) + 1
            bucket = newest[key] = _Open(cap_of(count))
            buckets.append(bucket)
        bucket.add(request)
    return tuple(tuple(bucket.requests) for bucket in buckets)


# ---- the memory bound ----


def _cut_to_fit(requests: Requests, buckets: Buckets, bound: int) -> Buckets:
    """Halve the buckets that are alive wherever even the latest schedule exceeds the bound, until none does."""
    while True:
        load = load_of(requests, buckets)
        crowded = [p for p, size in enumerate(least_bytes(load)) if size > bound]
        if not crowded:
            return buckets
        all_gathers = _halved(buckets.all_gathers, [(g.first, g.last) for g in load.all_gathers], crowded)
        reductions = _halved(buckets.reductions, [(r.made, r.ready - 1) for r in load.reductions], crowded)
        if len(all_gathers) + len(reductions) == len(buckets.all_gathers) + len(buckets.reductions):
            raise ValueError(_too_little(requests, load, bound))
        buckets = Buckets(all_gathers, reductions)


def _halved(
    buckets: Sequence[Bucket[Request]], alive: Sequence[tuple[int, int]], crowded: Sequence[int]
) -> tuple[Bucket[Request], ...]:
    def pieces() -> Iterator[Bucket[Request]]:
        for bucket, (first, last) in zip(buckets, alive, strict=True):
            place = _next_at_least(crowded, first)
            if len(bucket) == 1 or place is None or place > last:
                yield bucket
            else:
                yield bucket[: len(bucket) // 2]
                yield bucket[len(bucket) // 2 :]

    return tuple(pieces())


def _next_at_least(positions: Sequence[int], least: int) -> int | None:
    index = bisect_left(positions, least)
    return positions[index] if index < len(positions) else None


def _too_little(requests: Requests, load: Load, bound: int) -> str:
    in_use = least_bytes(load)
    worst = max(range(len(in_use)), key=in_use.__getitem__)
    alive = [(r.task.counted, r.param.name) for r in requests.all_gathers if r.task.first <= worst <= r.task.last]
    alive += [
        (r.task.bytes, f"gradient of {r.param.name}")
        for r in requests.reductions
        if r.task.made <= worst < r.task.ready
    ]
    names = ", ".join(f"{name} ({size} bytes)" for size, name in sorted(alive, reverse=True) if size)
    return (
        f"SchedulePolicy.in_flight_bytes: expected at least {in_use[worst]} for this graph, got {bound}; "
        f"one place needs at once: {names}. Allow that many bytes, or use 'auto'"
    )


# ---- the shortest of many candidates ----


def _shortest(requests: Requests, bound: int, prefetch: int | None) -> Buckets:
    """Try many sizes for all-gathers, then for reductions, and return the buckets whose simulation ends first."""
    start = Buckets(_filled(requests.all_gathers, bound), _filled(requests.reductions, bound))
    sized = [replace(start, all_gathers=each) for each in _candidates(requests.all_gathers, bound, _filled)]
    best = _best(requests, sized, bound, prefetch)
    ends = _candidates(requests.reductions, bound, _filled_from_the_end)
    return _best(requests, [best, *(replace(best, reductions=each) for each in ends)], bound, prefetch)


def _candidates(
    requests: Sequence[Request], bound: int, fill: Callable[..., tuple[Bucket[Request], ...]]
) -> list[tuple[Bucket[Request], ...]]:
    """Return different buckets of ``requests``, each choice once."""
    total = sum(request.task.bytes for request in requests)
    largest = max((request.task.bytes for request in requests), default=0)
    caps: set[int] = {min(bound, total // parts + largest) for parts in range(1, _PARTS + 1)}
    caps |= {bound >> halvings for halvings in range(_HALVINGS + 1)}
    found: list[tuple[Bucket[Request], ...]] = [_by_unit(requests)]
    found += [fill(requests, cap, ramp) for cap in sorted(caps) for ramp in _RAMPS]
    if any(_is_kept(request.task) for request in requests):
        found += [fill(requests, cap, apart=False) for cap in sorted(caps)]
    return list({tuple(tuple(r.index for r in bucket) for bucket in each): each for each in found}.values())


def _best(requests: Requests, candidates: Sequence[Buckets], bound: int, prefetch: int | None) -> Buckets:
    scored = []
    for buckets in (_cut_to_fit(requests, buckets, bound) for buckets in candidates):
        load = load_of(requests, buckets)
        actions = decide(load, bound, prefetch)
        peak = max(bytes_in_flight(load, actions))
        count = len(buckets.all_gathers) + len(buckets.reductions)
        scored.append((simulate(load, actions).total_us, count, peak, buckets))
    soon = min(total for total, *_ in scored) * _AS_GOOD
    return min((s for s in scored if s[0] <= soon), key=lambda s: s[1:3] + s[:1])[3]
