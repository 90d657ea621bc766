"""From a scheduled graph to records: which collectives it holds, when they run, what they carry.

What ran is the plan that the passes emitted, found in the graph itself. Times are estimated again, for the sizes that
were traced rather than for the nominal number of tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, groupby, pairwise, takewhile

from torch import fx

from ..passes.cost import Cluster
from ..passes.cost.compute import collective_us, is_collective, node_bytes, node_us, signature_of, work_of
from ..passes.graph import nodes
from ..passes.graph.emit import PLACE, POSITION, Place
from ..passes.kinds import Request
from ..passes.planning.tasks import Load, Plan, Timed, bytes_in_flight, simulate
from ..passes.schedule_policy import SchedulePolicy
from .fusion import is_alone
from .lifetimes import GraphMemory
from .records import CapturedGraph, Collective, ComputeSpan, Copies, GraphKind, Kernel, MemoryStep, Region, Verdict

_NEGLIGIBLE = 0.01  # of a collective's time: what is exposed for less counts as hidden


class Scheduled:
    """A graph as :class:`Schedule` left it, before Inductor's own passes: its plan, when operations and compute run.

    The cluster of the policy, or the one that the graph computes on, gives the times.
    """

    def __init__(self, graph: fx.Graph, policy: SchedulePolicy) -> None:
        self.graph = graph
        places: dict[fx.Node, Place] = {node: node.meta[PLACE] for node in graph.nodes if PLACE in node.meta}
        self.launches = {(place.task, place.stage): node for node, place in places.items()}
        self.plan = next((place.plan for place in places.values()), Plan((), Load((0.0,), ()), (), 0))
        self.compute = _compute_of(graph, len(self.plan.load.compute_us))
        cluster = policy.cluster_for(nodes.device_of(graph))
        self.on_host, kernel_of = cluster.on_host, _kernels_on(cluster)
        inside = {node: list(filter(None, map(kernel_of, nodes_inside(node)))) for node in chain(*self.compute)}
        self.us = {node: sum(kernel.estimate_us for kernel in kernels) for node, kernels in inside.items()}
        self.kernels = tuple(chain(*inside.values()))
        compute_us = tuple(sum(map(self.us.__getitem__, together)) for together in self.compute)
        self.load = replace(self.plan.load, compute_us=compute_us)
        self.timeline = simulate(self.load, self.plan.actions)
        self.in_flight = bytes_in_flight(self.load, self.plan.actions)  # at each position of compute

    @property
    def requests(self) -> Iterator[Request]:
        return chain.from_iterable(self.plan.buckets)

    def spans(self) -> Iterator[ComputeSpan]:
        """Yield what runs between two actions, apart where a region is called."""
        firsts = [position for position, _, _ in self.timeline.compute]
        for (first, now_us, _), end in zip(self.timeline.compute, [*firsts[1:], len(self.compute)], strict=False):
            inside = chain(*self.compute[first:end])
            for call, run in groupby(inside, key=lambda node: None if nodes.region_of(node) is None else node):
                together = list(run)
                start_us, now_us = now_us, now_us + sum(map(self.us.__getitem__, together))
                block = "" if call is None else _block_of(call)
                yield ComputeSpan(together[0].name, len(together), start_us, now_us, block)

    def memory(self) -> Iterator[MemoryStep]:
        """Yield the curve of bytes in flight; each position counts from when the compute before it is done."""
        clock, firsts = self.load.clock, [position for position, _, _ in self.timeline.compute]
        yield MemoryStep(0.0, self.in_flight[0])
        for position, (before, size) in enumerate(pairwise(self.in_flight), start=1):
            if size != before:
                first, start_us, _ = self.timeline.compute[bisect_left(firsts, position) - 1]
                yield MemoryStep(start_us + (clock[position] - clock[first]), size)

    def regions(self) -> Iterator[Region]:
        calls = defaultdict[str, list[fx.Node]](list)
        for node in self.us:
            if nodes.region_of(node) is not None:
                calls[str(node.args[1])].append(node)
        for name, each in calls.items():
            yield Region(name, nodes.region_module_of(each[0]), tuple(map(_block_of, each)), self.us[each[0]])


def _compute_of(graph: fx.Graph, positions: int) -> list[list[fx.Node]]:
    """Return the compute nodes at each position; one that has none counts with what stands before it."""
    found: list[list[fx.Node]] = [[] for _ in range(positions)]
    position = 0
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and not nodes.is_ours(node):
            position = node.meta.get(POSITION, position)
            found[position].append(node)
    return found


def _kernels_on(cluster: Cluster) -> Callable[[fx.Node], Kernel | None]:
    """Return what tells the kernel of a node that calls no region, with the sizes that it has, if it is one."""
    traffic = cache(lambda graph: GraphMemory("inference", graph).traffic())

    @cache
    def kernel_of(node: fx.Node) -> Kernel | None:
        if is_collective(node):
            return Kernel(signature_of(node), node_bytes(node), collective_us(node, cluster), "other collectives")
        if is_alone(node):
            size, us = sum(map(node_bytes, [node, *node.all_input_nodes])), node_us(node, cluster)
            return Kernel(signature_of(node), size, us, work_of(node))
        size = traffic(node.graph).get(node, 0)
        return Kernel(node.name, size, max(cluster.memory_us(size), cluster.kernel_us)) if size else None

    return kernel_of


def nodes_inside(*given: fx.Node) -> Iterator[fx.Node]:
    """Yield these nodes, but what is inside a region for each call of it."""
    for node in given:
        region = nodes.region_of(node)
        yield from (node,) if region is None else nodes_inside(*region.nodes)


def captured_graph(read: Scheduled, kind: GraphKind, module: fx.GraphModule) -> CapturedGraph:
    """Return the record of a scheduled graph, of which ``module`` holds what is compiled."""
    return CapturedGraph(
        kind=kind,
        module=module,
        collectives=_collectives(read, module.graph),
        compute=tuple(read.spans()),
        memory=tuple(read.memory()),
        peak_unsharded_bytes=max(read.in_flight),
        bound_bytes=read.plan.bound_bytes,
        kept_bytes=sum(request.kept_bytes for request in read.requests),
        regions=tuple(read.regions()),
        kernels=read.kernels,
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


def _collectives(scheduled: Scheduled, final: fx.Graph) -> tuple[Collective, ...]:
    """Return the collectives in order of launch, with their positions in ``final``, the graph that is compiled."""
    place = {node: index for index, node in enumerate(final.nodes)}
    by_name = {node.name: node for node in place}
    found = list[Collective]()
    for (task, stage), launch in sorted(scheduled.launches.items()):
        bucket, name = nodes.bucket_of(launch), nodes.stage_of(launch)
        timed, group = scheduled.timeline.operations[task, stage], bucket.group_of(name)
        if group is None and found:  # a copy to the host: what compute waits for it is counted for what it copies
            found[-1] = replace(found[-1], exposed_us=found[-1].exposed_us + timed.exposed_us)
        if group is None or group.world == 1:
            continue
        (wait,) = launch.users
        stream: Copies = "side stream" if nodes.kind_of(launch).is_ahead and not scheduled.on_host else "compute"
        made = Collective(
            kind=name,
            params=tuple(param.name for param in bucket.params),
            dtype=bucket.spec.dtype,
            bytes=bucket.bytes_of(name),
            group=group.name,
            world=group.world,
            launch=place[by_name[launch.name]],
            wait=place[by_name[wait.name]],
            first_use=_first_use(by_name[wait.name], place),
            estimate_us=timed.end_us - timed.start_us,
            exposed_us=timed.exposed_us,
            start_us=timed.start_us,
            end_us=timed.end_us,
            copies=stream if not stage and not getattr(bucket, "into_place", False) else "none",
            verdict=_verdict(scheduled, task, stage, timed),
        )
        found.append(made)
    return tuple(sorted(found, key=lambda collective: collective.launch))


def _first_use(wait: fx.Node, place: dict[fx.Node, int]) -> int:
    """Return the position of the first node that reads a result of ``wait``; the output's where none does."""
    uses = ((user, item) for item in nodes.getitems_of(wait) if not nodes.is_part(item) for user in item.users)
    # the first arguments of a node with control dependencies are these and what it calls
    readers = (user for user, item in uses if "control_deps" not in str(user.target) or item in user.args[2:])
    return min(map(place.__getitem__, readers), default=len(place) - 1)


def _verdict(scheduled: Scheduled, index: int, stage: int, timed: Timed) -> Verdict:
    load, bound_bytes = scheduled.load, scheduled.plan.bound_bytes
    estimate_us, task = timed.end_us - timed.start_us, scheduled.load.tasks[index]
    if timed.exposed_us <= _NEGLIGIBLE * estimate_us:
        return Verdict.HIDDEN
    if task.stages[stage].blocked_us > timed.exposed_us / 2:
        return Verdict.SHARES_CORES
    if timed.start_us > timed.launched_us:
        return Verdict.LINK_BUSY
    if not task.is_ahead:
        return Verdict.LITTLE_AFTER
    key = ("launch", index, stage)
    launch = next(a.position for a in scheduled.plan.actions if (a.verb, a.task, a.stage) == key)
    if not sum(load.compute_us[: task.needed]):
        return Verdict.FIRST
    if launch and bound_bytes and scheduled.in_flight[launch - 1] + task.output_bytes > bound_bytes:
        return Verdict.MEMORY_BOUND
    if task.ready == launch and launch:
        return Verdict.INPUT_LATE
    return Verdict.LITTLE_BEFORE
