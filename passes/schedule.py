"""Decides when collectives start and end around a fixed sequence of compute, inside a hard bound on memory.

Everything here is arithmetic on plain records. Positions count compute nodes; "at position p" means before compute
node p runs, and the position after the last one is the end of the graph. It must not know graphs or parameters.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

Kind = Literal["gather", "reduction", "second"]


@dataclass(frozen=True)
class Gather:
    """An all-gather.

    Args:
        bytes: gathered.
        us: on the link.
        first: position of the first compute node that reads the result.
        last: position of the last one.
        earliest: position before which its input does not exist.
        kept_bytes: of ``bytes``, what stays unsharded until backward by the user's decision; no part of the bound.
        lane: name of the link.
        pack_us: compute time of the copy into the collective's input.
        unpack_us: of the copy out of its output.
    """

    bytes: int
    us: float
    first: int
    last: int
    earliest: int = 0
    kept_bytes: int = 0
    lane: str = ""
    pack_us: float = 0.0
    unpack_us: float = 0.0

    @property
    def counted(self) -> int:
        """Bytes in flight from launch to the last read."""
        return self.bytes - self.kept_bytes


@dataclass(frozen=True)
class Reduction:
    """A reduce-scatter, and perhaps an all-reduce of its result.

    Args:
        parts: for each gradient the position of the compute node that makes it, -1 for a graph input, and its
            bytes; they count from there until the reduction is waited for.
        us: of the reduce-scatter on its link.
        needed: position of the first compute node that reads the result.
        lane: name of the link.
        second_us: of the all-reduce; 0 for none.
        second_lane: name of its link.
        pack_us: compute time of the copy into the collective's input.
        host_us: of the result's way to the host, for whose sake it is waited for as soon as it is there; 0 for none.
    """

    parts: tuple[tuple[int, int], ...]
    us: float
    needed: int
    lane: str = ""
    second_us: float = 0.0
    second_lane: str = ""
    pack_us: float = 0.0
    host_us: float = 0.0

    @property
    def made(self) -> int:
        """Position from which on gradients exist."""
        return max(min(position for position, _ in self.parts), 0)

    @property
    def ready(self) -> int:
        """Position at which all gradients exist."""
        return max(position for position, _ in self.parts) + 1

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class Load:
    """One graph's work: compute in a fixed order, and the collectives to place in it.

    Args:
        compute_us: estimated time of each compute node.
        gathers: in any order.
        reductions: in any order.
        taken_from_compute: see :class:`Cluster`.
    """

    compute_us: tuple[float, ...]
    gathers: tuple[Gather, ...]
    reductions: tuple[Reduction, ...] = ()
    taken_from_compute: float = 0.0


@dataclass(frozen=True)
class Action:
    """The launch of a collective, or the wait for it, at a position."""

    position: int
    verb: Literal["launch", "wait"]
    kind: Kind
    index: int


@dataclass(frozen=True)
class Timed:
    """When a collective is launched and on its link, and how long compute stands still for it."""

    launched_us: float
    start_us: float
    end_us: float
    exposed_us: float


@dataclass(frozen=True)
class Timeline:
    """A schedule played through.

    Args:
        collectives: by (kind, index).
        compute: (position, start, end) of each run of compute between two actions.
        total_us: when the graph ends.
    """

    collectives: dict[tuple[Kind, int], Timed]
    compute: tuple[tuple[int, float, float], ...]
    total_us: float


# ---- memory ----


def least_bytes(load: Load) -> list[int]:
    """Return, for each position, the bytes in flight while it runs if everything is launched as late as possible
    and every reduction is waited for at once: what no schedule of these buckets can go below.
    """
    change = [0] * (len(load.compute_us) + 2)
    for gather in load.gathers:
        change[gather.first] += gather.counted
        change[gather.last + 1] -= gather.counted
    for reduction in load.reductions:
        for made, size in reduction.parts:
            change[max(made, 0)] += size
        change[reduction.ready] -= reduction.bytes
    return list(accumulate(change))[:-1]


def bytes_in_flight(load: Load, actions: Iterable[Action]) -> list[int]:
    """Return, for each position, the bytes in flight while it runs under a schedule."""
    change = [0] * (len(load.compute_us) + 2)
    for action in actions:
        if action.verb == "launch" and action.kind == "gather":
            change[action.position] += load.gathers[action.index].counted
            change[load.gathers[action.index].last + 1] -= load.gathers[action.index].counted
        elif action.verb == "wait" and action.kind == "reduction":
            change[action.position] -= load.reductions[action.index].bytes
    for reduction in load.reductions:
        for made, size in reduction.parts:
            change[max(made, 0)] += size
    return list(accumulate(change))[:-1]


# ---- the list schedule ----


def decide(load: Load, bound_bytes: int, prefetch: int | None = None) -> list[Action]:
    """Place every launch and wait.

    All-gathers are launched in the order of first use, each as early as ``prefetch`` and memory allow and waited
    for at first use. Reductions are launched when their gradients are there and waited for at the end, or
    earlier where their memory is needed or an all-reduce has to follow.

    Args:
        load: what to place.
        bound_bytes: on the bytes in flight at every position; at least ``max(least_bytes(load))``.
        prefetch: how many all-gathers may be launched before the first of them is needed; None: until they hide
            their time behind compute, at least one.

    Returns:
        The actions in order.
    """
    return _Sweep(load, bound_bytes, _launch_positions(load, bound_bytes, prefetch)).actions()


def _launch_positions(load: Load, bound_bytes: int, prefetch: int | None) -> dict[int, int]:
    """Return where each gather is launched, by index, in launch order."""
    clock = [0.0, *accumulate(load.compute_us)]
    used = _with_reductions_in_flight(load, clock)
    backlog = _link_backlog(load)
    order = sorted(range(len(load.gathers)), key=lambda i: (load.gathers[i].first, i))
    launches: dict[int, int] = {}
    floor = 0
    for rank, index in enumerate(order):
        gather = load.gathers[index]
        ahead = 1 if prefetch is None else prefetch
        floor = max(floor, min(gather.earliest, gather.first))
        target = gather.first if not ahead else load.gathers[order[rank - ahead]].first if rank >= ahead else 0
        position = gather.first
        while position > floor:
            beside = (gather.us + backlog[gather.first] - backlog[position]) * (1 - load.taken_from_compute)
            hides = clock[gather.first] - clock[position] >= beside
            if position <= target and (prefetch is not None or hides):
                break
            if used[position - 1] + gather.counted > bound_bytes:
                break
            position -= 1
            used[position] += gather.counted
        launches[index] = floor = position
    return launches


def _with_reductions_in_flight(load: Load, clock: Sequence[float]) -> list[int]:
    """Return :func:`least_bytes`, with each reduction's until it is done by itself."""
    end = len(load.compute_us)
    change = [0] * (end + 2)
    for reduction in load.reductions:
        busy_us = reduction.us * (1 - load.taken_from_compute)
        done = bisect_left(clock, clock[reduction.ready] + busy_us, reduction.ready, end)
        change[reduction.ready] += reduction.bytes
        change[done] -= reduction.bytes
    return [least + busy for least, busy in zip(least_bytes(load), accumulate(change), strict=False)]


def _link_backlog(load: Load) -> list[float]:
    """Return, for each position, the time of all reductions that are launched before it."""
    launched = [0.0] * (len(load.compute_us) + 2)
    for reduction in load.reductions:
        launched[reduction.ready + 1] += reduction.us
    return list(accumulate(launched))


@dataclass
class _Sweep:
    """One walk over the positions, which knows what is in flight."""

    load: Load
    bound_bytes: int
    launches: dict[int, int]
    done: list[Action] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)  # reductions launched and not waited for
    second: dict[int, int] = field(default_factory=dict)  # all-reduces launched, where, and not waited for
    in_flight: int = 0

    def actions(self) -> list[Action]:
        load, end = self.load, len(self.load.compute_us)
        clock = [0.0, *accumulate(load.compute_us)]
        launched_at = _by_position(self.launches.items())
        used_at = _by_position((i, g.first) for i, g in enumerate(load.gathers))
        freed_at = _by_position((i, g.last + 1) for i, g in enumerate(load.gathers))
        ready_at = _by_position((i, r.ready) for i, r in enumerate(load.reductions))
        needed_at = _by_position((i, r.needed) for i, r in enumerate(load.reductions))
        made_at = _by_position((size, made) for r in load.reductions for made, size in r.parts)
        self.in_flight = sum(made_at.pop(-1, ()))
        events = {*launched_at, *used_at, *freed_at, *ready_at, *needed_at, *made_at, end}
        for position in sorted(event for event in events if event <= end):
            self.in_flight -= sum(load.gathers[i].counted for i in freed_at.get(position, ()))
            ready = deque(ready_at.get(position, ()))
            for index in launched_at.get(position, ()):
                self._make_room(position, load.gathers[index].counted, ready)
                self._act(position, "launch", "gather", index)
                self.in_flight += load.gathers[index].counted
            self._start(position, ready)
            self._follow_up(position, clock)
            for index in needed_at.get(position, ()) if position < end else ():
                self._finish(position, index)
            made = sum(made_at.get(position, ()))
            self._make_room(position, made, ready)
            self.in_flight += made
            for index in used_at.get(position, ()):
                self._act(position, "wait", "gather", index)
        while self.pending:
            self._wait(end, self.pending[0])
        for index in list(self.second):
            self._finish(end, index)
        return self.done

    def _act(self, position: int, verb: Literal["launch", "wait"], kind: Kind, index: int) -> None:
        self.done.append(Action(position, verb, kind, index))

    def _start(self, position: int, ready: deque[int]) -> None:
        while ready:
            self.pending.append(ready.popleft())
            self._act(position, "launch", "reduction", self.pending[-1])

    def _make_room(self, position: int, size: int, ready: deque[int]) -> None:
        while self.in_flight + size > self.bound_bytes and (self.pending or ready):
            if not self.pending:
                self._start(position, ready)
            self._wait(position, self.pending[0])

    def _follow_up(self, position: int, clock: Sequence[float]) -> None:
        """Go on with the results of reductions that must be done by now: all-reduces, and moves."""
        alone = 1 - self.load.taken_from_compute
        for index in list(self.pending):
            reduction = self.load.reductions[index]
            if not (reduction.second_us or reduction.host_us):
                break
            if clock[position] - clock[reduction.ready] < reduction.us * alone:
                break
            self._wait(position, index)
        for index, launched in list(self.second.items()):
            reduction = self.load.reductions[index]
            if reduction.host_us and clock[position] - clock[launched] >= reduction.second_us * alone:
                self._finish(position, index)

    def _wait(self, position: int, index: int) -> None:
        self.pending.remove(index)
        self._act(position, "wait", "reduction", index)
        self.in_flight -= self.load.reductions[index].bytes
        if self.load.reductions[index].second_us:
            self._act(position, "launch", "second", index)
            self.second[index] = position

    def _finish(self, position: int, index: int) -> None:
        if index in self.pending:
            self._wait(position, index)
        if index in self.second:
            del self.second[index]
            self._act(position, "wait", "second", index)


def _by_position(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for item, position in pairs:
        found.setdefault(position, []).append(item)
    return found


# ---- playing a schedule through ----


def play(load: Load, actions: Sequence[Action]) -> Timeline:
    """Return when everything happens: on one compute lane, one for each link and one to the host.

    The host waits last for what moves to it, and so does the collective that was the last to move.
    """
    now = host_free = 0.0
    last_moved: tuple[Kind, int] | None = None
    free: dict[str, float] = {}
    timed: dict[tuple[Kind, int], Timed] = {}
    spans = []
    clock = [0.0, *accumulate(load.compute_us)]
    at = 0
    for action in [*actions, None]:
        position = action.position if action else len(load.compute_us)
        if position > at:
            length = clock[position] - clock[at]
            spans.append((at, now, now + length))
            now, at = now + length, position
        if action is None:
            break
        key = (action.kind, action.index)
        leg = _leg_of(load, action)
        if action.verb == "launch":
            now += leg.pack_us
            start = max(now, free.get(leg.lane, 0.0))
            free[leg.lane] = start + leg.us
            taken = leg.us * load.taken_from_compute
            timed[key] = Timed(now, start, start + leg.us, taken)
            now += taken
        else:
            stall = max(0.0, timed[key].end_us - now)
            timed[key] = replace(timed[key], exposed_us=timed[key].exposed_us + stall)
            now += stall + leg.unpack_us
            if leg.host_us:
                host_free, last_moved = max(now, host_free) + leg.host_us, key
    if last_moved is not None and host_free > now:
        timed[last_moved] = replace(timed[last_moved], exposed_us=timed[last_moved].exposed_us + host_free - now)
        now = host_free
    return Timeline(timed, tuple(spans), now)


class _Leg(NamedTuple):
    """One collective's times, and the link that it runs over."""

    us: float
    lane: str
    pack_us: float = 0.0
    unpack_us: float = 0.0
    host_us: float = 0.0


def _leg_of(load: Load, action: Action) -> _Leg:
    if action.kind == "gather":
        gather = load.gathers[action.index]
        return _Leg(gather.us, gather.lane, gather.pack_us, gather.unpack_us)
    reduction = load.reductions[action.index]
    if action.kind == "second":
        return _Leg(reduction.second_us, reduction.second_lane, host_us=reduction.host_us)
    host_us = 0.0 if reduction.second_us else reduction.host_us
    return _Leg(reduction.us, reduction.lane, reduction.pack_us, host_us=host_us)


# ---- fewer positions ----


def compress(load: Load) -> tuple[Load, list[int]]:
    """Return the same load with one position for each run of compute that nothing begins or ends in.

    Returns:
        The smaller load, and for each of its positions, the end included, the position in ``load``.
    """
    marks = {0, len(load.compute_us)}
    for gather in load.gathers:
        marks |= {gather.earliest, gather.first, gather.last + 1}
    for reduction in load.reductions:
        marks |= {reduction.needed, *(p for made, _ in reduction.parts for p in (made, made + 1))}
    positions = sorted(mark for mark in marks if 0 <= mark <= len(load.compute_us))
    clock = [0.0, *accumulate(load.compute_us)]
    place = {position: index for index, position in enumerate(positions)}

    def within(position: int) -> int:
        return bisect_right(positions, position) - 1

    gathers = tuple(
        replace(g, first=place[g.first], last=within(g.last), earliest=place[g.earliest]) for g in load.gathers
    )
    reductions = tuple(
        replace(r, parts=tuple((within(made), size) for made, size in r.parts), needed=place[r.needed])
        for r in load.reductions
    )
    compute = tuple(clock[b] - clock[a] for a, b in pairwise(positions))
    return replace(load, compute_us=compute, gathers=gathers, reductions=reductions), positions
