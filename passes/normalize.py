"""Gives every parameter one gather and one reduction per graph, however often it is read.

It compares routes and shards; it must not know buckets or order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from . import emitter, ir
from .emitter import Emitter

aten = torch.ops.aten


@dataclass(frozen=True)
class Normalize:
    """One unshard and one reduce_grad per parameter and graph, and what uses reduced gradients at the end.

    ::

        w = unshard(s); v = unshard(s)                 ->  w = v = unshard(s)
        v = unshard(take_shard(w))                     ->  v = w
        d = reduce_grad(a) + reduce_grad(b)            ->  d = reduce_grad(a + b)
        d = reduce_grad(a); e = d * 2; c = mm(...)     ->  d = reduce_grad(a); c = mm(...); e = d * 2

    Numerics: the second rewrite adds gradients before the mean over ranks rather than after it, in
    ``reduce_dtype``; that rounds in another order.
    """

    def __call__(self, graph: fx.Graph) -> None:
        _drop_gathers_of_the_whole(graph)
        _merge_gathers(graph)
        for node in list(graph.nodes):
            if _adds_two_reductions(node):
                _reduce_the_sum(node)
        _put_users_of_reduced_gradients_last(graph)


def _drop_gathers_of_the_whole(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if ir.is_unshard(node) and ir.is_take_shard(ir.source_of(node)):
            node.replace_all_uses_with(ir.source_of(ir.source_of(node)))
            graph.erase_node(node)
    for node in list(graph.nodes):
        if ir.is_take_shard(node) and not node.users:
            graph.erase_node(node)


def _merge_gathers(graph: fx.Graph) -> None:
    first: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if ir.is_unshard(node):
            kept = first.setdefault((ir.source_of(node), ir.route_of(node)), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)


def _adds_two_reductions(node: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    left, right = node.args
    return (
        isinstance(left, fx.Node)
        and isinstance(right, fx.Node)
        and left is not right
        and ir.is_reduce_grad(left)
        and ir.is_reduce_grad(right)
        and len(left.users) == len(right.users) == 1
        and ir.route_of(left) == ir.route_of(right)
    )


def _reduce_the_sum(node: fx.Node) -> None:
    emit = Emitter(before=node)
    left, right = node.all_input_nodes
    route = ir.route_of(left)
    terms = [emit.cast(ir.source_of(reduction), route.reduce_dtype) for reduction in (left, right)]
    total = emitter.reduce_grad(emit, emit(aten.add.Tensor, *terms), route)
    node.replace_all_uses_with(total)
    for dead in (node, left, right):
        node.graph.erase_node(dead)


def _put_users_of_reduced_gradients_last(graph: fx.Graph) -> None:
    early, late = list[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if any(source in late or ir.is_reduce_grad(source) for source in node.all_input_nodes):
            late.add(node)
        else:
            early.append(node)
    ir.put_in_order([*early, *(node for node in graph.nodes if node in late)], graph)
