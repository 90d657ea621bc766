"""Buckets collectives and puts their launches and waits where the schedule wants them.

It collects requests, lets :mod:`planning` decide once, and emits that plan as it is; compute keeps its order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count

import torch
from torch import fx

from ..sharding.spec import Bucket
from .cost import Cluster
from .cost.compute import is_view
from .graph import nodes
from .graph.anchors import AnchoredCompute
from .graph.emit import do_locally, emit
from .kinds import Request
from .planning.buckets import decide
from .planning.tasks import Requests, in_order
from .schedule_policy import DEFAULT, SchedulePolicy
from .torch_internals import config


@dataclass(frozen=True)
class Schedule:
    """One launch and one wait for each collective, early and late, inside the memory bound. Numerics cannot change.

    ::

        w1 = unshard(s1); c1; w2 = unshard(s2); c2
            ->  G1 = launch_all_gather([s1]); G2 = launch_all_gather([s2]); w1 = wait(G1); c1; w2 = wait(G2); c2
        c1; d1 = reduce_grad(g1); c2; d2 = reduce_grad(g2)
            ->  c1; c2; R = launch_reduce_scatter([g1, g2]); d1, d2 = wait(R)

    Over replicas a pair ``launch_all_reduce``, ``wait_all_reduce`` follows on the handle that the wait before it
    returned; where shards live on the CPU, ``launch_copy_to_host`` and ``wait_copy_to_host``, for which the host
    waits last of all. On one rank, where nothing travels, casts are left.
    """

    policy: SchedulePolicy = DEFAULT

    def __call__(self, graph: fx.Graph) -> None:
        asked, written = dict[fx.Node, Bucket](), nodes.written_of(graph)
        for node in nodes.opaque_nodes_of(graph):
            bucket = nodes.asked_of(node)
            if bucket.spec.local_steps(bucket.params[0]) is not None:
                do_locally(node, written)
            else:
                asked[node] = bucket
        if not asked:
            return
        if config.triton.cudagraphs and any(_computes_on(node).type != "cpu" for node in asked):
            raise NotImplementedError(
                "CUDA graphs (mode='reduce-overhead' or 'max-autotune') cannot hold collectives that other streams "
                "run; compile with mode='max-autotune-no-cudagraphs' or the default"
            )
        if config.cpp_wrapper:
            raise NotImplementedError(
                "cpp_wrapper (an option of Inductor) cannot call collectives, which Python does; compile without it"
            )
        cluster = self.policy.cluster_for(nodes.device_of(graph))
        compute = AnchoredCompute(graph, asked.__contains__, self.policy.tokens_on(cluster))
        plan = decide(_requests_of(asked, written, compute, cluster), self.policy)
        emit(plan, list(asked), written, compute, cluster)


def _requests_of(
    asked: Mapping[fx.Node, Bucket], written: Mapping[Hashable, fx.Node], compute: AnchoredCompute, cluster: Cluster
) -> Requests:
    """Return what opaque nodes ask for, given the bucket of each alone; a request's index is its node's."""
    lane = cache(cluster.lane)
    number = defaultdict[Hashable, int](count().__next__)  # of a key, which is faster to compare

    def request(index: int, node: fx.Node, alone: Bucket) -> Request:
        kind, source, param = nodes.kind_of(node), nodes.source_of(node), params[index]
        (size,), (first, last), ready = alone.sizes, compute.reads(node), compute.after(source)
        return Request(
            index,
            kind,
            param,
            alone.spec,
            size,
            ready=min(ready, first) if kind.is_ahead else ready,
            needed=first,
            last=last,
            lanes=tuple(lane(alone.group_of(stage)) for stage in alone.stages),
            made=None if kind.is_ahead else ready - 1,
            kept_bytes=size if kind.is_ahead and _is_returned(node) else 0,
            inputs_persist=nodes.is_parameter(source) and nodes.memory_of(source) not in written,
            key=number[kind.opaque, alone.spec.key(param)],
        )

    params = nodes.params_of(asked)
    each = (request(index, *each) for index, each in enumerate(asked.items()))
    return Requests(compute.time(cluster), in_order(each), cluster)


def _computes_on(opaque: fx.Node) -> torch.device:
    """Return the device where compute uses what an opaque node makes, or makes what it takes."""
    return nodes.value_of(opaque if nodes.kind_of(opaque).is_ahead else nodes.source_of(opaque)).device


def _is_returned(node: fx.Node) -> bool:
    """Tell whether the graph returns ``node`` or a view of it, as forward does with what it keeps for backward."""
    return any(user.op == "output" or (is_view(user) and _is_returned(user)) for user in node.users)
