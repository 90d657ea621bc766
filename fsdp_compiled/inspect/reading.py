"""From a scheduled graph to records: which collectives it holds, when they run, what they carry.

Times and memory are read from the order in which nodes stand in the graph, not from the passes' decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import fx

from ..passes.cost import Cluster
from ..passes.graph import nodes
from ..passes.graph.liveness import Compute
from ..passes.graph.requests import (
    LoweredBucket,
    Stage,
    actions_of,
    is_ours,
    lowered_buckets,
    lowered_requests,
    numbered,
)
from ..passes.planning.buckets import auto_bound
from ..passes.planning.requests import load_of
from ..passes.planning.simulate import Timed, Timeline, simulate
from ..passes.planning.tasks import Action, AllGatherTask, Kind, Load, bytes_in_flight
from ..passes.policy import SchedulePolicy
from ..sharding.spec import AllGatherBucket, AllGatherSpec, Group, ReductionBucket
from .records import Collective, ComputeSpan, Copies, MemoryStep

_NEGLIGIBLE = 0.01  # of a collective's time: what is exposed for less counts as hidden


@dataclass(frozen=True)
class Scheduled:
    """A graph as :class:`Reorder` left it, on a cluster.

    Args:
        graph: lowered, and before Inductor's own passes.
        cluster: that times are estimated for.
        policy: by which it was scheduled.
    """

    graph: fx.Graph
    cluster: Cluster
    policy: SchedulePolicy

    @cached_property
    def buckets(self) -> list[LoweredBucket]:
        return lowered_buckets(self.graph)

    @cached_property
    def compute(self) -> Compute:
        return Compute(self.graph, is_ours)

    @cached_property
    def load(self) -> Load:
        return load_of(*lowered_requests(self.graph, self.buckets, self.cluster))

    @cached_property
    def bound_bytes(self) -> int:
        """On the bytes in flight; 0 for a graph without collectives."""
        if not self.buckets:
            return 0
        if self.policy.in_flight_bytes != "auto":
            return self.policy.in_flight_bytes
        requests, _ = lowered_requests(self.graph, self.buckets, self.cluster)
        return auto_bound(requests)

    @cached_property
    def actions(self) -> list[Action]:
        return actions_of(self.graph, self.buckets)

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.load, self.actions)

    @cached_property
    def in_flight(self) -> list[int]:
        return bytes_in_flight(self.load, self.actions)

    @property
    def kept_bytes(self) -> int:
        """Of parameters that the graph returns unsharded for backward."""
        return sum(task.kept_bytes for task in self.load.all_gathers)

    def spans(self) -> tuple[ComputeSpan, ...]:
        """Return the compute lane."""
        starts = [position for position, _, _ in self.timeline.compute]
        ends = [*starts[1:], self.compute.end]
        return tuple(
            ComputeSpan(self.compute.nodes[position].name, end - position, start_us, end_us)
            for (position, start_us, end_us), end in zip(self.timeline.compute, ends, strict=True)
        )

    def memory(self) -> tuple[MemoryStep, ...]:
        """Return the curve of bytes in flight; each position counts from when the compute before it is done."""
        clock = [0.0, *accumulate(self.load.compute_us)]
        spans = iter(self.timeline.compute)
        span = next(spans, (0, 0.0, 0.0))
        following = next(spans, None)
        steps: list[MemoryStep] = []
        for position, size in enumerate(self.in_flight):
            while following is not None and following[0] < position:
                span, following = following, next(spans, None)
            arrival = span[1] + max(clock[position] - clock[span[0]], 0.0) if position else 0.0
            if not steps or steps[-1].bytes != size:
                steps.append(MemoryStep(arrival, size))
        return tuple(steps)


def collectives(scheduled: Scheduled, final: fx.Graph) -> tuple[Collective, ...]:
    """Return the collectives in order of launch, with their positions in ``final``, the graph that is compiled."""
    place = {node.name: index for index, node in enumerate(final.nodes)}
    by_name = {node.name: node for node in final.nodes}
    found = []
    for kind in (AllGatherBucket, ReductionBucket):
        for index, lowered in numbered(scheduled.buckets, kind):
            for name, stage, group in _parts(lowered):
                timed = scheduled.timeline.collectives[name, index]
                found.append(
                    Collective(
                        kind=nodes.stage_of(stage.launch),  # type: ignore[arg-type]  # no copy to the host is among the parts
                        params=tuple(param.name for param in lowered.bucket.params),
                        dtype=lowered.bucket.spec.dtype,
                        bytes=_bytes(lowered, stage),
                        group=group.name,
                        world=group.world,
                        launch=place[stage.launch.name],
                        wait=place[stage.wait.name],
                        first_use=_first_use(by_name[stage.wait.name], place),
                        estimate_us=timed.end_us - timed.start_us,
                        exposed_us=timed.exposed_us,
                        start_us=timed.start_us,
                        end_us=timed.end_us,
                        copies=_copies(lowered, stage),
                        verdict=_verdict(scheduled, name, index, timed),
                    )
                )
    return tuple(sorted(found, key=lambda collective: collective.launch))


def _parts(lowered: LoweredBucket) -> list[tuple[Kind, Stage, Group]]:
    """Return each collective that communicates: its kind in the schedule, its nodes and its group."""
    spec = lowered.bucket.spec
    if isinstance(spec, AllGatherSpec):
        parts: list[tuple[Kind, Stage, Group]] = [("all_gather", lowered.collectives[0], spec.group)]
    else:
        groups = [group for group in (spec.shards, spec.replicas) if group.world > 1]
        kinds: tuple[Kind, ...] = ("reduction", "all_reduce")
        parts = list(zip(kinds, lowered.collectives, groups, strict=False))
    return [part for part in parts if part[2].world > 1]


def _bytes(lowered: LoweredBucket, stage: Stage) -> int:
    """Return the unsharded size, of an all-reduce after a reduce-scatter the scattered one."""
    size = sum(lowered.bucket.sizes)
    if isinstance(lowered.bucket, ReductionBucket) and nodes.stage_of(stage.launch) == "all_reduce":
        return size // lowered.bucket.spec.shards.world
    return size


def _copies(lowered: LoweredBucket, stage: Stage) -> Copies:
    if isinstance(lowered.bucket, ReductionBucket):
        return "compute" if stage is lowered.collectives[0] else "none"
    if lowered.bucket.into_place:
        return "none"
    return "side stream" if nodes.value_of(stage.launch).device.type == "cuda" else "compute"


def _first_use(wait: fx.Node, place: dict[str, int]) -> int:
    """Return the position of the first node that reads a result of ``wait``; the output's where none does."""
    readers = [user for item in wait.users if nodes.is_getitem(item) for user in item.users if _reads(user, item)]
    return min((place[user.name] for user in readers), default=max(place.values()))


def _reads(user: fx.Node, node: fx.Node) -> bool:
    """Tell whether ``user`` takes ``node`` as data, rather than as a control dependency."""
    return "control_deps" not in str(user.target) or node in user.args[2:]


def _verdict(scheduled: Scheduled, kind: Kind, index: int, timed: Timed) -> str:
    load = scheduled.load
    estimate_us = timed.end_us - timed.start_us
    blocked_us = estimate_us * load.compute_blocked_fraction
    if timed.exposed_us <= _NEGLIGIBLE * estimate_us:
        return "hidden"
    if blocked_us > timed.exposed_us / 2:
        return "exposed: it runs on the cores that compute needs"
    if timed.start_us > timed.launched_us:
        return "exposed: the link is busy with earlier collectives"
    if kind != "all_gather":
        return "exposed: too little compute follows it"
    return _why_not_earlier(scheduled, load.all_gathers[index], index)


def _why_not_earlier(scheduled: Scheduled, all_gather: AllGatherTask, index: int) -> str:
    load = scheduled.load
    launch = _position(scheduled.actions, index)
    if not sum(load.compute_us[: all_gather.first]):
        return "exposed: nothing before it to hide behind"
    if (
        launch
        and scheduled.bound_bytes
        and scheduled.in_flight[launch - 1] + all_gather.counted > scheduled.bound_bytes
    ):
        return "exposed: the memory bound delays its launch"
    if all_gather.earliest == launch and launch:
        return "exposed: its input is computed just before"
    return "exposed: too little compute before its first use"


def _position(actions: Sequence[Action], index: int) -> int:
    return next(a.position for a in actions if (a.kind, a.verb, a.index) == ("all_gather", "launch", index))
