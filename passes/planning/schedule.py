"""Decides when collectives start and end around a fixed sequence of compute, inside a hard bound on memory.

A list schedule on :mod:`tasks`; see there for positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from .tasks import Action, Kind, Load, bytes_between


def decide(load: Load, bound_bytes: int, prefetch: int | None = None) -> list[Action]:
    """Return every launch and wait in order.

    All-gathers are launched in the order of first use, each as early as ``prefetch`` and memory allow and waited
    for at first use. Reductions are launched when their gradients are there and waited for at the end, or
    earlier where their memory is needed or an all-reduce has to follow.

    Args:
        load: what to place.
        bound_bytes: on the bytes in flight at every position; at least ``max(least_bytes(load))``.
        prefetch: how many all-gathers may be launched before the first of them is needed; None: until they hide
            their time behind compute, at least one.
    """
    return _Sweep(load, bound_bytes, _launch_positions(load, bound_bytes, prefetch)).actions()


def _launch_positions(load: Load, bound_bytes: int, prefetch: int | None) -> dict[int, int]:
    """Return where each all-gather is launched, by index, in launch order."""
    clock, backlog, used = load.clock, _link_backlog(load), _with_reductions_in_flight(load)
    order = sorted(range(len(load.all_gathers)), key=lambda i: load.all_gathers[i].first)
    ahead = 1 if prefetch is None else prefetch
    launches, floor = dict[int, int](), 0
    for rank, index in enumerate(order):
        all_gather = load.all_gathers[index]
        floor = max(floor, min(all_gather.earliest, all_gather.first))
        target = load.all_gathers[order[rank - ahead]].first if rank >= ahead else 0
        position = all_gather.first
        while position > floor:
            busy_us = all_gather.us + backlog[all_gather.first] - backlog[position]
            alone_us = busy_us * (1 - load.compute_blocked_fraction)
            hides = clock[all_gather.first] - clock[position] >= alone_us
            if position <= target and (prefetch is not None or hides):
                break
            if used[position - 1] + all_gather.counted > bound_bytes:
                break
            position -= 1
            used[position] += all_gather.counted
        launches[index] = floor = position
    return launches


def _with_reductions_in_flight(load: Load) -> list[int]:
    """Return :func:`least_bytes`, counting each reduction's bytes until it is complete by estimate."""
    end, clock, alone = len(load.compute_us), load.clock, 1 - load.compute_blocked_fraction
    done = (bisect_left(clock, clock[r.ready] + r.us * alone, r.ready, end) for r in load.reductions)
    return bytes_between(load, [all_gather.first for all_gather in load.all_gathers], done)


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
    ready: deque[int] = field(default_factory=deque)  # reductions that can be launched
    pending: deque[int] = field(default_factory=deque)  # reductions launched and not waited for
    all_reducing: dict[int, int] = field(default_factory=dict)  # all-reduces launched, where, and not waited for
    in_flight: int = 0

    def actions(self) -> list[Action]:
        load, end = self.load, len(self.load.compute_us)
        launched_at = _by_position(self.launches.items())
        used_at = _by_position((i, g.first) for i, g in enumerate(load.all_gathers))
        freed_at = _by_position((g.counted, g.last + 1) for g in load.all_gathers)
        ready_at = _by_position((i, r.ready) for i, r in enumerate(load.reductions))
        needed_at = _by_position((i, r.needed) for i, r in enumerate(load.reductions) if r.needed < end)
        made_at = _by_position((size, made) for r in load.reductions for made, size in r.parts)
        self.in_flight = sum(made_at.pop(-1, ()))
        events = {*launched_at, *used_at, *freed_at, *ready_at, *needed_at, *made_at, end}
        for position in sorted(event for event in events if event <= end):
            self.in_flight -= sum(freed_at[position])
            self.ready.extend(ready_at[position])
            for index in launched_at[position]:
                self._take(position, load.all_gathers[index].counted)
                self._act(position, "launch", "all_gather", index)
            self._start(position)
            self._follow_up(position)
            for index in needed_at[position]:
                self._finish(position, index)
            self._take(position, sum(made_at[position]))
            for index in used_at[position]:
                self._act(position, "wait", "all_gather", index)
        while self.pending:
            self._wait(end, self.pending[0])
        for index in list(self.all_reducing):
            self._finish(end, index)
        return self.done

    def _act(self, position: int, verb: Literal["launch", "wait"], kind: Kind, index: int) -> None:
        self.done.append(Action(position, verb, kind, index))

    def _start(self, position: int) -> None:
        while self.ready:
            self.pending.append(self.ready.popleft())
            self._act(position, "launch", "reduction", self.pending[-1])

    def _take(self, position: int, size: int) -> None:
        """Count ``size`` bytes as in flight, after waiting for reductions where the bound has no room for them."""
        while self.in_flight + size > self.bound_bytes and (self.pending or self.ready):
            if not self.pending:
                self._start(position)
            self._wait(position, self.pending[0])
        self.in_flight += size

    def _follow_up(self, position: int) -> None:
        """Continue with reductions that must be complete by now: by an all-reduce, or a copy to the host."""
        clock, alone = self.load.clock, 1 - self.load.compute_blocked_fraction
        for index in list(self.pending):
            reduction = self.load.reductions[index]
            is_last_step = not (reduction.all_reduce_us or reduction.host_us)
            if is_last_step or clock[position] - clock[reduction.ready] < reduction.us * alone:
                break
            self._wait(position, index)
        for index, launched in list(self.all_reducing.items()):
            reduction = self.load.reductions[index]
            if reduction.host_us and clock[position] - clock[launched] >= reduction.all_reduce_us * alone:
                self._finish(position, index)

    def _wait(self, position: int, index: int) -> None:
        self.pending.remove(index)
        self._act(position, "wait", "reduction", index)
        self.in_flight -= self.load.reductions[index].bytes
        if self.load.reductions[index].all_reduce_us:
            self._act(position, "launch", "all_reduce", index)
            self.all_reducing[index] = position

    def _finish(self, position: int, index: int) -> None:
        if index in self.pending:
            self._wait(position, index)
        if index in self.all_reducing:
            del self.all_reducing[index]
            self._act(position, "wait", "all_reduce", index)


def _by_position(pairs: Iterable[tuple[int, int]]) -> defaultdict[int, list[int]]:
    found = defaultdict[int, list[int]](list)
    for item, position in pairs:
        found[position].append(item)
    return found
