"""Simulates a schedule: when each operation is on its lane, and how long compute waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .tasks import Action, Load


@dataclass(frozen=True)
class Timed:
    """When an operation is launched and on its lane, and how long compute waits for it."""

    launched_us: float
    start_us: float
    end_us: float
    exposed_us: float


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule."""

    operations: dict[tuple[int, int], Timed]  # by task and stage
    compute: tuple[tuple[int, float, float], ...]  # (position, start, end) of each run of compute between two actions
    total_us: float  # when the graph ends


def simulate(load: Load, actions: Sequence[Action]) -> Timeline:
    """Return when everything happens: on one lane of compute, and those that stages name."""
    now = 0.0
    free: dict[str, float] = {}
    timed: dict[tuple[int, int], Timed] = {}
    spans = []
    at = 0
    for action in [*actions, None]:
        position = action.position if action else len(load.compute_us)
        if position > at:
            length = load.clock[position] - load.clock[at]
            spans.append((at, now, now + length))
            now, at = now + length, position
        if action is None:
            break
        key, task = (action.task, action.stage), load.tasks[action.task]
        if action.verb == "launch":
            now += task.pack_us if action.stage == 0 else 0.0
            stage = task.stages[action.stage]
            start = max(now, free.get(stage.lane, 0.0))
            free[stage.lane] = start + stage.us
            blocked = stage.us * load.compute_blocked_fraction
            timed[key] = Timed(now, start, start + stage.us, blocked)
            now += blocked
        else:
            stall = max(0.0, timed[key].end_us - now)
            timed[key] = replace(timed[key], exposed_us=timed[key].exposed_us + stall)
            now += stall + (task.unpack_us if action.stage == 0 else 0.0)
    return Timeline(timed, tuple(spans), now)
