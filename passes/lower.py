"""Replaces the library's opaque operators by functional collectives, one bucket per unit.

It reads the route in each node's arguments and emits plain ATen and ``_c10d_functional`` nodes; it must not
know modules, and it does not choose a schedule: a bucket is launched where its first gather is needed, or where
its last gradient is ready.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from . import ir

aten = torch.ops.aten


@dataclass(frozen=True)
class Member:
    """One gather or reduction that may join a bucket.

    Args:
        index: position of the node in the graph.
        key: members with equal keys may share a collective.
        after: indices of the members whose results this one is computed from.
    """

    index: int
    key: Hashable
    after: frozenset[int] = frozenset()


def decide_buckets(members: Sequence[Member]) -> list[list[int]]:
    """Group members by key, in order; one that needs another's result opens a new bucket.

    Returns:
        The members' indices, one list per collective, ordered by first member.
    """
    buckets: list[list[int]] = []
    open_bucket: dict[Hashable, list[int]] = {}
    bucket_of: dict[int, list[int]] = {}
    for member in members:
        bucket = open_bucket.get(member.key)
        if bucket is None or any(_reaches(bucket_of[m], bucket, bucket_of, members) for m in member.after):
            bucket = open_bucket[member.key] = []
            buckets.append(bucket)
        bucket.append(member.index)
        bucket_of[member.index] = bucket
    return buckets


def _reaches(start: list[int], goal: list[int], bucket_of: dict[int, list[int]], members: Sequence[Member]) -> bool:
    """Tell whether bucket ``start`` is ``goal`` or is computed from it."""
    after = {m.index: m.after for m in members}
    stack, seen = [start], set()
    while stack:
        bucket = stack.pop()
        if bucket is goal:
            return True
        if id(bucket) not in seen:
            seen.add(id(bucket))
            stack += [bucket_of[m] for index in bucket for m in after[index]]
    return False


@dataclass(frozen=True)
class Lower:
    """One collective per unit, shard group and dtype. Numerics cannot change: a bucket only concatenates.

    ::

        w1 = unshard(s1); w2 = unshard(s2)
            ->  row = cat(s1, s2); w1, w2 = split(wait(all_gather(row)))
        d1 = reduce_grad(g1); d2 = reduce_grad(g2)
            ->  rows = cat(chunks(g1), chunks(g2)); d1, d2 = split(wait(reduce_scatter(rows)))
    """

    def __call__(self, graph: fx.Graph) -> None:
        for bucket in _bucketed(_gathers(graph)):
            _lower_gather(bucket)
        for bucket in _bucketed(_reductions(graph)):
            _lower_reduction(bucket)


def _gather_key(node: fx.Node) -> Hashable:
    route = ir.route_of(node)
    # What is not a graph input may not exist yet at the bucket's first member: it travels alone.
    alone = None if ir.source_of(node).op == "placeholder" else node.name
    return (route.unit, route.shard_group, route.shard_world, route.dtype, alone)


def _reduce_key(node: fx.Node) -> Hashable:
    route = ir.route_of(node)
    return (route.unit, route.shard_group, route.shard_world, route.replicate_group, route.reduce_dtype)


def _gathers(graph: fx.Graph) -> dict[fx.Node, Member]:
    return {n: Member(i, _gather_key(n)) for i, n in enumerate(graph.nodes) if ir.is_unshard(n)}


def _reductions(graph: fx.Graph) -> dict[fx.Node, Member]:
    """Collect reductions, each with the nearest others that it is computed from; usually there are none."""
    members: dict[fx.Node, Member] = {}
    upstream: dict[fx.Node, frozenset[int]] = {}  # of the nodes that are computed from members
    for index, node in enumerate(graph.nodes):
        sources = [{members[n].index} if n in members else upstream.get(n, ()) for n in node.all_input_nodes]
        after = frozenset[int]().union(*sources)
        if ir.is_reduce_grad(node):
            members[node] = Member(index, _reduce_key(node), after)
        elif after:
            upstream[node] = after
    return members


def _bucketed(members: dict[fx.Node, Member]) -> list[list[fx.Node]]:
    at = {member.index: node for node, member in members.items()}
    return [[at[index] for index in bucket] for bucket in decide_buckets(list(members.values()))]


# ---- all-gather ----


def _lower_gather(bucket: Sequence[fx.Node]) -> None:
    emit = ir.Emitter(before=bucket[0])
    route = ir.route_of(bucket[0])
    row = _concatenate(emit, [_flat(emit, emit.cast(ir.source_of(node), route.dtype)) for node in bucket])
    rows = _all_gather(emit, row, route)
    pieces = _split_columns(emit, rows, [ir.value_of(ir.source_of(node)).numel() for node in bucket])
    unsharded = [_join_chunks(emit, piece, ir.route_of(node)) for piece, node in zip(pieces, bucket, strict=True)]
    for node, whole in zip(bucket, unsharded, strict=True):
        _replace(node, whole)


def _all_gather(emit: ir.Emitter, row: fx.Node, route: ir.Route) -> fx.Node:
    """Return ``[world, numel]``: every rank's row."""
    if route.shard_world > 1:
        c10d = torch.ops._c10d_functional
        launch = emit(c10d.all_gather_into_tensor.default, row, route.shard_world, route.shard_group)
        row = emit(c10d.wait_tensor.default, launch)
    return emit(aten.reshape.default, row, [route.shard_world, -1])


def _join_chunks(emit: ir.Emitter, piece: fx.Node, route: ir.Route) -> fx.Node:
    """Turn ``[world, numel]`` chunks into the unsharded parameter, dropping the padding."""
    if route.dim != 0:
        chunk = list(route.shape)
        chunk[route.dim] //= route.shard_world
        piece = emit(aten.reshape.default, piece, [route.shard_world, *chunk])
        order = list(range(1, len(chunk) + 1))
        order.insert(route.dim, 0)
        piece = emit(aten.permute.default, piece, order)
        return emit(aten.reshape.default, piece, list(route.shape))
    rest = route.shape[1:]
    padded = emit(aten.reshape.default, piece, [_padded_length(piece, rest), *rest])
    if ir.value_of(padded).shape[0] == route.shape[0]:
        return padded
    return emit(aten.slice.Tensor, padded, 0, 0, route.shape[0])


def _padded_length(piece: fx.Node, rest: Sequence[int]) -> int:
    return ir.value_of(piece).numel() // prod(rest)


# ---- reduce-scatter ----


def _lower_reduction(bucket: Sequence[fx.Node]) -> None:
    emit = ir.Emitter(before=bucket[-1].next)
    route = ir.route_of(bucket[0])
    scaling = ir.mean_reduction(route.reduce_dtype, route.shard_world * route.replicate_world)
    chunks = [
        _split_chunks(emit, emit.cast(ir.source_of(node), route.reduce_dtype), ir.route_of(node)) for node in bucket
    ]
    sizes = [ir.value_of(chunk).shape[1] for chunk in chunks]
    rows = _divide(emit, _concatenate(emit, chunks, dim=1), scaling.pre_divide)
    row = _divide(emit, _reduce(emit, rows, route, scaling.op), scaling.post_divide)
    shards = []
    for node, piece in zip(bucket, _split_columns(emit, row, sizes), strict=True):
        shard = emit(aten.reshape.default, piece, list(ir.value_of(node).shape))
        shards.append(emit.cast(shard, ir.route_of(node).grad_dtype))
    for node, shard in zip(bucket, shards, strict=True):
        if any(user.op != "output" for user in node.users):
            ir.move_behind(node.users, shards[-1])
        _replace(node, shard)


def _split_chunks(emit: ir.Emitter, grad: fx.Node, route: ir.Route) -> fx.Node:
    """Turn an unsharded gradient into ``[world, numel]``: one padded chunk per rank."""
    world, length = route.shard_world, route.shape[route.dim]
    if route.dim != 0:
        cut = [*route.shape[: route.dim], world, length // world, *route.shape[route.dim + 1 :]]
        grad = emit(aten.reshape.default, grad, cut)
        order = list(range(len(cut)))
        order.insert(0, order.pop(route.dim))
        grad = emit(aten.permute.default, grad, order)
    elif length % world:
        missing = -length % world
        pad = [0, 0] * (len(route.shape) - 1) + [0, missing]
        grad = emit(aten.constant_pad_nd.default, grad, pad, 0)
    return emit(aten.reshape.default, grad, [world, -1])


def _reduce(emit: ir.Emitter, rows: fx.Node, route: ir.Route, op: str) -> fx.Node:
    """Return ``[1, numel]``: this rank's chunk, reduced over the shard group, then over the replicas."""
    c10d = torch.ops._c10d_functional
    if route.shard_world > 1:
        launch = emit(
            c10d.reduce_scatter_tensor.default,
            _flat(emit, rows),
            op,
            route.shard_world,
            route.shard_group,
        )
        rows = emit(c10d.wait_tensor.default, launch)
    if route.replicate_world > 1:
        launch = emit(c10d.all_reduce.default, rows, op, route.replicate_group)
        rows = emit(c10d.wait_tensor.default, launch)
    return emit(aten.reshape.default, rows, [1, -1])


# ---- pieces shared by both ----


def _divide(emit: ir.Emitter, node: fx.Node, divisor: float) -> fx.Node:
    return node if divisor == 1.0 else emit(aten.div.Tensor, node, divisor)


def _flat(emit: ir.Emitter, node: fx.Node) -> fx.Node:
    return emit(aten.reshape.default, node, [-1])


def _concatenate(emit: ir.Emitter, nodes: Sequence[fx.Node], dim: int = 0) -> fx.Node:
    return nodes[0] if len(nodes) == 1 else emit(aten.cat.default, list(nodes), dim)


def _split_columns(emit: ir.Emitter, rows: fx.Node, sizes: Sequence[int]) -> list[fx.Node]:
    if len(sizes) == 1:
        return [rows]
    pieces = emit(aten.split_with_sizes.default, rows, list(sizes), 1)
    return [emit.getitem(pieces, index) for index in range(len(sizes))]


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
