"""Writes the library's operators into a graph.

Beside :mod:`nodes`, which reads them, it is the only file of the passes that knows their names and arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...sharding.spec import AllGatherBucket, CommSpec, ReductionBucket, Stage
from . import nodes


class Emitter:
    """Appends ``call_function`` nodes at one place of a graph and gives each its fake value."""

    def __init__(self, before: fx.Node) -> None:
        self._before = before

    def __call__(self, op: Callable[..., Any], *args: Any) -> fx.Node:
        """Insert ``op(*args)`` and return its node; ``args`` may hold nodes at any depth."""
        graph = self._before.graph
        with graph.inserting_before(self._before):
            node = graph.call_function(op, args)
        node.meta["val"] = op(*fx.map_arg(args, nodes.value_of))
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Insert a conversion to ``dtype``, unless ``node`` has that already."""
        if nodes.value_of(node).dtype == dtype:
            return node
        return self(torch.ops.prims.convert_element_type.default, node, dtype)


def reduce_grad(emit: Emitter, grad: fx.Node, spec: CommSpec) -> fx.Node:
    """Insert a reduction of ``grad`` and return its node."""
    return emit(torch.ops.fsdp_compiled.reduce_grad.default, grad, spec.encode())


def unshard(emit: Emitter, shard: fx.Node, spec: CommSpec) -> fx.Node:
    """Insert an all-gather of ``shard``, without a gradient, and return its node."""
    return emit(torch.ops.fsdp_compiled.unshard.default, shard, None, None, spec.encode())


def take_shard(emit: Emitter, unsharded: fx.Node, spec: CommSpec) -> fx.Node:
    """Insert the cut of an unsharded parameter for the smaller group and return this rank's padded piece."""
    group = spec.post_forward
    return emit(torch.ops.fsdp_compiled.take_shard.default, unsharded, spec.param.dim, group.world, group.name)


def stage(
    emit: Emitter, name: Stage, inputs: Sequence[fx.Node], bucket: AllGatherBucket | ReductionBucket
) -> list[fx.Node]:
    """Insert the launch and the wait of one stage and return the wait's results."""
    ops, text = torch.ops.fsdp_compiled, bucket.encode()
    launch = emit(getattr(ops, f"launch_{name}").default, list(inputs), text)
    wait = emit(getattr(ops, f"wait_{name}").default, launch, text)
    return [emit(operator.getitem, wait, index) for index in range(len(wait.meta["val"]))]
