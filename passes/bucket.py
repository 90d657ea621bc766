"""Decides which all-gathers and which reductions of a graph share a collective.

It writes the decision beside each opaque node; it must not emit anything, nor say when a bucket is launched.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .graph import nodes
from .graph.liveness import cluster_of
from .graph.requests import opaque_requests
from .planning.buckets import decide_buckets
from .schedule_policy import DEFAULT, SchedulePolicy


@dataclass(frozen=True)
class Bucket:
    """Assigns every opaque node that travels to a bucket. Numerics cannot change: a bucket only concatenates.

    ::

        w1 = unshard(s1); w2 = unshard(s2)    ->  the same, both assigned to bucket 0
    """

    policy: SchedulePolicy = DEFAULT

    def __call__(self, graph: fx.Graph) -> None:
        opaque = list(filter(nodes.travels, graph.nodes))
        if not opaque:
            return
        requests = opaque_requests(graph, opaque, cluster_of(graph, self.policy.cluster), self.policy.tokens)
        buckets = decide_buckets(requests, self.policy)
        joined = [[request.index for request in bucket] for bucket in buckets.all_gathers]
        joined += [[request.index for request in bucket] for bucket in buckets.reductions]
        for number, indices in enumerate(joined):
            for index in indices:
                opaque[index].meta[nodes.BUCKET] = number
