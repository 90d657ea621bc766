"""Which gathers, and which reductions, share a collective: the decision, on plain records.

Candidates of many sizes are scheduled and played through on paper; the one that ends first wins. It must not know
graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch

from . import schedule
from .cost import PLAIN_GATHER, Cluster, GatherKind, Link, goes_into_place
from .policy import MIB, SchedulePolicy
from .schedule import Gather, Load, Reduction

LEAST_AUTO_BOUND = 64 * MIB  # below it, launches cost more than memory
_AS_GOOD = 1.002  # among schedules whose estimates differ by less, the one with the fewest collectives wins
_HALVINGS = 8  # of the bound: the sizes that are tried
_PARTS = 6  # and the whole cut in up to so many equal parts
_RAMPS = (0, 2, 4)  # how many buckets, from the one that nothing can hide, are each half of the next

Record = TypeVar("Record", Gather, Reduction)


@dataclass(frozen=True)
class Wire:
    """What a collective runs over: a shard group's link, and for reductions perhaps the replicas' link.

    Args:
        device: type of the device of compute.
        kind: of gathers; ``in_place`` says that they may be.
        moves_to_host: of reductions.
    """

    link: Link
    world: int
    lane: str = ""
    second: Link | None = None
    second_world: int = 1
    second_lane: str = ""
    device: str = "cpu"
    kind: GatherKind = PLAIN_GATHER
    moves_to_host: bool = False


@dataclass(frozen=True)
class Member(Generic[Record]):
    """One parameter's gather or one gradient's reduction.

    Args:
        index: tells members apart.
        name: the parameter's full name.
        key: members with equal keys may share a collective.
        unit: name of the parameter's unit.
        wire: what it travels over.
        alone: its record; the times on the link are filled in for the bucket.
        dim: along which the parameter is sharded.
        is_row: whether its gradient needs no copy if it travels alone.
    """

    index: int
    name: str
    key: Hashable
    unit: str
    wire: Wire
    alone: Record
    dim: int = 0
    is_row: bool = True


Bucket = tuple[Member[Record], ...]


@dataclass(frozen=True)
class Work:
    """A graph's compute and what is to be bucketed: gathers by first read, reductions by when they are ready."""

    compute_us: tuple[float, ...]
    gathers: tuple[Member[Gather], ...]
    reductions: tuple[Member[Reduction], ...]
    cluster: Cluster


@dataclass(frozen=True)
class Plan:
    """Buckets of both kinds, and the memory bound that they fit in."""

    gathers: tuple[Bucket[Gather], ...]
    reductions: tuple[Bucket[Reduction], ...]
    bound_bytes: int


def decide_buckets(work: Work, policy: SchedulePolicy) -> Plan:
    """Return the buckets that ``policy`` asks for, cut where the memory bound has no room for them.

    Raises:
        ValueError: ``policy.in_flight_bytes`` is less than what some node of the graph needs at once.
    """
    work = _compressed(work)
    bound = auto_bound(work) if policy.in_flight_bytes == "auto" else policy.in_flight_bytes
    if policy.bucket == "auto":
        return _shortest(work, bound, None if policy.prefetch == "auto" else policy.prefetch)
    if policy.bucket == "unit":
        plan = Plan(_by_unit(work.gathers), _by_unit(work.reductions), bound)
    else:
        cap = 0 if policy.bucket == "none" else policy.bucket
        plan = Plan(_filled(work.gathers, cap), _filled(work.reductions, cap), bound)
    return _cut_to_fit(work, plan)


def auto_bound(work: Work) -> int:
    """Return the bound that ``in_flight_bytes="auto"`` stands for, see :class:`SchedulePolicy`."""
    alone = Plan(tuple((m,) for m in work.gathers), tuple((m,) for m in work.reductions), 0)
    needed = max(schedule.least_bytes(load_of(work, alone)))
    gathered = _two_largest_units((m.unit, m.alone.counted) for m in work.gathers)
    reduced = _two_largest_units((m.unit, m.alone.bytes) for m in work.reductions)
    return max(LEAST_AUTO_BOUND, needed, gathered + reduced)


def _two_largest_units(sizes: Iterable[tuple[str, int]]) -> int:
    total: dict[str, int] = {}
    for unit, size in sizes:
        total[unit] = total.get(unit, 0) + size
    return sum(sorted(total.values())[-2:])


def _compressed(work: Work) -> Work:
    """Return the same work with no more positions than it needs."""
    alone = Load(work.compute_us, tuple(m.alone for m in work.gathers), tuple(m.alone for m in work.reductions))
    small, _ = schedule.compress(alone)
    return replace(
        work,
        compute_us=small.compute_us,
        gathers=tuple(replace(m, alone=r) for m, r in zip(work.gathers, small.gathers, strict=True)),
        reductions=tuple(replace(m, alone=r) for m, r in zip(work.reductions, small.reductions, strict=True)),
    )


# ---- what a bucket costs ----


def load_of(work: Work, plan: Plan) -> Load:
    """Return the load that a plan makes of the work."""
    return Load(
        work.compute_us,
        tuple(_joined_gather(bucket, work.cluster) for bucket in plan.gathers),
        tuple(_joined_reduction(bucket, work.cluster) for bucket in plan.reductions),
        work.cluster.taken_from_compute,
    )


def _joined_gather(bucket: Bucket[Gather], cluster: Cluster) -> Gather:
    records, wire = [member.alone for member in bucket], bucket[0].wire
    sizes = [record.bytes for record in records]
    in_place = wire.kind.in_place and goes_into_place(
        torch.device(wire.device), [member.dim for member in bucket], sizes
    )
    kind = replace(wire.kind, in_place=in_place, lasting=all(member.wire.kind.lasting for member in bucket))
    times = cluster.gather_times(sizes, wire.link, wire.world, kind)
    return Gather(
        bytes=sum(sizes),
        us=times.us,
        first=min(record.first for record in records),
        last=max(record.last for record in records),
        earliest=max(record.earliest for record in records),
        kept_bytes=sum(record.kept_bytes for record in records),
        lane=wire.lane,
        pack_us=times.pack_us,
        unpack_us=times.unpack_us,
    )


def _joined_reduction(bucket: Bucket[Reduction], cluster: Cluster) -> Reduction:
    records, wire = [member.alone for member in bucket], bucket[0].wire
    parts = tuple(part for record in records for part in record.parts)
    size = sum(part_bytes for _, part_bytes in parts)
    second = wire.second.collective_us(size // wire.world, wire.second_world, reduces=True) if wire.second else 0.0
    first = wire.link.collective_us(size, wire.world, reduces=True)
    only_second = wire.world == 1
    return Reduction(
        parts=parts,
        us=second if only_second else first,
        needed=min(record.needed for record in records),
        lane=wire.second_lane if only_second else wire.lane,
        second_us=0.0 if only_second else second,
        second_lane=wire.second_lane,
        pack_us=cluster.packing_us(size) if len(bucket) > 1 or not bucket[0].is_row else 0.0,
        host_us=cluster.host_us(size // wire.world) if wire.moves_to_host else 0.0,
    )


# ---- filling ----


def _by_unit(members: Sequence[Member[Record]]) -> tuple[Bucket[Record], ...]:
    return _pack(members, lambda member: (member.key, member.unit), lambda _: None)


def _filled(
    members: Sequence[Member[Record]], cap: int, ramp: int = 0, apart: bool = True
) -> tuple[Bucket[Record], ...]:
    """Fill buckets up to ``cap`` bytes; the first ``ramp`` of each key are smaller, each half of the next.

    If ``apart``, what is kept until backward shares no bucket with what is not; that would hold its memory until the
    whole bucket has been read.
    """
    return _pack(
        members,
        lambda member: (member.key, apart and _is_kept(member.alone)),
        lambda count: cap >> max(ramp - count, 0),
    )


def _filled_from_the_end(members: Sequence[Member[Record]], cap: int, ramp: int) -> tuple[Bucket[Record], ...]:
    """Do the same from the last member backwards, so that the last buckets are the small ones."""
    return tuple(bucket[::-1] for bucket in reversed(_filled(members[::-1], cap, ramp)))


@dataclass
class _Open(Generic[Record]):
    """A bucket that may still grow."""

    cap: int | None
    size: int = 0
    exists: int = 0  # position at which all inputs exist
    needed: int | None = None  # position by which the first result is needed
    members: list[Member[Record]] = field(default_factory=list)

    def takes(self, member: Member[Record]) -> bool:
        if self.cap is not None and self.size + member.alone.bytes > self.cap:
            return False
        return max(self.exists, _exists(member.alone)) <= self._needed_with(member)

    def add(self, member: Member[Record]) -> None:
        self.size += member.alone.bytes
        self.exists, self.needed = max(self.exists, _exists(member.alone)), self._needed_with(member)
        self.members.append(member)

    def _needed_with(self, member: Member[Record]) -> int:
        mine = _needed(member.alone)
        return mine if self.needed is None else min(self.needed, mine)


def _exists(record: Gather | Reduction) -> int:
    return record.earliest if isinstance(record, Gather) else record.ready


def _is_kept(record: Gather | Reduction) -> bool:
    return isinstance(record, Gather) and record.kept_bytes > 0


def _needed(record: Gather | Reduction) -> int:
    return record.first if isinstance(record, Gather) else record.needed


def _pack(
    members: Sequence[Member[Record]],
    key_of: Callable[[Member[Record]], Hashable],
    cap_of: Callable[[int], int | None],
) -> tuple[Bucket[Record], ...]:
    buckets: list[_Open[Record]] = []
    newest: dict[Hashable, _Open[Record]] = {}
    opened: dict[Hashable, int] = {}
    for member in members:
        key = key_of(member)
        bucket = newest.get(key)
        if bucket is None or not bucket.takes(member):
            count = opened[key] = opened.get(key, -1) + 1
            bucket = newest[key] = _Open(cap_of(count))
            buckets.append(bucket)
        bucket.add(member)
    return tuple(tuple(bucket.members) for bucket in buckets)


# ---- the memory bound ----


def _cut_to_fit(work: Work, plan: Plan) -> Plan:
    """Halve the buckets that are alive wherever even the laziest schedule exceeds the bound, until none does."""
    while True:
        load = load_of(work, plan)
        crowded = [p for p, size in enumerate(schedule.least_bytes(load)) if size > plan.bound_bytes]
        if not crowded:
            return plan
        gathers = _halved(plan.gathers, [(g.first, g.last) for g in load.gathers], crowded)
        reductions = _halved(plan.reductions, [(r.made, r.ready - 1) for r in load.reductions], crowded)
        if len(gathers) + len(reductions) == len(plan.gathers) + len(plan.reductions):
            raise ValueError(_too_little(work, plan, load))
        plan = replace(plan, gathers=gathers, reductions=reductions)


def _halved(
    buckets: Sequence[Bucket[Record]], alive: Sequence[tuple[int, int]], crowded: Sequence[int]
) -> tuple[Bucket[Record], ...]:
    def pieces() -> Iterator[Bucket[Record]]:
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


def _too_little(work: Work, plan: Plan, load: Load) -> str:
    in_use = schedule.least_bytes(load)
    worst = max(range(len(in_use)), key=in_use.__getitem__)
    alive = [(m.alone.counted, m.name) for m in work.gathers if m.alone.first <= worst <= m.alone.last]
    alive += [
        (m.alone.bytes, f"gradient of {m.name}") for m in work.reductions if m.alone.made <= worst < m.alone.ready
    ]
    names = ", ".join(f"{name} ({size} bytes)" for size, name in sorted(alive, reverse=True) if size)
    return (
        f"SchedulePolicy.in_flight_bytes: expected at least {in_use[worst]} for this graph, got {plan.bound_bytes}; "
        f"one place needs at once: {names}. Allow that many bytes, or use 'auto'"
    )


# ---- the shortest of many ----


def _shortest(work: Work, bound: int, prefetch: int | None) -> Plan:
    """Try many sizes for gathers, then for reductions, and return the plan that ends first on paper."""
    start = Plan(_filled(work.gathers, bound), _filled(work.reductions, bound), bound)
    by_gathers = [replace(start, gathers=buckets) for buckets in _candidates(work.gathers, bound, _filled)]
    best = _best(work, by_gathers, prefetch)
    ends = _candidates(work.reductions, bound, _filled_from_the_end)
    return _best(work, [best, *(replace(best, reductions=buckets) for buckets in ends)], prefetch)


def _candidates(
    members: Sequence[Member[Record]], bound: int, fill: Callable[..., tuple[Bucket[Record], ...]]
) -> list[tuple[Bucket[Record], ...]]:
    """Return ways to bucket ``members``, each once."""
    total = sum(member.alone.bytes for member in members)
    largest = max((member.alone.bytes for member in members), default=0)
    caps: set[int] = {min(bound, total // parts + largest) for parts in range(1, _PARTS + 1)}
    caps |= {bound >> halvings for halvings in range(_HALVINGS + 1)}
    ways: list[tuple[Bucket[Record], ...]] = [_by_unit(members)]
    ways += [fill(members, cap, ramp) for cap in sorted(caps) for ramp in _RAMPS]
    if any(_is_kept(member.alone) for member in members):
        ways += [fill(members, cap, apart=False) for cap in sorted(caps)]
    return list({tuple(tuple(m.index for m in bucket) for bucket in way): way for way in ways}.values())


def _best(work: Work, plans: Sequence[Plan], prefetch: int | None) -> Plan:
    scored = []
    for plan in (_cut_to_fit(work, plan) for plan in plans):
        load = load_of(work, plan)
        actions = schedule.decide(load, plan.bound_bytes, prefetch)
        peak = max(schedule.bytes_in_flight(load, actions))
        count = len(plan.gathers) + len(plan.reductions)
        scored.append((schedule.play(load, actions).total_us, count, peak, plan))
    soon = min(total for total, *_ in scored) * _AS_GOOD
    return min((s for s in scored if s[0] <= soon), key=lambda s: s[1:3] + s[:1])[3]
