"""Decides where collectives are launched and waited for: one bucket ahead in forward and backward.

It must not know parameters or units; it sees launches, waits and the order of compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from . import ir


@dataclass(frozen=True)
class Reorder:
    """Overlaps each collective with one bucket's compute. Numerics cannot change.

    ::

        G0 W0 c0 G1 W1 c1 G2 W2 c2        ->  G0 G1 W0 c0 G2 W1 c1 W2 c2
        c0 R0 V0 c1 R1 V1 c2 R2 V2        ->  c0 R0 c1 R1 V0 c2 R2 V1 V2

    with gathers ``G`` / ``W``, reductions ``R`` / ``V`` and compute ``c``. Besides buckets that are read again
    later, such as the root's, at most two gathered buckets and two of unreduced gradients are alive, as in FSDP2.
    """

    def __call__(self, graph: fx.Graph) -> None:
        gathers = [node for node in graph.nodes if ir.is_gather_launch(node)]
        for launch, following in pairwise(gathers):
            _move_with_inputs(following, _wait_of(launch))
        # The all-reduce over replicas starts where its reduce-scatter is waited for.
        for is_reduction in (ir.is_scatter_launch, ir.is_all_reduce_launch):
            reductions = [node for node in graph.nodes if is_reduction(node)]
            for launch, following in pairwise(reductions):
                ir.move_behind([_wait_of(launch)], following)


def _wait_of(launch: fx.Node) -> fx.Node:
    (wait,) = launch.users
    return wait


def _move_with_inputs(node: fx.Node, target: fx.Node) -> None:
    """Move ``node``, and whatever it needs that stands after ``target``, to just before ``target``."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    for needed in ir.closure([node], lambda n: n.all_input_nodes, lambda n: order[n] > order[target], order):
        target.prepend(needed)
