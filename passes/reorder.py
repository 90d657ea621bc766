"""Puts launches and waits where the schedule wants them.

It reads a lowered graph into records, lets :mod:`schedule` decide, and moves nodes; it must not know parameters or
units, and it leaves compute in the order that it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from . import ir, schedule
from .policy import DEFAULT, SchedulePolicy
from .schedule import Action
from .survey import Compute, Flight, cluster_of, compute_of, flights, landing, load_of

# Which of a flight's stages an action places. An all-reduce is launched where its reduce-scatter's wait ends.
_STAGE = {
    ("gather", "launch"): 0,
    ("gather", "wait"): 1,
    ("reduction", "launch"): 0,
    ("reduction", "wait"): 1,
    ("second", "wait"): 2,
}


@dataclass(frozen=True)
class Reorder:
    """Launches early and waits late, inside the memory bound. Numerics cannot change.

    ::

        G0 W0 c0 G1 W1 c1 G2 W2 c2        ->  G0 G1 W0 c0 G2 W1 c1 W2 c2
        c0 R0 V0 c1 R1 V1 c2 R2 V2        ->  c0 R0 c1 R1 c2 R2 V0 V1 V2

    with gathers ``G`` / ``W``, reductions ``R`` / ``V`` and compute ``c``. The host waits last of all, for
    gradients that move to it.
    """

    policy: SchedulePolicy = DEFAULT

    def __call__(self, graph: fx.Graph) -> None:
        found, landed = flights(graph), landing(graph)
        if not found and not landed:
            return
        compute = compute_of(graph, found)
        actions = self._decide(graph, compute, found) if found else []
        ir.put_in_order(_order(graph, compute, found, actions, landed), graph)

    def _decide(self, graph: fx.Graph, compute: Compute, found: list[Flight]) -> list[Action]:
        load = load_of(graph, compute, found, cluster_of(graph, self.policy.cluster))
        least = max(schedule.least_bytes(load))
        bound = self.policy.in_flight_bytes
        bound_bytes = max(f.bundle.bound_bytes for f in found) if bound == "auto" else bound
        return schedule.decide(
            load, max(bound_bytes, least), None if self.policy.prefetch == "auto" else self.policy.prefetch
        )


def _order(
    graph: fx.Graph, compute: Compute, found: list[Flight], actions: list[Action], landed: list[fx.Node]
) -> Iterator[fx.Node]:
    yield from (node for node in list(graph.nodes) if node.op == "placeholder")
    gathers = [flight.stages() for flight in found if not flight.bundle.reduces]
    reductions = [flight.stages() for flight in found if flight.bundle.reduces]
    placed = 0
    for action in (action for action in actions if (action.kind, action.verb) in _STAGE):
        yield from compute.nodes[placed : action.position]
        placed = action.position
        stages = (gathers if action.kind == "gather" else reductions)[action.index]
        yield from stages[_STAGE[action.kind, action.verb]]
    yield from compute.nodes[placed:]
    yield from landed
