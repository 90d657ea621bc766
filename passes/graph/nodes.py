"""The library's operators as FX nodes: what each is, what it carries, what is known about its tensors; and new ones.

This file alone knows operator names, schemas and argument positions. It knows nothing of modules, process groups or
schedules.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import fx

from ...sharding.contract import Contract
from ...sharding.spec import AllGatherBucket, CommSpec, ParamSpec, ReductionBucket, Stage

NAMESPACE = "fsdp_compiled"
UNSHARD_SCHEMA = "unshard(Tensor shard, Tensor? unsharded_grad, Tensor? partial_grad, str spec) -> Tensor"
UNSHARD_ALL_SCHEMA = "unshard_all(Tensor[] shards, Tensor[] leaves, int[] targets, str[] specs) -> Tensor[]"
REDUCE_ALL_SCHEMA = "reduce_all(Tensor[] grads, str[] specs) -> Tensor[]"
REDUCE_GRAD_SCHEMA = "reduce_grad(Tensor grad, str spec) -> Tensor"
WITH_GRADIENT_SCHEMA = (
    "with_gradient(Tensor unsharded, Tensor shard, Tensor? unsharded_grad, Tensor? partial_grad, str spec) -> Tensor"
)
TAKE_SHARD_SCHEMA = "take_shard(Tensor unsharded, int dim, int world, str group) -> Tensor"

Half = Literal["launch", "wait"]
STAGES: tuple[Stage, ...] = get_args(Stage)
PART = 16  # results of a long list are taken from parts of it, since torch walks through the list for each of them
BUCKET = "fsdp_compiled_bucket"  # key in the meta of an opaque node: the number of the bucket that it joins


def launch_schema(stage: str) -> str:
    """Return the schema of the operator that starts a stage, on tensors or on the handle of the stage before.

    A graph's first launch carries what ranks have to agree on before it, see :class:`Contract`.
    """
    return f"launch_{stage}(Tensor[] inputs, str bucket, str contract='') -> Tensor"


def wait_schema(stage: str) -> str:
    """Return the schema of the operator that waits for a stage: it returns results, or a handle for the next."""
    return f"wait_{stage}(Tensor handle, str bucket) -> Tensor[]"


def _is_op(name: str, node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target) == f"{NAMESPACE}.{name}.default"


is_unshard = partial(_is_op, "unshard")  # tells whether a node all-gathers one parameter
is_unshard_all = partial(_is_op, "unshard_all")  # all-gathers several, for a region
is_reduce_all = partial(_is_op, "reduce_all")  # reduces the gradients of several
is_reduce_grad = partial(_is_op, "reduce_grad")  # reduces one gradient
is_with_gradient = partial(_is_op, "with_gradient")  # the identity, which was there for the gradient of its input
is_take_shard = partial(_is_op, "take_shard")  # cuts an unsharded parameter for a smaller group


def travels(node: fx.Node) -> bool:
    """Tell whether ``node`` is an ``unshard`` or a ``reduce_grad`` for which anything leaves this rank's compute."""
    if is_unshard(node):
        return not spec_of(node).all_gather.is_local
    return is_reduce_grad(node) and not spec_of(node).reduction.is_local


_HALVES: dict[str, tuple[Half, Stage]] = {
    f"{NAMESPACE}.{half}_{stage}.default": (half, stage) for half in ("launch", "wait") for stage in STAGES
}


def _is_half(wanted: Half, node: fx.Node) -> bool:
    half, _ = _HALVES.get(str(node.target), (None, None))
    return half == wanted


is_launch = partial(_is_half, "launch")  # tells whether a node starts a stage of a bucket
is_wait = partial(_is_half, "wait")  # waits for one


def stage_of(node: fx.Node) -> Stage:
    """Return the stage that a launch or a wait belongs to."""
    return _HALVES[str(node.target)][1]


def bucket_of(node: fx.Node) -> AllGatherBucket | ReductionBucket:
    """Return what a launch or a wait carries."""
    text = str(node.args[1])
    return AllGatherBucket.decode(text) if stage_of(node) == "all_gather" else ReductionBucket.decode(text)


def is_first_stage(launch: fx.Node) -> bool:
    """Tell whether a launch takes tensors, rather than the handle of the stage before."""
    bucket = bucket_of(launch)
    return isinstance(bucket, AllGatherBucket) or stage_of(launch) == bucket.stages[0]


def inputs_of(launch: fx.Node) -> list[fx.Node]:
    return list(launch.args[0])  # type: ignore[arg-type]


def has_ours(graph: fx.Graph) -> bool:
    """Tell whether ``graph`` holds any operator of this library."""
    return any(map(is_communication, graph.nodes))


def spec_of(node: fx.Node) -> CommSpec:
    """Return the spec of an ``unshard``, ``reduce_grad`` or ``with_gradient`` node."""
    value = value_of(source_of(node))
    return CommSpec.decode(str(node.args[-1])).for_input(value.shape, value.dtype)


def source_of(node: fx.Node) -> fx.Node:
    """Return the tensor that an operator takes first: a shard, a gradient, a handle."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def value_of(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor that stands for the node's result."""
    return node.meta["val"]


def is_getitem(node: fx.Node) -> bool:
    """Tell whether ``node`` takes one tensor, or a part, out of a list."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def is_part(node: fx.Node) -> bool:
    """Tell whether ``node`` takes a part of a list, which is a list again."""
    return is_getitem(node) and isinstance(node.args[1], slice)


def list_of(item: fx.Node) -> fx.Node:
    """Return the node whose list a ``getitem`` takes from, by a part of it or not."""
    source = source_of(item)
    return source_of(source) if is_part(source) else source


def getitems_of(source: fx.Node) -> Iterator[fx.Node]:
    """Yield every ``getitem`` from a list, the parts before what is taken from them."""
    for user in filter(is_getitem, source.users):
        yield user
        if is_part(user):
            yield from getitems_of(user)


def computes_on(node: fx.Node) -> torch.device:
    """Return the device where compute uses what an ``unshard`` makes, or makes what a ``reduce_grad`` takes."""
    return value_of(source_of(node) if is_reduce_grad(node) else node).device


def params_of(graph: fx.Graph) -> dict[fx.Node, ParamSpec]:
    """Return what travels at each node. Models of one class name units alike; in one graph they are numbered."""
    met, params = Counter[tuple[bool, str, str]](), dict[fx.Node, ParamSpec]()
    for node in filter(travels, graph.nodes):
        param = spec_of(node).param
        place = (is_unshard(node), param.unit, param.name)
        if met[place]:
            outermost, dot, rest = param.unit.partition(".")
            param = replace(param, unit=f"{outermost}#{met[place]}{dot}{rest}")
        met[place] += 1
        params[node] = param
    return params


def unsharded_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    """Yield what a graph, opaque or lowered, all-gathers, with the unsharded shapes."""
    for node in graph.nodes:
        if is_unshard(node):
            yield node, spec_of(node).layout.shape
        elif is_wait(node) and stage_of(node) == "all_gather":
            layouts = bucket_of(node).layouts
            yield from ((item, layouts[index_of(item)].shape) for item in getitems_of(node) if not is_part(item))


def gradients_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    """Yield the unsharded gradients that a graph, opaque or lowered, reduces, with their shapes."""
    for node in graph.nodes:
        if is_reduce_grad(node):
            yield source_of(node), spec_of(node).layout.shape
        elif is_launch(node) and stage_of(node) != "all_gather" and is_first_stage(node):
            layouts = bucket_of(node).layouts
            yield from ((grad, layout.shape) for grad, layout in zip(inputs_of(node), layouts, strict=True))


def is_communication(node: fx.Node) -> bool:
    """Tell whether ``node`` is an operator of ours, or takes a result out of one."""
    if is_getitem(node):
        return is_communication(list_of(node))
    return node.op == "call_function" and str(node.target).startswith(f"{NAMESPACE}.")


def is_parameter(node: fx.Node) -> bool:
    """Tell whether ``node`` is a parameter's shard, which outlives the step, by the name that AOTAutograd gives it.

    Inputs of forward graphs and what backward graphs take of them are called primals, those of inference graphs arg;
    what forward has computed for backward, which may be freed or overwritten there, has other names.
    """
    return node.op == "placeholder" and re.match(r"primals|arg\d", str(node.target)) is not None


_HEAVY = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution", "_scaled_dot_product")


def is_heavy(node: fx.Node) -> bool:
    """Tell whether ``node`` is compute that Inductor runs by itself, at a place of its own, or a region of it."""
    named = node.op == "call_function" and any(word in str(node.target) for word in _HEAVY)
    return named or region_of(node) is not None


def region_of(node: fx.Node) -> fx.Graph | None:
    """Return the graph of the region that ``node`` calls; None if it calls none."""
    is_call = node.op == "call_function" and node.target is torch.ops.higher_order.invoke_subgraph
    return region_module_of(node).graph if is_call else None


def region_module_of(call: fx.Node) -> fx.GraphModule:
    """Return the region that a call of one calls."""
    where, module = call.args[0], call.graph.owning_module
    assert isinstance(where, fx.Node) and module is not None
    region = module.get_submodule(str(where.target))
    assert isinstance(region, fx.GraphModule)
    return region


def operands_of(call: fx.Node) -> tuple[Any, ...]:
    """Return what a call of a region passes to it."""
    return call.args[2:]


def results_of(region: fx.Graph) -> Sequence[fx.Node | None]:
    """Return what a region returns."""
    (output,) = region.find_nodes(op="output")
    return output.args[0]  # type: ignore[return-value]


def index_of(item: fx.Node) -> int:
    """Return which result in the list of :func:`list_of` a ``getitem`` takes."""
    source, index = source_of(item), int(item.args[1])  # type: ignore[arg-type]
    return source.args[1].start + index if is_part(source) else index  # type: ignore[union-attr]


# ---- writing ----

# What AOTAutograd has noted of a node, by which it parts forward from backward.
_OF_TRACING = ("partitioner_tag", "autograd_backward", "seq_nr", "recompute", "ac_graph_id", "nn_module_stack")


def insert(before: fx.Node, op: Callable[..., Any], *args: Any, value: Any = None) -> fx.Node:
    """Insert ``op(*args)`` and return its node; ``args`` may hold nodes at any depth.

    Its fake value is ``value``, or what ``op`` returns for those of ``args``.
    """
    with before.graph.inserting_before(before):
        node = before.graph.call_function(op, args)
    node.meta["val"] = op(*fx.map_arg(args, value_of)) if value is None else value
    return node


def insert_copy(before: fx.Node, node: fx.Node, known: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Insert what ``node`` of another graph does, on what stands in this one for its arguments."""
    with before.graph.inserting_before(before):
        copy = before.graph.node_copy(node, known.__getitem__)
    copy.meta |= {key: before.meta[key] for key in _OF_TRACING if key in before.meta}
    return copy


def insert_cast(before: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a conversion to ``dtype``, unless ``node`` has that already."""
    if value_of(node).dtype == dtype:
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


def set_contract(launch: fx.Node, contract: Contract) -> None:
    """Let ranks agree on ``contract`` before ``launch``."""
    launch.args = (*launch.args[:2], contract.pack())


def contract_at(launch: fx.Node) -> Contract | None:
    """Return what ranks agree on before ``launch``."""
    return Contract.unpack(str(launch.args[2])) if len(launch.args) > 2 else None


def insert_stage(
    before: fx.Node, name: Stage, inputs: Sequence[fx.Node], bucket: AllGatherBucket | ReductionBucket
) -> list[fx.Node]:
    """Insert the launch and the wait of one stage and return the wait's results."""
    ops, text = torch.ops.fsdp_compiled, bucket.encode()
    launch = insert(before, getattr(ops, f"launch_{name}").default, list(inputs), text)
    wait = insert(before, getattr(ops, f"wait_{name}").default, launch, text)
    count = len(wait.meta["val"])
    if count <= PART:
        return [insert(before, operator.getitem, wait, index) for index in range(count)]
    parts = [insert(before, operator.getitem, wait, slice(start, start + PART)) for start in range(0, count, PART)]
    return [insert(before, operator.getitem, parts[index // PART], index % PART) for index in range(count)]


def put_in_order(order: Iterable[fx.Node], graph: fx.Graph) -> None:
    """Move the nodes, which are all of the graph's, into this order."""
    last = graph._root
    for node in order:
        if last.next is not node:
            last.append(node)
        last = node


def expand(node: fx.Node) -> None:
    """Replace an ``unshard_all`` or ``reduce_all`` by an operator for each result that is read."""
    sources: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    specs = [CommSpec.decode(text) for text in node.args[-1]]  # type: ignore[union-attr, arg-type]
    insert_one = insert_unshard if is_unshard_all(node) else insert_reduce_grad
    for item in list(node.users):
        single = insert_one(node, sources[index_of(item)], specs[index_of(item)], item.meta["val"])
        single.meta |= {key: node.meta[key] for key in _OF_TRACING if key in node.meta}
        item.replace_all_uses_with(single)
        node.graph.erase_node(item)
    node.graph.erase_node(node)
