"""Makes Inductor keep collectives where the graph has them.

Inductor reorders for peak memory by default, which undoes prefetch; control dependencies bind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .graph import nodes
from .torch_internals import OrderedSet, preserve_node_ordering


@dataclass(frozen=True)
class Pin:
    """Binds every launch and wait to its neighbours in the graph's order. Numerics cannot change.

    ::

        G0 G1 W0 c0 G2 c1 W1    ->  G1 after G0, W0 after G1, G2 after c0, W1 after (G2, c1)

    Each launch or wait follows the one before it, and the heavy compute between the two; what its other neighbours
    follow by their inputs, as c0 follows W0, is left out. So a launch can be neither hoisted, which would break the
    memory bound, nor sunk past the next wait, and a wait cannot be hoisted, which would expose the collective. The
    same holds for copies to the host.
    """

    def __call__(self, graph: fx.Graph) -> None:
        if nodes.is_pinned(graph):
            return
        dependencies: dict[fx.Node, OrderedSet[fx.Node]] = {}
        # The collective node before and the heavy compute since, each with what stands for it: of a list one result,
        # since control dependencies cannot name a list, and Inductor's work is quadratic in them.
        after: dict[fx.Node, fx.Node] = {}
        known: dict[fx.Node, set[fx.Node]] = {}  # which of those a node follows by its inputs
        for node in graph.nodes:
            known[node] = {each for source in node.all_input_nodes for each in known[source] if each in after}
            if nodes.is_getitem(node):
                if not nodes.is_part(node) and after.get(source := nodes.list_of(node)) is source:
                    after[source] = node
            elif nodes.operator_of(node).startswith(("launch_", "wait_")):
                others = OrderedSet(each for each in after.values() if nodes.region_of(each) is None)
                if others := others - OrderedSet(node.all_input_nodes):
                    dependencies[node] = others
                after, known[node] = {node: node}, {node}
            elif nodes.is_heavy(node):
                for each in known[node]:
                    del after[each]
                after[node], known[node] = node, {node}
        preserve_node_ordering(graph, dependencies)
