"""Buckets collectives and puts their launches and waits where the schedule wants them.

It collects requests, lets :mod:`planning` decide once, and emits that plan as it is. It must not know parameters or
units, and it leaves compute in the order that it has.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch._inductor import config  # see inductor.py

from .graph import nodes
from .graph.anchors import AnchoredCompute
from .graph.emit import do_locally, emit
from .graph.read import cluster_of, computes_on, requests_of
from .planning.buckets import decide
from .schedule_policy import DEFAULT, SchedulePolicy


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
        asking = [node for node in graph.nodes if nodes.opaque_kind(node) is not None]
        opaque = [node for node in asking if nodes.travels(node)]
        _require_no_cuda_graphs(opaque)
        for node in asking:
            if not nodes.travels(node):
                do_locally(node)
        if opaque:
            cluster = cluster_of(graph, self.policy.cluster)
            compute = AnchoredCompute(graph, set(opaque).__contains__, self.policy.tokens)
            emit(decide(requests_of(opaque, compute, cluster), self.policy), opaque, compute, cluster)


def _require_no_cuda_graphs(opaque: list[fx.Node]) -> None:
    if config.triton.cudagraphs and any(computes_on(node).type != "cpu" for node in opaque):
        raise NotImplementedError(
            "CUDA graphs (mode='reduce-overhead' or 'max-autotune') cannot hold collectives that other streams run; "
            "compile with mode='max-autotune-no-cudagraphs' or the default"
        )
