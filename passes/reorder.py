"""Puts launches and waits where the schedule wants them.

It reads a lowered graph into records, lets :mod:`planning.schedule` decide, and moves nodes; it must not know
parameters or units, and it leaves compute in the order that it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from .graph import nodes
from .graph.liveness import Compute, cluster_of
from .graph.requests import LoweredBucket, Stage, collectives_of, is_ours, lowered_buckets, lowered_requests
from .planning.buckets import auto_bound
from .planning.requests import load_of
from .planning.schedule import decide
from .planning.tasks import Action, least_bytes
from .policy import DEFAULT, SchedulePolicy


@dataclass(frozen=True)
class Reorder:
    """Launches early and waits late, inside the memory bound. Numerics cannot change.

    ::

        G0 W0 c0 G1 W1 c1 G2 W2 c2        ->  G0 G1 W0 c0 G2 W1 c1 W2 c2
        c0 R0 V0 c1 R1 V1 c2 R2 V2        ->  c0 R0 c1 R1 c2 R2 V0 V1 V2

    with all-gathers ``G`` / ``W``, reductions ``R`` / ``V`` and compute ``c``. The host waits last of all, for
    gradients that are copied to it.
    """

    policy: SchedulePolicy = DEFAULT

    def __call__(self, graph: fx.Graph) -> None:
        found = lowered_buckets(graph)
        if found:
            nodes.put_in_order(list(_order(graph, found, self._decide(graph, found))), graph)

    def _decide(self, graph: fx.Graph, found: Sequence[LoweredBucket]) -> list[Action]:
        requests, buckets = lowered_requests(graph, found, cluster_of(graph, self.policy.cluster))
        load = load_of(requests, buckets)
        bound, prefetch = self.policy.in_flight_bytes, self.policy.prefetch
        bound_bytes = max(auto_bound(requests) if bound == "auto" else bound, *least_bytes(load))
        return decide(load, bound_bytes, None if prefetch == "auto" else prefetch)


def _order(graph: fx.Graph, found: Sequence[LoweredBucket], actions: Sequence[Action]) -> Iterator[fx.Node]:
    """Yield all nodes; after a bucket's last wait, the copy to the host starts."""
    yield from (node for node in graph.nodes if node.op == "placeholder")
    compute, collectives, placed = Compute(graph, is_ours).nodes, collectives_of(found), 0
    for action in actions:
        yield from compute[placed : action.position]
        placed = action.position
        lowered, stage = collectives[action.kind, action.index]
        if action.verb == "launch":
            yield stage.launch
            continue
        yield from stage.waiting
        if stage is lowered.collectives[-1] and lowered.to_host is not None:
            yield lowered.to_host.launch
            if _is_read(lowered.to_host):
                yield from lowered.to_host.waiting
    yield from compute[placed:]
    copies = (lowered.to_host for lowered in found)
    yield from (node for copy in copies if copy and not _is_read(copy) for node in copy.waiting)


def _is_read(stage: Stage) -> bool:
    """Tell whether the graph computes with the results, rather than only return them."""
    return any(user.op != "output" for result in stage.results.values() for user in result.users)
