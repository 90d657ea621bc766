"""Decides which gathers and which reductions of a graph share a collective.

It writes the decision beside each opaque node; it must not emit anything, nor say when a bucket is launched.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache

from torch import fx

from . import grouping, ir
from .cost import Cluster, GatherKind
from .grouping import Member, Wire, Work
from .policy import DEFAULT, SchedulePolicy
from .route import Route, scaling_of
from .schedule import Gather, Reduction
from .survey import Compute, cluster_of, is_returned


@dataclass(frozen=True)
class Bucket:
    """Gives every opaque node that communicates its bucket. Numerics cannot change: a bucket only concatenates.

    ::

        w1 = unshard(s1); w2 = unshard(s2)    ->  the same, both with a ticket for bucket 0
    """

    policy: SchedulePolicy = DEFAULT

    def __call__(self, graph: fx.Graph) -> None:
        nodes = [n for n in graph.nodes if ir.is_unshard(n) or ir.is_reduce_grad(n)]
        plan = grouping.decide_buckets(work_of(graph, nodes, cluster_of(graph, self.policy.cluster)), self.policy)
        buckets = [[member.index for member in bucket] for bucket in plan.gathers]
        buckets += [[member.index for member in bucket] for bucket in plan.reductions]
        for number, bucket in enumerate(buckets):
            for index in bucket:
                ir.give_ticket(nodes[index], ir.Ticket(number, plan.bound_bytes))


def work_of(graph: fx.Graph, nodes: list[fx.Node], cluster: Cluster) -> Work:
    """Return what ``nodes``, the opaque ones of ``graph``, ask for; a member's index is the node's."""
    compute = Compute(graph, lambda node: ir.is_unshard(node) or ir.is_reduce_grad(node))
    wire = cache(lambda groups: _wire(groups, cluster))
    gathers, reductions = [], []
    for index, node in enumerate(nodes):
        route, reads = ir.route_of(node), compute.reads([node])
        size = ir.travelling_bytes(node)
        exists = compute.after([ir.source_of(node)])
        if ir.is_unshard(node) and (route.shard_world > 1 or ir.gathers_beside_compute(node)):
            kept = size if is_returned(node) else 0
            gather = Gather(size, 0.0, reads.first, reads.last, min(exists, reads.first), kept)
            over = replace(wire(_groups(route)), device=ir.value_of(node).device.type, kind=_kind_of(node, route))
            gathers.append(Member(index, route.param, _gather_key(route), route.unit, over, gather, route.dim))
        elif ir.is_reduce_grad(node) and route.communicates:
            reduction = Reduction(((exists - 1, size),), 0.0, reads.first)
            over = replace(wire(_groups(route)), moves_to_host=ir.changes_device(ir.source_of(node), node))
            is_row = ir.is_row(node) or not ir.has_streams(node)
            reductions.append(
                Member(index, route.param, _reduce_key(route), route.unit, over, reduction, is_row=is_row)
            )
    gathers.sort(key=lambda member: member.alone.first)
    reductions.sort(key=lambda member: member.alone.ready)
    return Work(compute.time(cluster), tuple(gathers), tuple(reductions), cluster)


def _gather_key(route: Route) -> tuple[Hashable, ...]:
    return route.shard_group, route.shard_world, route.dtype, route.gather_comm, route.device


def _reduce_key(route: Route) -> tuple[Hashable, ...]:
    groups = (route.scatter_group, route.shard_world, route.replicate_group, route.replicate_world)
    unit = route.unit if route.reduce_hook or route.reduce_comm else ""  # the user's code sees units
    return *groups, route.reduce_dtype, scaling_of(route), route.reduce_comm, route.reduce_hook, route.device, unit


def _kind_of(node: fx.Node, route: Route) -> GatherKind:
    shard, beside = ir.source_of(node), ir.gathers_beside_compute(node)
    return GatherKind(
        in_place=beside and not route.gather_comm,
        beside=beside,
        lasting=ir.is_parameter(shard),
        from_host=ir.changes_device(shard, node),
    )


def _groups(route: Route) -> tuple[str, int, str, int]:
    return route.shard_group, route.shard_world, route.replicate_group, route.replicate_world


def _wire(groups: tuple[str, int, str, int], cluster: Cluster) -> Wire:
    shard_group, shard_world, replicate_group, replicate_world = groups
    link, second = cluster.link(shard_group, shard_world), cluster.link(replicate_group, replicate_world)
    return Wire(
        link,
        shard_world,
        cluster.lane(link),
        second if replicate_world > 1 else None,
        replicate_world,
        cluster.lane(second),
    )
