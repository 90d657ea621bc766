"""Replaces the library's opaque operators by functional collectives, one per bucket.

It reads each node's ticket and the route in its arguments and emits plain ATen and ``_c10d_functional`` nodes; it
must not know modules, and it does not choose a schedule: a bucket is launched where its first gather stands, or
after its last gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx
from torch._inductor import config  # see pipeline.py

from . import cost, emitter, ir
from .emitter import Emitter
from .route import Route
from .survey import is_returned

aten = torch.ops.aten


@dataclass(frozen=True)
class Lower:
    """One collective per bucket. Numerics cannot change: a bucket only concatenates.

    ::

        w1 = unshard(s1); w2 = unshard(s2)
            ->  row = cat(s1, s2); w1, w2 = split(wait(all_gather(row)))
        d1 = reduce_grad(g1); d2 = reduce_grad(g2)
            ->  rows = cat(chunks(g1), chunks(g2)); d1, d2 = split(wait(reduce_scatter(rows)))

    A node without a ticket travels alone. On a GPU, the gather of parameters takes its copies along to a side stream
    (``launch_gather``), or needs none, where the parameters are so large that it is faster to gather each into place;
    one kernel copies gradients in (``copy_in_gradients``); and gradients whose shards live on the CPU go there beside
    compute (``send_to_host``).
    """

    def __call__(self, graph: fx.Graph) -> None:
        nodes = list(graph.nodes)
        for index, (bucket, ticket) in enumerate(_buckets(filter(ir.is_unshard, nodes))):
            packed = _packed(bucket)
            _lower_gather(bucket[0], packed, _bundle(index, packed, ticket))
        for index, (bucket, ticket) in enumerate(_buckets(filter(ir.is_reduce_grad, nodes))):
            packed = _packed(bucket)
            _lower_reduction(bucket[-1], packed, _bundle(index, packed, ticket))


def _buckets(nodes: Iterable[fx.Node]) -> list[tuple[list[fx.Node], ir.Ticket | None]]:
    """Return nodes of equal tickets together, ordered by the first of each."""
    found: dict[ir.Ticket | fx.Node, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(ir.ticket_of(node) or node, []).append(node)
    return [(bucket, ir.ticket_of(bucket[0])) for bucket in found.values()]


def _packed(bucket: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the members in the order in which they travel; on a GPU, small odd ones must not misalign the rest."""
    if not ir.has_streams(bucket[0]):
        return list(bucket)
    return sorted(bucket, key=lambda node: -ir.granularity(ir.shard_numel(node)))


def _bundle(index: int, bucket: Sequence[fx.Node], ticket: ir.Ticket | None) -> ir.Bundle:
    route = ir.route_of(bucket[0])
    return ir.Bundle(
        index=index,
        reduces=ir.is_reduce_grad(bucket[0]),
        params=tuple(ir.route_of(node).param for node in bucket),
        sizes=tuple(ir.travelling_bytes(node) for node in bucket),
        shard_world=route.shard_world,
        replicate_world=route.replicate_world,
        bound_bytes=ticket.bound_bytes if ticket else 0,
        kept_bytes=sum(ir.travelling_bytes(node) for node in bucket if ir.is_unshard(node) and is_returned(node)),
        is_in_place=_needs_no_copy(bucket),
    )


def _needs_no_copy(bucket: Sequence[fx.Node]) -> bool:
    if ir.is_unshard(bucket[0]):
        return _goes_into_place(bucket)
    return len(bucket) == 1 and ir.is_row(bucket[0])


# ---- all-gather ----


def _goes_into_place(bucket: Sequence[fx.Node]) -> bool:
    """Tell whether each parameter is gathered straight into its own memory, rather than copied there."""
    routes, sizes = [ir.route_of(node) for node in bucket], [ir.travelling_bytes(node) for node in bucket]
    if routes[0].gather_comm or (len(bucket) > 1 and not ir.gathers_beside_compute(bucket[0])):
        return False
    return cost.goes_into_place(ir.value_of(bucket[0]).device, [route.dim for route in routes], sizes)


def _lower_gather(place: fx.Node, bucket: Sequence[fx.Node], bundle: ir.Bundle) -> None:
    emit = Emitter(place, bundle)
    route = ir.route_of(bucket[0])
    sizes = [ir.shard_numel(node) for node in bucket]
    if ir.gathers_beside_compute(bucket[0]):
        unsharded = _gather_beside_compute(
            emit, bucket, [size * route.shard_world for size in sizes], bundle.is_in_place
        )
    else:
        row = _concatenate(emit, [_flat(emit, _travelling(emit, node, route)) for node in bucket])
        pieces = _split(emit, _all_gather(emit, row, route), sizes, dim=1)
        unsharded = [_join_chunks(emit, piece, ir.route_of(node)) for piece, node in zip(pieces, bucket, strict=True)]
    for node, whole in zip(bucket, unsharded, strict=True):
        _replace(node, whole)


def _gather_beside_compute(
    emit: Emitter, bucket: Sequence[fx.Node], sizes: Sequence[int], in_place: bool
) -> list[fx.Node]:
    _require_no_cuda_graphs()
    lasting = all(ir.is_parameter(ir.source_of(node)) for node in bucket)
    whole = emitter.launch_gather(emit, bucket, in_place, lasting)
    pieces = _split(emit, whole, [ir.aligned(size) for size in sizes], dim=0)
    unsharded = []
    for node, piece, size in zip(bucket, pieces, sizes, strict=True):
        flat = piece if size == ir.aligned(size) else emit(aten.slice.Tensor, piece, 0, 0, size)
        unsharded.append(_without_padding(emit, flat, ir.route_of(node)))
    return unsharded


def _require_no_cuda_graphs() -> None:
    if config.triton.cudagraphs:
        raise NotImplementedError(
            "CUDA graphs (mode='reduce-overhead' or 'max-autotune') cannot hold collectives that other streams run; "
            "compile with mode='max-autotune-no-cudagraphs' or the default"
        )


def _travelling(emit: Emitter, node: fx.Node, route: Route) -> fx.Node:
    shard = ir.source_of(node)
    return emit.cast(emit.put(shard, route.device) if route.device else shard, route.dtype)


def _all_gather(emit: Emitter, row: fx.Node, route: Route) -> fx.Node:
    """Return ``[world, numel]``: every rank's row."""
    if route.shard_world > 1:
        row = emitter.all_gather(emit, row, route)
    return emit(aten.reshape.default, row, [route.shard_world, -1])


def _join_chunks(emit: Emitter, piece: fx.Node, route: Route) -> fx.Node:
    """Turn ``[world, numel]`` chunks into the unsharded parameter, dropping the padding."""
    if route.dim != 0:
        chunk = list(route.shape)
        chunk[route.dim] //= route.shard_world
        piece = emit(aten.reshape.default, piece, [route.shard_world, *chunk])
        order = list(range(1, len(chunk) + 1))
        order.insert(route.dim, 0)
        piece = emit(aten.permute.default, piece, order)
    return _without_padding(emit, piece, route)


def _without_padding(emit: Emitter, flat: fx.Node, route: Route) -> fx.Node:
    """Shape what is in row-major order but for padding along the sharded dimension."""
    shape = list(route.shape)
    shape[route.dim] = ir.value_of(flat).numel() // prod([*shape[: route.dim], *shape[route.dim + 1 :]])
    padded = emit(aten.reshape.default, flat, shape)
    if shape[route.dim] == route.shape[route.dim]:
        return padded
    return emit(aten.slice.Tensor, padded, route.dim, 0, route.shape[route.dim])


# ---- reduce-scatter ----


def _lower_reduction(place: fx.Node, bucket: Sequence[fx.Node], bundle: ir.Bundle) -> None:
    emit = Emitter(place.next, bundle)
    route = ir.route_of(bucket[0])
    beside = ir.has_streams(bucket[0]) and route.communicates
    if beside:
        _require_no_cuda_graphs()
    packs = beside and not bundle.is_in_place
    rows = emitter.copy_in_gradients(emit, bucket) if packs else _copy_in(emit, bucket, route)
    sizes = [ir.value_of(node).numel() for node in bucket]
    row = _divide(emit, _reduce(emit, rows, route), route.post_divide)
    for node, piece in zip(bucket, _sharded_gradients(emit, bucket, row, sizes), strict=True):
        _replace(node, emit(aten.reshape.default, piece, list(ir.value_of(node).shape)))


def _sharded_gradients(
    emit: Emitter, bucket: Sequence[fx.Node], row: fx.Node, sizes: Sequence[int]
) -> Sequence[fx.Node]:
    """Return each member's part of the reduced row, in its dtype and where its shard lives."""
    moves, dtypes = bool(ir.route_of(bucket[0]).device), [ir.route_of(node).grad_dtype for node in bucket]
    if moves and ir.has_streams(bucket[0]) and len(set(dtypes)) == 1:
        (row,) = _move_to_host(emit, [emit.cast(row, dtypes[0])])
        return _split(emit, row, sizes, dim=1)
    pieces = [emit.cast(piece, dtype) for piece, dtype in zip(_split(emit, row, sizes, dim=1), dtypes, strict=True)]
    return _move_to_host(emit, pieces) if moves else pieces


def _move_to_host(emit: Emitter, rows: Sequence[fx.Node]) -> list[fx.Node]:
    if not ir.has_streams(rows[0]):
        return [emit.put(row, "cpu") for row in rows]
    sent = [emitter.send_to_host(emit, row) for row in rows]
    return [emitter.arrival(emit, each) for each in sent]


def _copy_in(emit: Emitter, bucket: Sequence[fx.Node], route: Route) -> fx.Node:
    """Return ``[world, row length]`` by operators that Inductor fuses with what makes the gradients."""
    chunks = [
        _split_chunks(emit, emit.cast(ir.source_of(node), route.reduce_dtype), ir.route_of(node)) for node in bucket
    ]
    return _divide(emit, _concatenate(emit, chunks, dim=1), route.pre_divide)


def _split_chunks(emit: Emitter, grad: fx.Node, route: Route) -> fx.Node:
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


def _reduce(emit: Emitter, rows: fx.Node, route: Route) -> fx.Node:
    """Return ``[1, numel]``: this rank's chunk, reduced over the shard group, then over the replicas."""
    if route.shard_world > 1:
        rows = emitter.reduce_scatter(emit, _flat(emit, rows), route)
    if route.replicate_world > 1:
        rows = emitter.all_reduce(emit, rows, route)
    if route.reduce_hook:
        rows = emitter.reduce_hook(emit, _flat(emit, rows), route)
    return emit(aten.reshape.default, rows, [1, -1])


# ---- pieces shared by both ----


def _divide(emit: Emitter, node: fx.Node, divisor: float) -> fx.Node:
    return node if divisor == 1.0 else emit(aten.div.Tensor, node, divisor)


def _flat(emit: Emitter, node: fx.Node) -> fx.Node:
    return emit(aten.reshape.default, node, [-1])


def _concatenate(emit: Emitter, nodes: Sequence[fx.Node], dim: int = 0) -> fx.Node:
    return nodes[0] if len(nodes) == 1 else emit(aten.cat.default, list(nodes), dim)


def _split(emit: Emitter, rows: fx.Node, sizes: Sequence[int], dim: int) -> list[fx.Node]:
    """Return pieces of these sizes; what is left only aligns the next row."""
    if len(sizes) == 1:
        return [rows]
    rest = ir.value_of(rows).shape[dim] - sum(sizes)
    pieces = emit(aten.split_with_sizes.default, rows, [*sizes, rest] if rest else list(sizes), dim)
    return [emit.getitem(pieces, index) for index in range(len(sizes))]


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
