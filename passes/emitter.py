"""Writes this library's operators, and what they are lowered to, into a graph.

Beside :mod:`ir`, which reads them, it is the only file of the passes that knows their names and arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from . import ir
from .route import Route


class Emitter:
    """Appends ``call_function`` nodes at one place of a graph and gives each its fake value."""

    def __init__(self, before: fx.Node, bundle: ir.Bundle | None = None) -> None:
        self._graph = before.graph
        self._before = before
        self._bundle = bundle

    def __call__(self, op: torch._ops.OpOverload, *args: Any) -> fx.Node:
        """Insert ``op(*args)`` and return its node; ``args`` may hold nodes at any depth."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(op, args)
        node.meta |= {"val": op(*fx.map_arg(args, ir.value_of)), ir.MARK: self._bundle}
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Insert a conversion to ``dtype``, unless ``node`` has that already."""
        if ir.value_of(node).dtype == dtype:
            return node
        return self(torch.ops.prims.convert_element_type.default, node, dtype)

    def put(self, node: fx.Node, device: str) -> fx.Node:
        """Insert a copy to a device, unless ``node`` is there already."""
        if ir.value_of(node).device.type == device:
            return node
        return self(torch.ops.prims.device_put.default, node, torch.device(device))

    def getitem(self, node: fx.Node, index: int) -> fx.Node:
        """Insert ``node[index]`` for an operator that returns a list."""
        with self._graph.inserting_before(self._before):
            item = self._graph.call_function(operator.getitem, (node, index))
        item.meta |= {"val": node.meta["val"][index], ir.MARK: self._bundle}
        return item


def reduce_grad(emit: Emitter, grad: fx.Node, route: Route) -> fx.Node:
    """Insert a reduction of ``grad`` and return its node."""
    return emit(torch.ops.fsdp_compiled.reduce_grad.default, grad, route.encode())


def unshard(emit: Emitter, shard: fx.Node, route: Route) -> fx.Node:
    """Insert a gather of ``shard``, without a gradient, and return its node."""
    return emit(torch.ops.fsdp_compiled.unshard.default, shard, None, route.encode())


def all_gather(emit: Emitter, row: fx.Node, route: Route) -> fx.Node:
    """Insert the launch and the wait of an all-gather of ``row`` and return the result."""
    place, dtype = (route.shard_world, route.shard_group), ir.value_of(row).dtype
    is_float8 = dtype.is_floating_point and dtype.itemsize == 1
    if is_float8:  # which gloo does not know
        row = emit(torch.ops.aten.view.dtype, row, torch.uint8)
    if route.gather_comm:
        launch = emit(torch.ops.fsdp_compiled.custom_all_gather.default, row, *place, route.gather_comm)
    else:
        launch = emit(torch.ops._c10d_functional.all_gather_into_tensor.default, row, *place)
    rows = emit(torch.ops._c10d_functional.wait_tensor.default, launch)
    return emit(torch.ops.aten.view.dtype, rows, dtype) if is_float8 else rows


def launch_gather(emit: Emitter, bucket: Sequence[fx.Node], in_place: bool, lasting: bool) -> fx.Node:
    """Insert the launch of a gather that leaves the compute stream with its copies, and the wait; return the wait.

    Args:
        emit: where.
        bucket: unshard nodes.
        in_place: gather each parameter straight into its part of the result.
        lasting: the shards outlive the wait, as parameters do.
    """
    shards, texts = [ir.source_of(node) for node in bucket], [str(node.args[-1]) for node in bucket]
    launch = emit(torch.ops.fsdp_compiled.launch_gather.default, shards, texts, in_place, lasting)
    return emit(torch.ops._c10d_functional.wait_tensor.default, launch)


def copy_in_gradients(emit: Emitter, bucket: Sequence[fx.Node]) -> fx.Node:
    """Insert the copy-in of a bucket's gradients by one kernel, ``[world, row length]``, divided already."""
    route = ir.route_of(bucket[0])
    grads, dims = [ir.source_of(node) for node in bucket], [ir.route_of(node).dim for node in bucket]
    how = (dims, route.shard_world, route.reduce_dtype, route.pre_divide)
    return emit(torch.ops.fsdp_compiled.copy_in_gradients.default, grads, *how)


def reduce_scatter(emit: Emitter, rows: fx.Node, route: Route) -> fx.Node:
    """Insert the launch and the wait of a reduce-scatter of 1-D ``rows`` and return the wait."""
    place = (route.op, route.shard_world, route.scatter_group)
    if route.reduce_comm:
        launch = emit(torch.ops.fsdp_compiled.custom_reduce_scatter.default, rows, *place, route.reduce_comm)
    else:
        launch = emit(torch.ops._c10d_functional.reduce_scatter_tensor.default, rows, *place)
    return emit(torch.ops._c10d_functional.wait_tensor.default, launch)


def all_reduce(emit: Emitter, row: fx.Node, route: Route) -> fx.Node:
    """Insert the launch and the wait of an all-reduce of ``row`` over the replicas and return the wait."""
    launch = emit(torch.ops._c10d_functional.all_reduce.default, row, route.op, route.replicate_group)
    return emit(torch.ops._c10d_functional.wait_tensor.default, launch)


def send_to_host(emit: Emitter, row: fx.Node) -> fx.Node:
    """Insert the start of ``row``'s way to the host."""
    return emit(torch.ops.fsdp_compiled.send_to_host.default, row)


def arrival(emit: Emitter, sent: fx.Node) -> fx.Node:
    """Insert the host's wait for what was sent there."""
    return emit(torch.ops._c10d_functional.wait_tensor.default, sent)


def reduce_hook(emit: Emitter, row: fx.Node, route: Route) -> fx.Node:
    """Insert the user's hook on a reduced row and return its result."""
    return emit(torch.ops.fsdp_compiled.reduce_hook.default, row, route.reduce_hook)


def take_shard(emit: Emitter, whole: fx.Node, route: Route) -> fx.Node:
    """Insert the cut of an unsharded parameter for the smaller group and return this rank's padded piece."""
    place = (route.dim, route.post_forward_world, route.post_forward_group)
    return emit(torch.ops.fsdp_compiled.take_shard.default, whole, *place)
