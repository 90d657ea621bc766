"""Simulates a schedule: when each collective is on its link, and how long compute waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .tasks import Action, Kind, Load


@dataclass(frozen=True)
class Timed:
    """When a collective is launched and on its link, and how long compute waits for it."""

    launched_us: float
    start_us: float
    end_us: float
    exposed_us: float


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule."""

    collectives: dict[tuple[Kind, int], Timed]  # by kind and index
    compute: tuple[tuple[int, float, float], ...]  # (position, start, end) of each run of compute between two actions
    total_us: float  # when the graph ends


def simulate(load: Load, actions: Sequence[Action]) -> Timeline:
    """Return when everything happens: on one compute lane, one for each link and one to the host.

    The host waits last for gradients copied to it; that wait counts for the collective whose copy was the last.
    """
    now = host_free = 0.0
    last_copied: tuple[Kind, int] | None = None
    free: dict[str, float] = {}
    timed: dict[tuple[Kind, int], Timed] = {}
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
        key = (action.kind, action.index)
        times = _times_of(load, action)
        if action.verb == "launch":
            now += times.pack_us
            start = max(now, free.get(times.lane, 0.0))
            free[times.lane] = start + times.us
            blocked = times.us * load.compute_blocked_fraction
            timed[key] = Timed(now, start, start + times.us, blocked)
            now += blocked
        else:
            stall = max(0.0, timed[key].end_us - now)
            timed[key] = replace(timed[key], exposed_us=timed[key].exposed_us + stall)
            now += stall + times.unpack_us
            if times.host_us:
                host_free, last_copied = max(now, host_free) + times.host_us, key
    if last_copied is not None and host_free > now:
        timed[last_copied] = replace(timed[last_copied], exposed_us=timed[last_copied].exposed_us + host_free - now)
        now = host_free
    return Timeline(timed, tuple(spans), now)


class _Times(NamedTuple):
    us: float
    lane: str
    pack_us: float = 0.0
    unpack_us: float = 0.0
    host_us: float = 0.0


def _times_of(load: Load, action: Action) -> _Times:
    if action.kind == "all_gather":
        all_gather = load.all_gathers[action.index]
        return _Times(all_gather.us, all_gather.lane, all_gather.pack_us, all_gather.unpack_us)
    reduction = load.reductions[action.index]
    if action.kind == "all_reduce":
        return _Times(reduction.all_reduce_us, reduction.all_reduce_lane, host_us=reduction.host_us)
    host_us = 0.0 if reduction.all_reduce_us else reduction.host_us
    return _Times(reduction.us, reduction.lane, reduction.pack_us, host_us=host_us)
