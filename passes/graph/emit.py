"""Writes nodes into a graph: operators of ours, and a plan, launch by launch and wait by wait.

It must not decide anything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...sharding.spec import Bucket, CommSpec
from ..cost import Cluster
from ..planning.tasks import Plan
from . import nodes
from .anchors import AnchoredCompute

PLACE = "fsdp_compiled_place"  # key in the meta of a launch: its :class:`Place`
POSITION = "fsdp_compiled_position"  # key in the meta of a compute node: its position in the plan
# What AOTAutograd has noted of a node, by which it parts forward from backward.
_OF_TRACING = ("partitioner_tag", "autograd_backward", "seq_nr", "recompute", "ac_graph_id", "nn_module_stack")


class Place(NamedTuple):
    """Which operation of a plan a launch is."""

    plan: Plan
    task: int
    stage: int


def insert(before: fx.Node, op: Callable[..., Any], *args: Any, value: Any = None) -> fx.Node:
    """Insert ``op(*args)`` and return its node; ``args`` may hold nodes at any depth.

    Its fake value is ``value``, or what ``op`` returns for those of ``args``.
    """
    with before.graph.inserting_before(before):
        node = before.graph.call_function(op, args)
    node.meta["val"] = op(*fx.map_arg(args, nodes.value_of)) if value is None else value
    return node


def insert_copy(before: fx.Node, node: fx.Node, known: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Insert what ``node`` of another graph does, on what stands in this one for its arguments."""
    with before.graph.inserting_before(before):
        copy = before.graph.node_copy(node, known.__getitem__)
    copy.meta |= {key: before.meta[key] for key in _OF_TRACING if key in before.meta}
    return copy


def insert_cast(before: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a conversion to ``dtype``, unless ``node`` has that already."""
    if nodes.value_of(node).dtype == dtype:
        return node
    return insert(before, torch.ops.prims.convert_element_type.default, node, dtype)


def insert_reduce_grad(before: fx.Node, grad: fx.Node, spec: CommSpec, value: Any = None) -> fx.Node:
    return insert(before, torch.ops.fsdp_compiled.reduce_grad.default, grad, spec.encode(), value=value)


def insert_unshard(before: fx.Node, shard: fx.Node, spec: CommSpec, value: Any = None) -> fx.Node:
    """Insert an all-gather of ``shard``, without a gradient."""
    return insert(before, torch.ops.fsdp_compiled.unshard.default, shard, None, None, spec.encode(), value=value)


def insert_take_shard(before: fx.Node, unsharded: fx.Node, spec: CommSpec) -> fx.Node:
    """Insert the cut of an unsharded parameter for the smaller group, to this rank's padded piece."""
    group = spec.post_forward
    args = (unsharded, spec.param.dim, group.world, group.name)
    return insert(before, torch.ops.fsdp_compiled.take_shard.default, *args)


def expand(node: fx.Node) -> None:
    """Replace an ``unshard_all`` or ``reduce_all`` by an operator for each result that is read."""
    sources: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    specs = [CommSpec.decode(text) for text in node.args[-1]]  # type: ignore[union-attr, arg-type]
    insert_one = insert_unshard if nodes.is_unshard_all(node) else insert_reduce_grad
    for item in list(node.users):
        index = nodes.index_of(item)
        single = insert_one(node, sources[index], specs[index], item.meta["val"])
        single.meta |= {key: node.meta[key] for key in _OF_TRACING if key in node.meta}
        replace_by([item], [single])
    node.graph.erase_node(node)


def do_locally(node: fx.Node) -> None:
    """Replace an opaque node for which nothing travels by the steps that are left to do."""
    alone, result = nodes.asked_of(node), nodes.source_of(node)
    for step in alone.spec.local_steps(alone.params[0]) or ():
        if isinstance(step, torch.dtype):
            result = insert_cast(node, result, step)
        elif step != 1.0:
            result = insert(node, torch.ops.aten.div.Tensor, result, step)
    replace_by([node], [result])


def replace_by(old: Sequence[fx.Node], results: Sequence[fx.Node]) -> None:
    """Let users of ``old`` use ``results`` instead, and erase ``old``."""
    for node, result in zip(old, results, strict=True):
        node.replace_all_uses_with(result)
        node.graph.erase_node(node)


def put_in_order(order: Iterable[fx.Node], graph: fx.Graph) -> None:
    """Move the nodes, which are all of the graph's, into this order."""
    last = graph._root
    for node in order:
        if last.next is not node:
            last.append(node)
        last = node


# ---- plans ----


class Stage(NamedTuple):
    """The nodes of one operation of a plan."""

    launch: fx.Node
    wait: fx.Node
    waiting: list[fx.Node]  # the wait and what is taken from it, in order
    is_collective: bool  # or a copy


def emit(plan: Plan, opaque: Sequence[fx.Node], compute: AnchoredCompute, cluster: Cluster) -> None:
    """Replace the opaque nodes, by the index of whose requests ``plan`` knows them, by launches and waits."""
    graph = opaque[0].graph
    for node, position in compute.position.items():
        node.meta[POSITION] = position
    (output,) = graph.find_nodes(op="output")
    stages: dict[tuple[int, int], Stage] = {}
    for number, requests in enumerate(plan.buckets):
        asked, bucket = [opaque[request.index] for request in requests], requests[0].kind.bucket_of(requests, cluster)
        results = [nodes.source_of(node) for node in asked]
        for index, name in enumerate(bucket.stages):
            stage = stages[number, index] = _insert_stage(output, name, results, bucket)
            stage.launch.meta[PLACE] = Place(plan, number, index)
            results = [node for node in stage.waiting[1:] if not nodes.is_part(node)]
        replace_by(asked, results)
    order = _Order(compute, [stage.waiting for stage in stages.values()])
    for action in plan.actions:
        stage = stages[action.task, action.stage]
        if action.verb == "launch":
            order.put(action.position, stage.launch)
        elif stage.is_collective or action.position < compute.end:  # the host waits last, see complete
            order.put(action.position, stage.wait)
    put_in_order(order.complete(graph), graph)


def _insert_stage(before: fx.Node, name: str, inputs: Sequence[fx.Node], bucket: Bucket) -> Stage:
    """Insert the launch and the wait of one stage."""
    ops, text = torch.ops.fsdp_compiled, bucket.encode()
    launch = insert(before, getattr(ops, f"launch_{name}").default, list(inputs), text)
    wait = insert(before, getattr(ops, f"wait_{name}").default, launch, text)
    count, size = len(wait.meta["val"]), nodes.PART
    starts = range(0, count, size) if count > size else ()
    parts = [insert(before, operator.getitem, wait, slice(start, start + size)) for start in starts]
    places = [(parts[index // size], index % size) if parts else (wait, index) for index in range(count)]
    items = [insert(before, operator.getitem, *place) for place in places]
    return Stage(launch, wait, [wait, *parts, *items], bucket.group_of(name) is not None)


class _Order:
    """Nodes put one behind the other: compute as it stood, collectives where a plan has them.

    What a node reads comes before it. So what was started ahead is waited for by the first node that reads it, and
    whatever prepares a launch comes before that launch.
    """

    def __init__(self, compute: AnchoredCompute, waiting: Sequence[list[fx.Node]]) -> None:
        self._compute = compute
        self._placed: dict[fx.Node, None] = {}  # in order
        self._next = 0  # compute node
        self._waiting = {node: together for together in waiting for node in together}

    def put(self, position: int, node: fx.Node) -> None:
        """Place a node behind the compute before ``position``."""
        self._compute_until(position)
        self._place(node)

    def complete(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Place what is left and return all nodes."""
        self._compute_until(self._compute.end + 1)
        for node in graph.nodes:
            self._place(node)
        return [*graph.find_nodes(op="placeholder"), *self._placed]

    def _compute_until(self, position: int) -> None:
        in_order, position_of = self._compute.nodes, self._compute.position
        while self._next < len(in_order) and position_of[in_order[self._next]] < position:
            self._place(in_order[self._next])
            self._next += 1

    def _place(self, node: fx.Node) -> None:
        if node in self._placed or node.op == "placeholder":
            return
        for source in node.all_input_nodes:
            self._place(source)
        if node not in self._placed:  # results stand behind their wait
            self._placed |= dict.fromkeys(self._waiting.get(node, (node,)))
