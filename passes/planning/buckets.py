"""Decides which all-gathers, and which reductions, share a collective.

Candidates of many sizes are scheduled and simulated; the one that ends first wins.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic

from ..schedule_policy import MIB, SchedulePolicy
from .requests import Buckets, Request, Requests, load_of
from .schedule import decide
from .simulate import simulate
from .tasks import AllGatherTask, Load, ReductionTask, bytes_in_flight, least_bytes

LEAST_AUTO_BOUND = 64 * MIB  # below it, launches cost more than memory
MOST_PARAMS = 1024  # in a bucket of more, compiling takes long: some of what torch does for each result is quadratic
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
    unsharded, reduced = Counter[str](), Counter[str]()  # bytes of each unit
    for all_gather in requests.all_gathers:
        unsharded[all_gather.param.unit] += all_gather.task.counted
    for reduction in requests.reductions:
        reduced[reduction.param.unit] += reduction.task.bytes
    two_largest = sum(size for units in (unsharded, reduced) for _, size in units.most_common(2))
    return max(LEAST_AUTO_BOUND, needed, two_largest)


# ---- filling ----


def _by_unit(requests: Sequence[Request]) -> tuple[Bucket[Request], ...]:
    return _pack(requests, lambda request: (request.key, request.param.unit), lambda _: inf)


def _filled(requests: Sequence[Request], cap: int, ramp: int = 0, apart: bool = True) -> tuple[Bucket[Request], ...]:
    """Fill buckets up to ``cap`` bytes; the first ``ramp`` of each key are smaller, each half of the next.

    If ``apart``, what is kept until backward shares no bucket with what is not; it would hold its memory until the
    last member has been read.
    """
    return _pack(
        requests,
        lambda request: (request.key, apart and _is_kept(request.task)),
        lambda count: cap >> max(ramp - count, 0),
        MOST_PARAMS,
    )


def _filled_from_the_end(requests: Sequence[Request], cap: int, ramp: int) -> tuple[Bucket[Request], ...]:
    """Do the same from the last request backwards, so that the last buckets are the small ones."""
    return tuple(bucket[::-1] for bucket in reversed(_filled(requests[::-1], cap, ramp)))


def _is_kept(task: AllGatherTask | ReductionTask) -> bool:
    return isinstance(task, AllGatherTask) and task.kept_bytes > 0


@dataclass
class _Open(Generic[Request]):
    """A bucket that may still grow."""

    cap: float
    most: float
    size: int = 0
    ready: int = 0  # position at which all inputs exist
    needed: float = inf  # position by which the first result is needed
    requests: list[Request] = field(default_factory=list)

    def takes(self, request: Request) -> bool:
        task = request.task
        has_room = self.size + task.bytes <= self.cap and len(self.requests) < self.most
        return has_room and max(self.ready, task.ready) <= min(self.needed, task.needed)

    def add(self, request: Request) -> None:
        task = request.task
        self.size += task.bytes
        self.ready, self.needed = max(self.ready, task.ready), min(self.needed, task.needed)
        self.requests.append(request)


def _pack(
    requests: Sequence[Request],
    key_of: Callable[[Request], Hashable],
    cap_of: Callable[[int], float],
    most: float = inf,
) -> tuple[Bucket[Request], ...]:
    """Give each request to the newest bucket of its key, or to a new one, whose cap follows from its number."""
    opened: dict[Hashable, list[_Open[Request]]] = {}
    buckets: list[_Open[Request]] = []
    for request in requests:
        same_key = opened.setdefault(key_of(request), [])
        if not same_key or not same_key[-1].takes(request):
            same_key.append(_Open(cap_of(len(same_key)), most))
            buckets.append(same_key[-1])
        same_key[-1].add(request)
    return tuple(tuple(bucket.requests) for bucket in buckets)


# ---- the memory bound ----


def _cut_to_fit(requests: Requests, buckets: Buckets, bound: int) -> Buckets:
    """Halve the buckets that are alive wherever even the latest schedule exceeds the bound, until none does."""
    while True:
        load = load_of(requests, buckets)
        crowded = [p for p, size in enumerate(least_bytes(load)) if size > bound]
        if not crowded:
            return buckets
        cut = Buckets(
            _halved(buckets.all_gathers, [(g.first, g.last) for g in load.all_gathers], crowded),
            _halved(buckets.reductions, [(r.made, r.ready - 1) for r in load.reductions], crowded),
        )
        if cut.count == buckets.count:
            raise ValueError(_too_little(requests, load, bound))
        buckets = cut


def _halved(
    buckets: Sequence[Bucket[Request]], alive: Sequence[tuple[int, int]], crowded: Sequence[int]
) -> tuple[Bucket[Request], ...]:
    pieces: list[Bucket[Request]] = []
    for bucket, (first, last) in zip(buckets, alive, strict=True):
        is_crowded = bisect_left(crowded, first) < bisect_right(crowded, last)
        half = len(bucket) // 2 if is_crowded else 0
        pieces += [piece for piece in (bucket[:half], bucket[half:]) if piece]
    return tuple(pieces)


def _too_little(requests: Requests, load: Load, bound: int) -> str:
    in_use = least_bytes(load)
    at = in_use.index(max(in_use))
    alive = [(r.task.counted, r.param.name) for r in requests.all_gathers if r.task.first <= at <= r.task.last]
    grads = [r for r in requests.reductions if r.task.made <= at < r.task.ready]
    alive += [(r.task.bytes, f"gradient of {r.param.name}") for r in grads]
    names = ", ".join(f"{name} ({size} bytes)" for size, name in sorted(alive, reverse=True) if size)
    return (
        f"SchedulePolicy.in_flight_bytes: expected at least {in_use[at]} for this graph, got {bound}; "
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
    caps = {min(bound, total // parts + largest) for parts in range(1, _PARTS + 1)}
    caps |= {bound >> halvings for halvings in range(_HALVINGS + 1)}
    # by the caps of the first buckets and the later ones; one above the total is as good as the total
    sizes = {
        tuple(min(cap >> k, total) for k in range(ramp + 1)): (cap, ramp) for cap in sorted(caps) for ramp in _RAMPS
    }
    found: list[tuple[Bucket[Request], ...]] = [_by_unit(requests)]
    found += [fill(requests, cap, ramp) for cap, ramp in sizes.values()]
    if any(_is_kept(request.task) for request in requests):
        found += [fill(requests, cap, apart=False) for cap in sorted({min(cap, total) for cap in caps})]
    return list({tuple(tuple(r.index for r in bucket) for bucket in each): each for each in found}.values())


def _best(requests: Requests, candidates: Sequence[Buckets], bound: int, prefetch: int | None) -> Buckets:
    scored = []
    for buckets in (_cut_to_fit(requests, buckets, bound) for buckets in candidates):
        load = load_of(requests, buckets)
        actions = decide(load, bound, prefetch)
        peak = max(bytes_in_flight(load, actions))
        scored.append((simulate(load, actions).total_us, buckets.count, peak, buckets))
    soon = min(total for total, *_ in scored) * _AS_GOOD
    return min((s for s in scored if s[0] <= soon), key=lambda s: s[1:3] + s[:1])[3]
