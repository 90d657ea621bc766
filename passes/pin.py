"""Makes Inductor keep collectives where the graph has them.

Inductor reorders for peak memory by default, which undoes prefetch; control dependencies bind it. This pass must
not choose an order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

from .graph import nodes


@dataclass(frozen=True)
class Pin:
    """Binds every launch and wait to its neighbours in the graph's order. Numerics cannot change.

    ::

        G0 G1 W0 c0 G2 c1 W1    ->  G1 after G0, W0 after G1, G2 after (W0, c0), W1 after (G2, c1)

    Each launch or wait follows the one before it, and the heavy compute between the two. So a launch can be neither
    hoisted, which would break the memory bound, nor sunk past the next wait, and a wait cannot be hoisted, which
    would expose the collective. The same holds for copies to the host.
    """

    def __call__(self, graph: fx.Graph) -> None:
        if any("control_deps" in str(node.target) for node in graph.nodes):
            return
        dependencies: dict[fx.Node, OrderedSet[fx.Node]] = {}
        after: list[fx.Node] = []  # the collective node before, and the heavy compute since
        for node in graph.nodes:
            if nodes.is_getitem(node) and nodes.source_of(node) in after[:1]:
                after[0] = node  # of a wait's list, every result would be a dependency: one stands for it
            elif nodes.is_heavy(node):
                after.append(node)
            elif nodes.is_launch(node) or nodes.is_wait(node):
                if others := [earlier for earlier in after if earlier not in node.all_input_nodes]:
                    dependencies[node] = OrderedSet(others)
                after = [node]
        preserve_node_ordering(graph, dependencies)
