"""Gives every parameter one all-gather and one reduction per graph, however often it is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from .graph import emit, nodes

aten = torch.ops.aten


@dataclass(frozen=True)
class Normalize:
    """One unshard and one reduce_grad per parameter and graph, and what uses reduced gradients at the end.

    ::

        w = unshard(s); v = unshard(s)                 ->  w = v = unshard(s)
        v = unshard(take_shard(w))                     ->  v = w
        d = reduce_grad(a) + reduce_grad(b)            ->  d = reduce_grad(a + b)
        d = reduce_grad(a); e = d * 2; c = mm(...)     ->  d = reduce_grad(a); c = mm(...); e = d * 2

    Numerics: the third rewrite adds gradients before the mean over ranks rather than after it, in
    ``reduce_dtype``; that rounds in another order.
    """

    def __call__(self, graph: fx.Graph) -> None:
        _merge_all_gathers(graph)
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            if _adds_two_reductions(node):
                _reduce_the_sum(node)
        late = _users_of(nodes.calls_of(graph, "reduce_grad"))
        order = list(graph.nodes)
        emit.put_in_order([each for is_late in (False, True) for each in order if (each in late) == is_late])


def _users_of(reductions: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that use reduced gradients, or what is computed from them."""
    found, stack = set[fx.Node](), list(reductions)
    while stack:
        users = stack.pop().users.keys() - found
        found |= users
        stack += users
    return found


def _merge_all_gathers(graph: fx.Graph) -> None:
    """Drop all-gathers of what the graph has unsharded already, as it is or cut for a smaller group."""
    first: dict[object, fx.Node] = {}
    for node in nodes.calls_of(graph, "unshard"):
        shard = nodes.source_of(node)
        is_cut = nodes.operator_of(shard) == "take_shard"
        kept = nodes.source_of(shard) if is_cut else first.setdefault((shard, nodes.spec_of(node)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
        if is_cut and not shard.users:
            graph.erase_node(shard)


def _adds_two_reductions(node: fx.Node) -> bool:
    terms = node.all_input_nodes  # each once
    return (
        not node.kwargs
        and len(terms) == 2
        and all(nodes.operator_of(term) == "reduce_grad" and len(term.users) == 1 for term in terms)
        and nodes.spec_of(terms[0]) == nodes.spec_of(terms[1])
    )


def _reduce_the_sum(node: fx.Node) -> None:
    reductions = node.all_input_nodes
    spec = nodes.spec_of(reductions[0])
    terms = [emit.insert_cast(node, nodes.source_of(reduction), spec.reduction.dtype) for reduction in reductions]
    node.replace_all_uses_with(emit.insert_reduce_grad(node, emit.insert(node, aten.add.Tensor, *terms), spec))
    for dead in (node, *reductions):
        node.graph.erase_node(dead)
