"""From a scheduled graph to records: which collectives it holds, when they run, what they carry.

Times and memory are read from the order in which nodes stand in the graph, not from the passes' decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import fx

from ..passes import ir, schedule, survey
from ..passes.compute import size_bytes
from ..passes.cost import Cluster
from ..passes.schedule import Action, Gather, Kind, Load, Timed, Timeline
from ..passes.survey import Compute, Flight
from .records import Collective, CollectiveKind, ComputeSpan, Copies, MemoryStep

_NEGLIGIBLE = 0.01  # of a collective's time: what is exposed for less counts as hidden


@dataclass(frozen=True)
class Scheduled:
    """A graph as :class:`Reorder` left it, on a cluster.

    Args:
        graph: lowered, and before Inductor's own passes.
        cluster: that times are estimated for.
        bound_bytes: on the bytes in flight; 0 where nothing was decided.
    """

    graph: fx.Graph
    cluster: Cluster
    bound_bytes: int

    @cached_property
    def flights(self) -> list[Flight]:
        return survey.flights(self.graph)

    @cached_property
    def compute(self) -> Compute:
        return survey.compute_of(self.graph, self.flights)

    @cached_property
    def load(self) -> Load:
        return survey.load_of(self.graph, self.compute, self.flights, self.cluster)

    @cached_property
    def actions(self) -> list[Action]:
        return survey.actions_of(self.graph, self.compute, self.flights)

    @cached_property
    def timeline(self) -> Timeline:
        return schedule.play(self.load, self.actions)

    @cached_property
    def in_flight(self) -> list[int]:
        return schedule.bytes_in_flight(self.load, self.actions)

    @property
    def kept_bytes(self) -> int:
        """Of gathers whose result the graph returns for backward."""
        return sum(gather.kept_bytes for gather in self.load.gathers)

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
    """Return the collectives in order of launch, with their positions in ``final``, the graph that is lowered."""
    place = {node.name: index for index, node in enumerate(final.nodes)}
    by_name = {node.name: node for node in final.nodes}
    found = []
    numbers = {True: -1, False: -1}
    for flight in scheduled.flights:
        numbers[flight.bundle.reduces] += 1
        index = numbers[flight.bundle.reduces]
        kinds: tuple[Kind, ...] = ("reduction", "second") if flight.bundle.reduces else ("gather",)
        for kind, launch, wait in zip(kinds, flight.launches, flight.waits, strict=False):
            timed = scheduled.timeline.collectives[kind, index]
            group, world = ir.group_of(launch)
            found.append(
                Collective(
                    kind=_kind(launch),
                    params=flight.bundle.params,
                    dtype=ir.value_of(launch).dtype,
                    bytes=sum(flight.bundle.sizes) if kind == "gather" else size_bytes(ir.source_of(launch)),
                    group=group,
                    world=world,
                    launch=place[launch.name],
                    wait=place[wait.name],
                    first_use=place[_first_use(by_name[wait.name], place)],
                    estimate_us=timed.end_us - timed.start_us,
                    exposed_us=timed.exposed_us,
                    start_us=timed.start_us,
                    end_us=timed.end_us,
                    copies=_copies(launch),
                    verdict=_verdict(scheduled, kind, index, timed),
                )
            )
    return tuple(sorted(found, key=lambda collective: collective.launch))


def _kind(launch: fx.Node) -> CollectiveKind:
    if ir.is_gather_launch(launch):
        return "all_gather"
    return "reduce_scatter" if ir.is_scatter_launch(launch) else "all_reduce"


def _copies(launch: fx.Node) -> Copies:
    bundle = ir.bundle_of(launch)
    if ir.is_all_reduce_launch(launch) or (bundle is not None and bundle.is_in_place):
        return "none"
    return "side stream" if ir.leaves_compute(launch) else "compute"


def _first_use(wait: fx.Node, place: dict[str, int]) -> str:
    """Return the name of the first node that reads what ``wait`` gives, unpacking looked through."""
    readers, stack, seen = [], [wait], {wait}
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in seen or not _reads(user, node):
                continue
            seen.add(user)
            if ir.bundle_of(user) is None or ir.is_launch(user):
                readers.append(user.name)
            else:
                stack.append(user)
    return min(readers, key=place.__getitem__)


def _reads(user: fx.Node, node: fx.Node) -> bool:
    """Tell whether ``user`` takes ``node`` as data, rather than as a control dependency."""
    return "control_deps" not in str(user.target) or node in user.args[2:]


def _verdict(scheduled: Scheduled, kind: Kind, index: int, timed: Timed) -> str:
    load = scheduled.load
    estimate_us = timed.end_us - timed.start_us
    taken_us = estimate_us * load.taken_from_compute
    if timed.exposed_us <= _NEGLIGIBLE * estimate_us:
        return "hidden"
    if taken_us > timed.exposed_us / 2:
        return "exposed: it runs on the cores that compute needs"
    if timed.start_us > timed.launched_us:
        return "exposed: the link is busy with earlier collectives"
    if kind != "gather":
        return "exposed: too little compute follows it"
    return _why_not_earlier(scheduled, load.gathers[index], index)


def _why_not_earlier(scheduled: Scheduled, gather: Gather, index: int) -> str:
    load = scheduled.load
    launch = _position(scheduled.actions, index)
    if not sum(load.compute_us[: gather.first]):
        return "exposed: nothing before it to hide behind"
    if launch and scheduled.bound_bytes and scheduled.in_flight[launch - 1] + gather.counted > scheduled.bound_bytes:
        return "exposed: the memory bound delays its launch"
    if gather.earliest == launch and launch:
        return "exposed: its input is computed just before"
    return "exposed: too little compute before its first use"


def _position(actions: Sequence[Action], index: int) -> int:
    return next(a.position for a in actions if (a.kind, a.verb, a.index) == ("gather", "launch", index))
