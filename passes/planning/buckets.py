"""Decides which requests share a collective, and with that the schedule.

Candidates of many sizes are scheduled and simulated, with as much compute as estimated and with less. The one that
loses least, compared with the best for each amount, is what is emitted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from math import inf
from operator import truediv

from ..kinds import Kind, Request
from ..schedule_policy import MIB, SchedulePolicy
from .placing import place
from .tasks import Action, Load, Members, Plan, Requests, Task, bytes_in_flight, least_bytes, simulate

LEAST_AUTO_BOUND = 64 * MIB  # below it, launches cost more than memory
MOST_PARAMS = 1024  # in a bucket of more, compiling takes long: some of what torch does for each result is quadratic
# What a further collective must save. To launch it and to wait for it takes the host longer (about 0.5 ms in the
# virtual machine of an H100, simulated ranks), which counts where the GPU has caught up with the host.
_HOST_US = 10.0
_AS_GOOD = 1.002  # among schedules whose estimates differ by less, the one with the fewest collectives wins
# How long compute may take instead of its estimate: batches hold fewer tokens than the nominal number, and what hides
# behind compute does not hide behind less. A schedule that is good with less is good with more, seldom the reverse.
_LESS_COMPUTE = (1.0, 0.5, 0.25, 0.125)
_PLACED = 1  # of these, the one by which collectives are placed
_HALVINGS = 8  # of the bound: the sizes that are tried
_PARTS = 6  # and all bytes in up to so many equal parts
_RAMPS = (0, 2, 4)  # how many buckets, from the one that nothing can hide, are each half of the next

Buckets = tuple[Members, ...]


def decide(requests: Requests, policy: SchedulePolicy) -> Plan:
    """Return the schedule that ``policy`` asks for, its buckets cut where the memory bound has no room for them.

    Raises:
        ValueError: ``policy.in_flight_bytes`` is less than what some node of the graph needs at once.
    """
    if not requests.each:
        return Plan((), requests.load(()), (), 0)
    small, positions = requests.compressed()
    auto, prefetch = policy.in_flight_bytes == "auto", None if policy.prefetch == "auto" else policy.prefetch
    search = _Search(small, auto_bound(small) if auto else policy.in_flight_bytes, prefetch)  # type: ignore[arg-type]
    match policy.bucket:
        case "auto":
            found = search.best()
        case "unit":
            found = search.scored(_by_unit(small.each))
        case cap:
            found = search.scored(_filled(small.each, 0 if cap == "none" else cap))
    original = {request.index: request for request in requests.each}
    buckets = tuple(tuple(original[request.index] for request in bucket) for bucket in found.buckets)
    actions = tuple(replace(action, position=positions[action.position]) for action in found.actions)
    return Plan(buckets, requests.load(buckets), actions, search.bound_bytes)


def auto_bound(requests: Requests) -> int:
    """Return the bound that ``in_flight_bytes="auto"`` stands for, see :class:`SchedulePolicy`."""
    needed = max(least_bytes(requests.load((request,) for request in requests.each)))
    units: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # bytes of each unit, ahead of use or not
    for request in requests.each:
        units[request.kind.is_ahead][request.param.unit] += request.bytes - request.kept_bytes
    two_largest = sum(size for of_units in units.values() for _, size in of_units.most_common(2))
    return max(LEAST_AUTO_BOUND, needed, two_largest)


def _by_unit(requests: Sequence[Request]) -> Buckets:
    return _fill(requests, lambda request: (request.key, request.param.unit), lambda _: inf)


def _filled(requests: Sequence[Request], cap: int, ramp: int = 0, apart: bool = True) -> Buckets:
    """Fill buckets up to ``cap`` bytes; the first ``ramp`` of each key are smaller, each half of the next.

    If ``apart``, what is kept until backward shares no bucket with what is not; it would hold its memory until the
    last member has been read.
    """

    def key(request: Request) -> Hashable:
        return request.key, apart and request.kept_bytes > 0

    return _fill(requests, key, lambda count: cap >> max(ramp - count, 0))


def _filled_from_the_end(requests: Sequence[Request], cap: int, ramp: int = 0, apart: bool = True) -> Buckets:
    """Do the same backwards, so that the last buckets are the small ones."""
    return tuple(bucket[::-1] for bucket in reversed(_filled(requests[::-1], cap, ramp, apart)))


@dataclass
class _Open:
    """A bucket that may still grow."""

    cap: float  # without one, as in a unit, there may also be any number of parameters
    size: int = 0
    ready: int = 0  # position at which all inputs exist
    needed: float = inf  # position by which the first result is needed
    requests: list[Request] = field(default_factory=list)

    def takes(self, request: Request, size: int) -> bool:
        size = size if request.bytes < size <= self.cap else request.bytes
        has_room = self.size + size <= self.cap and len(self.requests) < MOST_PARAMS
        return (has_room or self.cap == inf) and max(self.ready, request.ready) <= min(self.needed, request.needed)

    def add(self, request: Request) -> None:
        self.size += request.bytes
        self.ready, self.needed = max(self.ready, request.ready), min(self.needed, request.needed)
        self.requests.append(request)


def _fill(
    requests: Sequence[Request], key_of: Callable[[Request], Hashable], cap_of: Callable[[int], float]
) -> Buckets:
    """Give each request to the newest bucket of its key, or to a new one, whose cap follows from its number.

    What one node needs or makes together, as the call of a region does, shares a bucket if a bucket has room for it.
    """
    opened: dict[Hashable, list[_Open]] = {}
    buckets: list[_Open] = []
    together = Counter[Hashable]()
    for request in requests:
        together[key_of(request), request.ready, request.needed] += request.bytes
    for request in requests:
        key = key_of(request)
        same_key = opened.setdefault(key, [])
        size = together.pop((key, request.ready, request.needed), 0)  # of all, where this is the first of them
        if not same_key or not same_key[-1].takes(request, size):
            same_key.append(_Open(cap_of(len(same_key))))
            buckets.append(same_key[-1])
        same_key[-1].add(request)
    return tuple(tuple(bucket.requests) for bucket in buckets)


@dataclass(frozen=True)
class _Scored:
    """Buckets that fit, their schedule, and what counts in the choice."""

    buckets: Buckets
    actions: list[Action]
    totals_us: tuple[float, ...]  # with each of _LESS_COMPUTE
    peak_bytes: int


@dataclass(frozen=True)
class _Search:
    requests: Requests
    bound_bytes: int
    prefetch: int | None

    def best(self) -> _Scored:
        """Try many sizes for one kind after the other, and return what is good with any amount of compute."""
        kinds = defaultdict[Kind, list[Request]](list)
        for request in self.requests.each:
            kinds[request.kind].append(request)
        best: dict[Kind, Buckets] = {kind: _filled(each, self.bound_bytes) for kind, each in kinds.items()}
        scored: list[_Scored] = []
        for kind in [*kinds] * min(2, len(kinds)):  # again after the others, which it was not chosen for
            tried = [best | {kind: buckets} for buckets in self._candidates(kind, kinds[kind])]
            scored = [_best([*(self.scored(tuple(chain(*buckets.values()))) for buckets in tried), *scored])]
            best = {other: tuple(b for b in scored[0].buckets if b[0].kind is other) for other in kinds}
        return scored[0]

    def scored(self, buckets: Buckets) -> _Scored:
        """Return ``buckets``, cut to fit, with their schedule."""
        buckets, load = self._cut_to_fit(buckets)
        loads = [replace(load, compute_us=compute_us) for compute_us in self._compute_us]
        actions = place(loads[_PLACED], self.bound_bytes, self.prefetch)
        totals_us = tuple(simulate(each, actions).total_us for each in loads)
        return _Scored(buckets, actions, totals_us, max(bytes_in_flight(load, actions)))

    @cached_property
    def _compute_us(self) -> list[tuple[float, ...]]:
        return [tuple(part * us for us in self.requests.compute_us) for part in _LESS_COMPUTE]

    def _candidates(self, kind: Kind, requests: Sequence[Request]) -> list[Buckets]:
        bound, fill = self.bound_bytes, _filled if kind.is_ahead else _filled_from_the_end
        total, largest = sum(request.bytes for request in requests), max(request.bytes for request in requests)
        caps = {min(bound, total // parts + largest) for parts in range(1, _PARTS + 1)}
        caps |= {bound >> halvings for halvings in range(_HALVINGS + 1)}
        # by the caps of the first buckets and the later ones; one above the total is as good as the total
        pairs = product(sorted(caps), _RAMPS)
        sizes = {tuple(min(cap >> k, total) for k in range(ramp + 1)): (cap, ramp) for cap, ramp in pairs}
        found = [_by_unit(requests), *(fill(requests, cap, ramp) for cap, ramp in sizes.values())]
        if any(request.kept_bytes for request in requests):
            found += [fill(requests, cap, apart=False) for cap in sorted({min(cap, total) for cap in caps})]
        return list(dict.fromkeys(found))

    def _cut_to_fit(self, buckets: Buckets) -> tuple[Buckets, Load]:
        """Halve the buckets that are alive wherever even the latest schedule exceeds the bound, until none does."""
        while True:
            load = self.requests.load(buckets)
            crowded = [p for p, size in enumerate(least_bytes(load)) if size > self.bound_bytes]
            if not crowded:
                return buckets, load
            each = zip(buckets, load.tasks, strict=True)
            cut = tuple(chain.from_iterable(_halved(bucket, task, crowded) for bucket, task in each))
            if len(cut) == len(buckets):
                raise ValueError(_too_little(self.requests, load, self.bound_bytes))
            buckets = cut


def _best(scored: Sequence[_Scored]) -> _Scored:
    """Return the one that, compared with the best for each amount of compute, loses least where it loses most."""
    totals = [[us + _HOST_US * len(each.buckets) for us in each.totals_us] for each in scored]
    least = list(map(min, zip(*totals, strict=True)))
    lost = [max(map(truediv, each, least)) for each in totals]
    accepted = min(lost) * _AS_GOOD
    good = (each for each, loss in zip(scored, lost, strict=True) if loss <= accepted)
    return min(good, key=lambda each: (len(each.buckets), each.peak_bytes, each.totals_us))


def _halved(bucket: Members, task: Task, crowded: Sequence[int]) -> Buckets:
    if task.is_ahead:  # even the latest schedule holds the memory from the first of these positions to the last
        first, last = task.needed, task.last
    else:
        first, last = max(min(made for made, _ in task.inputs), 0), task.ready - 1
    half = len(bucket) // 2 if bisect_left(crowded, first) < bisect_right(crowded, last) else 0
    return tuple(piece for piece in (bucket[:half], bucket[half:]) if piece)


def _too_little(requests: Requests, load: Load, bound: int) -> str:
    in_use = least_bytes(load)
    at, alive = in_use.index(max(in_use)), []
    for r in requests.each:
        if r.made is None and r.needed <= at <= r.last:
            alive.append((r.bytes - r.kept_bytes, r.param.name))
        elif r.made is not None and max(r.made, 0) <= at < r.ready:
            alive.append((r.bytes, f"gradient of {r.param.name}"))
    names = ", ".join(f"{name} ({size} bytes)" for size, name in sorted(alive, reverse=True) if size)
    return (
        f"SchedulePolicy.in_flight_bytes: expected at least {in_use[at]} for this graph, got {bound}; "
        f"one place needs at once: {names}. Allow that many bytes, or use 'auto'"
    )
