"""Writes nodes into a graph: operators of ours, and a plan, launch by launch and wait by wait."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
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
    """Insert what ``node`` of another graph does, on what ``known`` has for its arguments."""
    with before.graph.inserting_before(before):
        copy = before.graph.node_copy(node, known.__getitem__)
    return _noted(copy, before)


def _noted(new: fx.Node, old: fx.Node) -> fx.Node:
    """Give ``new`` what AOTAutograd has noted of ``old``, by which it parts forward from backward."""
    new.meta |= {key: old.meta[key] for key in _OF_TRACING if key in old.meta}
    return new


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


def expand(node: fx.Node) -> None:
    """Replace an ``unshard_all`` or ``reduce_all`` by an operator for each result that is read."""
    sources: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    specs = [CommSpec.decode(text) for text in node.args[-1]]  # type: ignore[union-attr, arg-type]
    insert_one = insert_unshard if nodes.operator_of(node) == "unshard_all" else insert_reduce_grad
    for item in list(node.users):
        index = nodes.index_of(item)
        single = insert_one(node, sources[index], specs[index], nodes.value_of(item))
        replace_by([item], [_noted(single, node)])
    node.graph.erase_node(node)


def do_locally(node: fx.Node, written: Mapping[Hashable, fx.Node]) -> None:
    """Replace an opaque node for which nothing travels by the steps that are left to do."""
    alone, result = nodes.asked_of(node), _as_written(nodes.source_of(node), written, node)
    for step in alone.spec.local_steps(alone.params[0]) or ():
        if isinstance(step, torch.dtype):
            result = insert_cast(node, result, step)
        elif step != 1.0:
            result = insert(node, torch.ops.aten.div.Tensor, result, step)
    replace_by([node], [result])


def _as_written(source: fx.Node, written: Mapping[Hashable, fx.Node], before: fx.Node) -> fx.Node:
    """Return what reads an input through the one that the graph writes to, if that lies in the same memory.

    Inductor keeps reads of an input before writes to it, but does not know that another input lies there.
    """
    through = written.get(nodes.memory_of(source)) if source.op == "placeholder" else None
    if through is None or nodes.value_of(through).shape == (value := nodes.value_of(source)).shape:
        return through or source
    place = list(value.shape), list(value.stride()), value.storage_offset()  # padded; what is written is not
    return insert(before, torch.ops.aten.as_strided.default, through, *place, value=value)


def replace_by(old: Sequence[fx.Node], results: Sequence[fx.Node]) -> None:
    for node, result in zip(old, results, strict=True):
        node.replace_all_uses_with(result)
        node.graph.erase_node(node)


def put_in_order(order: Sequence[fx.Node]) -> None:
    for before, node in pairwise(order):
        if before.next is not node:
            before.append(node)


def emit(
    plan: Plan,
    opaque: Sequence[fx.Node],
    written: Mapping[Hashable, fx.Node],
    compute: AnchoredCompute,
    cluster: Cluster,
) -> None:
    """Replace the opaque nodes, by the index of whose requests ``plan`` knows them, by launches and waits.

    ``written`` are the inputs that the graph writes to, by their memory.
    """
    graph = opaque[0].graph
    for node, position in compute.position.items():
        node.meta[POSITION] = position
    (output,) = graph.find_nodes(op="output")
    operations: dict[tuple[int, int], list[fx.Node]] = {}  # launch, wait, and what is taken from it
    for number, requests in enumerate(plan.buckets):
        asked, bucket = [opaque[request.index] for request in requests], requests[0].kind.make(requests, cluster)
        results = [_as_written(nodes.source_of(node), written, output) for node in asked]
        values = [nodes.value_of(node) for node in asked]
        for index, name in enumerate(bucket.stages):
            given = values if name == bucket.stages[-1] else None  # a handle for the next stage
            launch, _, *taken = operations[number, index] = _insert_stage(output, name, results, bucket, given)
            launch.meta[PLACE] = Place(plan, number, index)
            results = [node for node in taken if not nodes.is_part(node)]
        replace_by(asked, results)
    order = _Order(compute, [waiting for _, *waiting in operations.values()])
    for action in plan.actions:
        launch, wait, *_ = operations[action.task, action.stage]
        is_copy = nodes.bucket_of(launch).group_of(nodes.stage_of(launch)) is None
        if action.verb == "launch":
            order.put(action.position, launch)
        elif not is_copy or action.position < compute.end:  # the host waits last, see complete
            order.put(action.position, wait)
    put_in_order(order.complete(graph))


def _insert_stage(
    before: fx.Node, name: str, inputs: Sequence[fx.Node], bucket: Bucket, values: Any
) -> list[fx.Node]:
    """Insert a stage: its launch, its wait, and what is taken from that; ``values`` of the results, if known."""
    ops, text = torch.ops.fsdp_compiled, bucket.encode()
    launch = insert(before, getattr(ops, f"launch_{name}").default, list(inputs), text)
    wait = insert(before, getattr(ops, f"wait_{name}").default, launch, text, value=values)
    count, size = len(wait.meta["val"]), nodes.PART
    starts = range(0, count, size) if count > size else ()
    parts = [insert(before, operator.getitem, wait, slice(start, start + size)) for start in starts]
    places = [(parts[index // size], index % size) if parts else (wait, index) for index in range(count)]
    items = [insert(before, operator.getitem, *place) for place in places]
    return [launch, wait, *parts, *items]


class _Order:
    """Nodes put one behind the other: compute as it stood, collectives where a plan has them.

    What a node reads comes before it: also a wait, and whatever prepares a launch. Writes to inputs come last, since
    nodes that read an input want what it had before.
    """

    def __init__(self, compute: AnchoredCompute, waiting: Sequence[list[fx.Node]]) -> None:
        self._positions = compute.position
        self._compute = deque(node for node in compute.nodes if not nodes.is_write(node))  # that is not placed
        self._placed: dict[fx.Node, None] = {}  # in order
        self._waiting = {node: together for together in waiting for node in together}

    def put(self, position: int, node: fx.Node) -> None:
        """Place a node behind the compute before ``position``."""
        while self._compute and self._positions[self._compute[0]] < position:
            self._place(self._compute.popleft())
        self._place(node)

    def complete(self, graph: fx.Graph) -> list[fx.Node]:
        """Place what is left and return all nodes."""
        for node in (*self._compute, *graph.nodes):
            self._place(node)
        return [*graph.find_nodes(op="placeholder"), *self._placed]

    def _place(self, node: fx.Node) -> None:
        if node in self._placed or node.op == "placeholder":
            return
        for source in node.all_input_nodes:
            self._place(source)
        if node not in self._placed:  # results stand behind their wait
            self._placed |= dict.fromkeys(self._waiting.get(node, (node,)))
