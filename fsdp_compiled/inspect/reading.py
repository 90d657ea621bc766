"""From a scheduled graph to records: which collectives it holds, when they run, what they carry.

Times and memory are read from the order in which nodes stand in the graph and from the sizes that were traced, not
from the passes' decisions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, pairwise, takewhile
from typing import NamedTuple

from torch import fx

from ..passes.graph import nodes, requests
from ..passes.graph.anchors import AnchoredCompute
from ..passes.graph.liveness import Compute, cluster_of
from ..passes.planning.buckets import auto_bound
from ..passes.planning.requests import load_of
from ..passes.planning.simulate import Timed, simulate
from ..passes.planning.tasks import Kind, bytes_in_flight
from ..passes.schedule_policy import SchedulePolicy
from ..sharding.spec import AllGatherBucket, Group, ReductionBucket
from .records import (
    CapturedGraph,
    Collective,
    ComputeSpan,
    Copies,
    GraphKind,
    MemoryStep,
    Region,
    Verdict,
)

_NEGLIGIBLE = 0.01  # of a collective's time: what is exposed for less counts as hidden


class Scheduled:
    """A graph as :class:`Reorder` left it: its buckets, when they and compute run, and the bytes in flight.

    Args:
        graph: lowered, and before Inductor's own passes.
        policy: by which it was scheduled; its cluster, or the one that the graph computes on, gives the times.
    """

    def __init__(self, graph: fx.Graph, policy: SchedulePolicy) -> None:
        self.buckets = requests.lowered_buckets(graph)
        self.compute, cluster = Compute(graph, requests.is_ours), cluster_of(graph, policy.cluster)
        asked, grouped = requests.lowered_requests(self.compute, self.buckets, cluster)
        self.load = load_of(asked, grouped)
        self.actions = requests.actions_of(graph, self.buckets)
        self.timeline = simulate(self.load, self.actions)
        self.in_flight = bytes_in_flight(self.load, self.actions)  # at each position of compute
        decided = requests.lowered_requests(
            AnchoredCompute(graph, requests.is_ours, policy.tokens), self.buckets, cluster
        )[0]
        bound_bytes = auto_bound(decided) if policy.in_flight_bytes == "auto" else policy.in_flight_bytes
        self.bound_bytes = bound_bytes if self.buckets else 0

    def spans(self) -> tuple[ComputeSpan, ...]:
        ends = [*(position for position, _, _ in self.timeline.compute[1:]), self.compute.end]
        runs = zip(self.timeline.compute, ends, strict=False)
        return tuple(span for (first, start_us, _), end in runs for span in self._spans(first, end, start_us))

    def _spans(self, first: int, end: int, start_us: float) -> Iterator[ComputeSpan]:
        """Yield what runs from ``first`` to before ``end``, apart where a region is called."""
        calls = [at for at in range(first, end) if nodes.region_of(self.compute.nodes[at]) is not None]
        for at, until in pairwise(sorted({first, end, *calls, *(call + 1 for call in calls)})):
            node = self.compute.nodes[at]
            end_us = start_us + sum(self.load.compute_us[at:until])
            yield ComputeSpan(node.name, until - at, start_us, end_us, _block_of(node) if at in calls else "")
            start_us = end_us

    def memory(self) -> tuple[MemoryStep, ...]:
        """Return the curve of bytes in flight; each position counts from when the compute before it is done."""
        clock = [0.0, *accumulate(self.load.compute_us)]
        firsts = [position for position, _, _ in self.timeline.compute]
        steps = [MemoryStep(0.0, self.in_flight[0])]
        for position, (before, size) in enumerate(pairwise(self.in_flight), start=1):
            if size != before:
                first, start_us, _ = self.timeline.compute[bisect_left(firsts, position) - 1]
                steps.append(MemoryStep(start_us + (clock[position] - clock[first]), size))
        return tuple(steps)

    def regions(self) -> tuple[Region, ...]:
        calls = defaultdict[str, list[fx.Node]](list)
        for node in self.compute.nodes:
            if nodes.region_of(node) is not None:
                calls[str(node.args[1])].append(node)
        found = []
        for name, each in calls.items():
            us = self.load.compute_us[self.compute.position[each[0]]]
            found.append(Region(name, nodes.region_module_of(each[0]), tuple(map(_block_of, each)), us))
        return tuple(found)


def captured_graph(
    read: Scheduled, kind: GraphKind, module: fx.GraphModule, before: fx.GraphModule | None = None, code: str = ""
) -> CapturedGraph:
    """Return the record of a scheduled graph, of which ``module`` holds what is compiled."""
    return CapturedGraph(
        kind=kind,
        module=module,
        before=before,
        collectives=collectives(read, module.graph),
        compute=read.spans(),
        memory=read.memory(),
        peak_unsharded_bytes=max(read.in_flight),
        bound_bytes=read.bound_bytes,
        kept_bytes=sum(task.kept_bytes for task in read.load.all_gathers),
        code=code,
        regions=read.regions(),
    )


def _block_of(call: fx.Node) -> str:
    """Return the path that the all-gathered parameters of a region's call have in common."""
    paths = [
        nodes.bucket_of(nodes.list_of(item)).params[nodes.index_of(item)].name.split(".")[:-1]
        for item in nodes.operands_of(call)
        if isinstance(item, fx.Node) and nodes.is_getitem(item) and nodes.is_wait(nodes.list_of(item))
    ]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in common) or call.name


def collectives(scheduled: Scheduled, final: fx.Graph) -> tuple[Collective, ...]:
    """Return the collectives in order of launch, with their positions in ``final``, the graph that is compiled."""
    place = {node: index for index, node in enumerate(final.nodes)}
    by_name = {node.name: node for node in place}
    found = []
    all_buckets = (
        each for kind in (AllGatherBucket, ReductionBucket) for each in requests.numbered(scheduled.buckets, kind)
    )
    for index, lowered in all_buckets:
        for part in _parts(lowered):
            timed = scheduled.timeline.collectives[part.kind, index]
            launch, wait = by_name[part.stage.launch.name], by_name[part.stage.wait.name]
            made = Collective(
                kind=nodes.stage_of(part.stage.launch),  # type: ignore[arg-type]  # no copy to the host
                params=tuple(param.name for param in lowered.bucket.params),
                dtype=lowered.bucket.spec.dtype,
                bytes=part.bytes,
                group=part.group.name,
                world=part.group.world,
                launch=place[launch],
                wait=place[wait],
                first_use=_first_use(wait, place),
                estimate_us=timed.end_us - timed.start_us,
                exposed_us=timed.exposed_us,
                start_us=timed.start_us,
                end_us=timed.end_us,
                copies=part.copies,
                verdict=_verdict(scheduled, part.kind, index, timed),
            )
            found.append(made)
    return tuple(sorted(found, key=lambda collective: collective.launch))


class _Part(NamedTuple):
    """A collective of a bucket; ``kind`` is its name in the schedule."""

    kind: Kind
    stage: requests.Stage
    group: Group
    bytes: int
    copies: Copies


def _parts(lowered: requests.LoweredBucket) -> list[_Part]:
    """Return the collectives that communicate."""
    bucket, stages, size = lowered.bucket, lowered.collectives, sum(lowered.bucket.sizes)
    if isinstance(bucket, AllGatherBucket):
        on_gpu = nodes.value_of(stages[0].launch).device.type == "cuda"
        copies: Copies = "none" if bucket.into_place else "side stream" if on_gpu else "compute"
        return [_Part("all_gather", stages[0], bucket.spec.group, size, copies)] if bucket.world > 1 else []
    shards, replicas = bucket.spec.shards, bucket.spec.replicas
    first = _Part("reduction", stages[0], shards if shards.world > 1 else replicas, size, "compute")
    second = [_Part("all_reduce", stage, replicas, size // shards.world, "none") for stage in stages[1:]]
    return [first, *second] if first.group.world > 1 else []


def _first_use(wait: fx.Node, place: dict[fx.Node, int]) -> int:
    """Return the position of the first node that reads a result of ``wait``; the output's where none does."""
    uses = ((user, item) for item in nodes.getitems_of(wait) if not nodes.is_part(item) for user in item.users)
    # the first arguments of a node with control dependencies are these and what it calls
    readers = (user for user, item in uses if "control_deps" not in str(user.target) or item in user.args[2:])
    return min(map(place.__getitem__, readers), default=len(place) - 1)


def _verdict(scheduled: Scheduled, kind: Kind, index: int, timed: Timed) -> Verdict:
    load, bound_bytes = scheduled.load, scheduled.bound_bytes
    estimate_us = timed.end_us - timed.start_us
    if timed.exposed_us <= _NEGLIGIBLE * estimate_us:
        return Verdict.HIDDEN
    if estimate_us * load.compute_blocked_fraction > timed.exposed_us / 2:
        return Verdict.SHARES_CORES
    if timed.start_us > timed.launched_us:
        return Verdict.LINK_BUSY
    if kind != "all_gather":
        return Verdict.LITTLE_AFTER
    task, key = load.all_gathers[index], ("launch", kind, index)
    launch = next(a.position for a in scheduled.actions if (a.verb, a.kind, a.index) == key)
    if not sum(load.compute_us[: task.first]):
        return Verdict.FIRST
    if launch and bound_bytes and scheduled.in_flight[launch - 1] + task.counted > bound_bytes:
        return Verdict.MEMORY_BOUND
    if task.earliest == launch and launch:
        return Verdict.INPUT_LATE
    return Verdict.LITTLE_BEFORE
