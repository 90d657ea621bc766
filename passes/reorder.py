"""Puts launches and waits where the schedule wants them.

It reads a lowered graph into records, lets :mod:`planning.schedule` decide, and moves nodes; it must not know
parameters or units, and it leaves compute in the order that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from .graph import nodes
from .graph.anchors import AnchoredCompute
from .graph.liveness import Compute, cluster_of
from .graph.requests import (
    LoweredBucket,
    Stage,
    collectives_of,
    is_ours,
    lowered_buckets,
    lowered_requests,
)
from .planning.buckets import auto_bound
from .planning.requests import load_of
from .planning.schedule import decide
from .planning.tasks import Action, least_bytes
from .schedule_policy import DEFAULT, SchedulePolicy


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
            compute = AnchoredCompute(graph, is_ours, self.policy.tokens)
            order = _Order(compute, found)
            order.follow(self._decide(graph, compute, found))
            nodes.put_in_order(order.complete(graph), graph)

    def _decide(self, graph: fx.Graph, compute: Compute, found: Sequence[LoweredBucket]) -> list[Action]:
        requests, buckets = lowered_requests(compute, found, cluster_of(graph, self.policy.cluster))
        load = load_of(requests, buckets)
        bound, prefetch = self.policy.in_flight_bytes, self.policy.prefetch
        bound_bytes = max(auto_bound(requests) if bound == "auto" else bound, *least_bytes(load))
        return decide(load, bound_bytes, None if prefetch == "auto" else prefetch)


class _Order:
    """Nodes put one behind the other: compute as it stood, collectives where a schedule has them.

    What a node reads comes before it. So an all-gather is waited for by the first node that reads it, and whatever
    prepares a launch comes before that launch.
    """

    def __init__(self, compute: Compute, found: Sequence[LoweredBucket]) -> None:
        self._compute, self._found = compute, found
        self._placed: dict[fx.Node, None] = {}  # in order
        self._next = 0  # compute node
        stages = [stage for each in found for stage in (*each.collectives, each.to_host) if stage is not None]
        self._waiting = {node: stage.waiting for stage in stages for node in stage.waiting}

    def follow(self, actions: Sequence[Action]) -> None:
        """Place what the actions start and wait for; after a bucket's last wait, the copy to the host starts."""
        collectives = collectives_of(self._found)
        for action in actions:
            self._compute_until(action.position)
            lowered, stage = collectives[action.kind, action.index]
            if action.verb == "launch":
                self._place(stage.launch)
            elif action.kind != "all_gather":
                self._place(stage.wait)
                if stage is lowered.collectives[-1] and lowered.to_host is not None:
                    self._place(lowered.to_host.wait if _is_read(lowered.to_host) else lowered.to_host.launch)

    def complete(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Place what is left and return all nodes; the host waits last."""
        self._compute_until(self._compute.end + 1)
        late = {node: None for each in self._found if each.to_host is not None for node in each.to_host.waiting}
        late |= dict.fromkeys(graph.find_nodes(op="output"))
        for node in (*(node for node in graph.nodes if node not in late), *late):
            self._place(node)
        return [*graph.find_nodes(op="placeholder"), *self._placed]

    def _compute_until(self, position: int) -> None:
        nodes_in_order, position_of = self._compute.nodes, self._compute.position
        while self._next < len(nodes_in_order) and position_of[nodes_in_order[self._next]] < position:
            self._place(nodes_in_order[self._next])
            self._next += 1

    def _place(self, node: fx.Node) -> None:
        if node in self._placed or node.op == "placeholder":
            return
        for source in node.all_input_nodes:
            self._place(source)
        if node not in self._placed:  # results stand behind their wait
            self._placed |= dict.fromkeys(self._waiting.get(node, (node,)))


def _is_read(stage: Stage) -> bool:
    """Tell whether the graph computes with the results, rather than only return them."""
    return any(user.op != "output" for result in stage.results.values() for user in result.users)
