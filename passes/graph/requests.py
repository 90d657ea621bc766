"""Reads requests and lowered buckets out of a graph, as plain records for planning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, count

from torch import fx

from ...sharding.spec import AllGatherBucket, AllGatherSpec, ParamSpec, ReductionBucket, ReductionSpec
from ..cost import Cluster
from ..planning.requests import AllGatherRequest, Buckets, ReductionRequest, Requests
from ..planning.tasks import Action, AllGatherTask, Kind, ReductionTask
from . import nodes
from .anchors import AnchoredCompute
from .liveness import Compute, is_returned
from .nodes import Half


class _Reader:
    """Makes requests of nodes, in turn; a result that nothing reads is None."""

    def __init__(self, compute: Compute, cluster: Cluster) -> None:
        self.compute = compute
        self.lane = cache(cluster.lane)
        self.index = count()
        self.key = defaultdict[Hashable, int](count().__next__)  # a number for each, which is faster to compare

    def all_gather(
        self, param: ParamSpec, spec: AllGatherSpec, shard: fx.Node, result: fx.Node | None
    ) -> AllGatherRequest:
        first, last = self.compute.reads(result)
        size = param.layout(spec.group.world).padded_bytes(spec.dtype)
        kept_bytes = size if result is not None and is_returned(result) else 0
        return AllGatherRequest(
            next(self.index),
            param,
            spec,
            AllGatherTask(size, 0.0, first, last, min(self.compute.after(shard), first), kept_bytes),
            self.lane(spec.group),
            nodes.value_of(result or shard).device,
            nodes.is_parameter(shard),
            self.key[spec],
        )

    def reduction(
        self, param: ParamSpec, spec: ReductionSpec, grad: fx.Node, result: fx.Node | None
    ) -> ReductionRequest:
        needed, _ = self.compute.reads(result)
        size = param.layout(spec.shards.world).padded_bytes(spec.dtype)
        groups = [group for group in (spec.shards, spec.replicas) if group.world > 1] or [spec.shards]
        unit = param.unit if spec.hook or spec.comm else ""  # the user's code sees one unit's gradients
        return ReductionRequest(
            next(self.index),
            param,
            spec,
            ReductionTask(((self.compute.after(grad) - 1, size),), 0.0, needed),
            tuple(map(self.lane, groups)),
            nodes.value_of(grad).device,
            self.key[spec, unit],
        )


def opaque_requests(graph: fx.Graph, opaque: Sequence[fx.Node], cluster: Cluster, tokens: int) -> Requests:
    """Return what the opaque nodes of ``graph`` ask for; a request's index is its node's."""
    read = _Reader(AnchoredCompute(graph, set(opaque).__contains__, tokens), cluster)
    params, all_gathers, reductions = nodes.params_of(graph), [], []
    for node in opaque:
        spec, source = nodes.spec_of(node), nodes.source_of(node)
        if nodes.is_unshard(node):
            all_gathers.append(read.all_gather(params[node], spec.all_gather, source, node))
        else:
            reductions.append(read.reduction(params[node], spec.reduction, source, node))
    # By position, then by name: the order of nodes within a position may differ by rank.
    all_gathers.sort(key=lambda request: (request.task.first, request.param.name))
    reductions.sort(key=lambda request: (request.task.ready, request.param.name))
    return Requests(read.compute.time(cluster), tuple(all_gathers), tuple(reductions), cluster)


# ---- lowered buckets ----


@dataclass(frozen=True)
class Stage:
    """One stage of a lowered bucket: its launch, and its wait."""

    launch: fx.Node
    wait: fx.Node

    @cached_property
    def results(self) -> dict[int, fx.Node]:
        """The results that are read, by their index."""
        items = (item for item in nodes.getitems_of(self.wait) if not nodes.is_part(item))
        return dict(sorted((nodes.index_of(item), item) for item in items))

    @property
    def waiting(self) -> list[fx.Node]:
        """The wait and its results, in order."""
        return [self.wait, *filter(nodes.is_part, nodes.getitems_of(self.wait)), *self.results.values()]


@dataclass(frozen=True)
class LoweredBucket:
    """A bucket and its nodes, stage by stage; the copy to the host is apart from the collectives."""

    bucket: AllGatherBucket | ReductionBucket
    collectives: tuple[Stage, ...]
    to_host: Stage | None = None


def lowered_buckets(graph: fx.Graph) -> list[LoweredBucket]:
    """Return every bucket of a lowered graph, in order of launch."""
    return [_lowered(node) for node in graph.nodes if nodes.is_launch(node) and nodes.is_first_stage(node)]


def _lowered(launch: fx.Node) -> LoweredBucket:
    stages = list(_stages(launch))
    to_host = stages.pop() if nodes.stage_of(stages[-1].launch) == "copy_to_host" else None
    return LoweredBucket(nodes.bucket_of(launch), tuple(stages), to_host)


def _stages(launch: fx.Node | None) -> Iterator[Stage]:
    while launch is not None:
        (wait,) = launch.users
        yield (stage := Stage(launch, wait))
        readers = (user for item in stage.results.values() for user in item.users if nodes.is_launch(user))
        launch = next((reader for reader in readers if not nodes.is_first_stage(reader)), None)


def lowered_requests(compute: Compute, found: Sequence[LoweredBucket], cluster: Cluster) -> tuple[Requests, Buckets]:
    """Return the requests of a lowered graph, whose buckets are ``found``, and which share a bucket."""
    read = _Reader(compute, cluster)
    all_gathers, reductions = list[tuple[AllGatherRequest, ...]](), list[tuple[ReductionRequest, ...]]()
    for lowered in found:
        bucket, results = lowered.bucket, (lowered.to_host or lowered.collectives[-1]).results
        inputs = nodes.inputs_of(lowered.collectives[0].launch)
        parts = [(p, node, results.get(i)) for i, (p, node) in enumerate(zip(bucket.params, inputs, strict=True))]
        if isinstance(bucket, AllGatherBucket):
            all_gathers.append(tuple(read.all_gather(p, bucket.spec, shard, out) for p, shard, out in parts))
        else:
            reductions.append(tuple(read.reduction(p, bucket.spec, grad, out) for p, grad, out in parts))
    return (
        Requests(compute.time(cluster), tuple(chain(*all_gathers)), tuple(chain(*reductions)), cluster),
        Buckets(tuple(all_gathers), tuple(reductions)),
    )


def collectives_of(found: Sequence[LoweredBucket]) -> dict[tuple[Kind, int], tuple[LoweredBucket, Stage]]:
    """Return the collectives of ``found`` by the kind and the index that their actions have."""
    kinds: dict[type, tuple[Kind, ...]]
    kinds = {AllGatherBucket: ("all_gather",), ReductionBucket: ("reduction", "all_reduce")}
    return {
        (kind, index): (lowered, stage)
        for of_kind in kinds
        for index, lowered in numbered(found, of_kind)
        for kind, stage in zip(kinds[of_kind], lowered.collectives, strict=False)
    }


def actions_of(graph: fx.Graph, found: Sequence[LoweredBucket]) -> list[Action]:
    """Return the launches and waits of ``found`` as they stand in ``graph``."""
    known: dict[fx.Node, tuple[Half, Kind, int]] = {}
    for (kind, index), (_, stage) in collectives_of(found).items():
        known |= {stage.launch: ("launch", kind, index), stage.wait: ("wait", kind, index)}
    compute, actions, position = Compute(graph, is_ours), list[Action](), 0
    for node in graph.nodes:
        position = compute.position.get(node, position - 1) + 1
        if node in known:
            actions.append(Action(position, *known[node]))
    return actions


def numbered(found: Sequence[LoweredBucket], kind: type) -> Iterator[tuple[int, LoweredBucket]]:
    """Yield the buckets of one kind with their index among those."""
    return iter(enumerate(lowered for lowered in found if isinstance(lowered.bucket, kind)))


def is_ours(node: fx.Node) -> bool:
    """Tell whether ``node`` is a launch, a wait, or takes a result out of a wait."""
    if nodes.is_getitem(node):
        return nodes.is_wait(nodes.list_of(node))
    return nodes.is_launch(node) or nodes.is_wait(node)
