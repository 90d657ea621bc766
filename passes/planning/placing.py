"""Decides when tasks start and end around a fixed sequence of compute, inside a hard bound on memory.

A list schedule on :mod:`tasks`; see there for positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from .tasks import Action, Load, bytes_between


def place(load: Load, bound_bytes: int, prefetch: int | None = None) -> list[Action]:
    """Return every launch and wait in order.

    What is started ahead is launched in the order of first use, each as early as ``prefetch`` and memory allow, and
    waited for at first use. Any other task is launched when its inputs are there, and waited for at the end, or
    earlier where its memory is needed or a stage has to follow.

    Args:
        bound_bytes: on the bytes in flight at every position; at least ``max(least_bytes(load))``.
        prefetch: how many tasks may be launched before the first of them is needed; None: until they hide their time
            behind compute, at least one.
    """
    return _Sweep(load, bound_bytes, _launch_positions(load, bound_bytes, prefetch)).actions()


def _launch_positions(load: Load, bound_bytes: int, prefetch: int | None) -> dict[int, int]:
    """Return where each task that is started ahead is launched, by index, in launch order."""
    clock = load.clock
    # the least bytes at each position, but that inputs of other tasks count until these are complete by estimate
    done = (bisect_left(clock, clock[t.ready] + t.stages[0].hideable_us, t.ready, load.end) for _, t in load.behind)
    used = bytes_between(load, [task.needed for _, task in load.ahead], done)
    backlog = [0.0] * (load.end + 2)  # hideable time of other tasks that are launched before each position
    for _, other in load.behind:
        backlog[other.ready + 1] += other.stages[0].hideable_us
    backlog = list(accumulate(backlog))
    order = sorted(load.ahead, key=lambda each: each[1].needed)
    ahead = 1 if prefetch is None else prefetch
    launches, floor = dict[int, int](), 0
    for rank, (index, task) in enumerate(order):
        floor = max(floor, min(task.ready, task.needed))
        task_us = sum(stage.hideable_us for stage in task.stages)
        target = order[rank - ahead][1].needed if rank >= ahead else 0
        position = needed = task.needed
        while position > floor:
            busy_us = task_us + backlog[needed] - backlog[position]
            hides = clock[needed] - clock[position] >= busy_us
            is_early = position <= target and (prefetch is not None or hides)
            if is_early or used[position - 1] + task.output_bytes > bound_bytes:
                break
            position -= 1
            used[position] += task.output_bytes
        launches[index] = floor = position
    return launches


@dataclass
class _Sweep:
    """One walk over the positions, which knows what is in flight."""

    load: Load
    bound_bytes: int
    launches: dict[int, int]
    done: list[Action] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)  # tasks that can be launched
    first: dict[int, None] = field(default_factory=dict)  # tasks in their first stage, the oldest first
    later: dict[int, tuple[int, int]] = field(default_factory=dict)  # of tasks in another: it, and where it began
    in_flight: int = 0

    def actions(self) -> list[Action]:
        """Walk. The order of the steps at a position is part of the schedule.

        Memory that was read for the last time is free before anything new takes it. What is launched ahead comes
        before reductions that are launched here, whose inputs exist already and which may be waited for to make room.
        Results that this position reads are there before the inputs that it makes count, and waits for what was
        launched ahead come last, right before compute.
        """
        load, end = self.load, self.load.end
        launched_at = _by_position(self.launches.items())
        used_at = _by_position((index, task.needed) for index, task in load.ahead)
        freed_at = _by_position((task.output_bytes, task.last + 1) for _, task in load.ahead)
        ready_at = _by_position((index, task.ready) for index, task in load.behind)
        needed_at = _by_position((index, task.needed) for index, task in load.behind if task.needed < end)
        made_at = _by_position((size, made) for _, task in load.behind for made, size in task.inputs)
        self.in_flight = sum(made_at.pop(-1, ()))
        events = {*launched_at, *used_at, *freed_at, *ready_at, *needed_at, *made_at, end}
        for position in sorted(event for event in events if event <= end):
            self.in_flight -= sum(freed_at[position])
            self.ready += ready_at[position]
            for index in launched_at[position]:
                self._take(position, load.tasks[index].output_bytes)
                self._act(position, "launch", index)
            self._start(position)
            self._follow_up(position)
            for index in needed_at[position]:
                while index in self.first or index in self.later:
                    self._advance(position, index)
            self._take(position, sum(made_at[position]))
            for index in used_at[position]:
                for stage in range(len(load.tasks[index].stages)):
                    if stage:
                        self._act(position, "launch", index, stage)
                    self._act(position, "wait", index, stage)
        for index in list(self.first):
            self._advance(end, index)
        while self.later:  # stage by stage, so that the host waits last of all
            stage = min(stage for stage, _ in self.later.values())
            for index in [index for index, (at, _) in self.later.items() if at == stage]:
                self._advance(end, index)
        return self.done

    def _act(self, position: int, verb: Literal["launch", "wait"], index: int, stage: int = 0) -> None:
        self.done.append(Action(position, verb, index, stage))

    def _start(self, position: int) -> None:
        for index in self.ready:
            self.first[index] = None
            self._act(position, "launch", index)
        self.ready.clear()

    def _take(self, position: int, size: int) -> None:
        """Count ``size`` bytes as in flight, after waiting for inputs that make room where the bound has none."""
        while self.in_flight + size > self.bound_bytes and (self.first or self.ready):
            if not self.first:
                self._start(position)
            self._advance(position, next(iter(self.first)))
        self.in_flight += size

    def _follow_up(self, position: int) -> None:
        """Go on to the next stage of tasks whose last launch must be complete by now."""
        while self.first and self._follows(position, index := next(iter(self.first))):
            self._advance(position, index)
        for index in list(self.later):
            if self._follows(position, index):
                self._advance(position, index)

    def _follows(self, position: int, index: int) -> bool:
        clock, task = self.load.clock, self.load.tasks[index]
        stage, since = self.later.get(index, (0, task.ready))
        done, *following = task.stages[stage:]
        return any(each.us for each in following) and clock[position] - clock[since] >= done.hideable_us

    def _advance(self, position: int, index: int) -> None:
        """Wait for the stage that a task is in, and launch the next one."""
        task, (stage, _) = self.load.tasks[index], self.later.pop(index, (0, 0))
        if index in self.first:
            del self.first[index]
            self.in_flight -= task.input_bytes
        self._act(position, "wait", index, stage)
        if stage + 1 < len(task.stages):
            self._act(position, "launch", index, stage + 1)
            self.later[index] = stage + 1, position


def _by_position(pairs: Iterable[tuple[int, int]]) -> defaultdict[int, list[int]]:
    found = defaultdict[int, list[int]](list)
    for item, position in pairs:
        found[position].append(item)
    return found
