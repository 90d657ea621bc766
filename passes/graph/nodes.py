"""The library's operators as FX nodes: what each is, what it carries, what is known about its tensors.

This file alone knows how operators are named and where their arguments stand. It knows nothing of modules, process
groups or schedules; what a kind of collective is, it asks :mod:`kinds`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from ...sharding.contract import Contract
from ...sharding.spec import Bucket, CommSpec, ParamSpec
from .. import kinds
from ..kinds import Kind

NAMESPACE = "fsdp_compiled"
UNSHARD_SCHEMA = "unshard(Tensor shard, Tensor? unsharded_grad, Tensor? partial_grad, str spec) -> Tensor"
UNSHARD_ALL_SCHEMA = "unshard_all(Tensor[] shards, Tensor[] leaves, int[] targets, str[] specs) -> Tensor[]"
REDUCE_ALL_SCHEMA = "reduce_all(Tensor[] grads, str[] specs) -> Tensor[]"
REDUCE_GRAD_SCHEMA = "reduce_grad(Tensor grad, str spec) -> Tensor"
WITH_GRADIENT_SCHEMA = (
    "with_gradient(Tensor unsharded, Tensor shard, Tensor? unsharded_grad, Tensor? partial_grad, str spec) -> Tensor"
)
TAKE_SHARD_SCHEMA = "take_shard(Tensor unsharded, int dim, int world, str group) -> Tensor"

PART = 16  # results of a long list are taken from parts of it, since torch walks through the list for each of them
_LAUNCH, _WAIT = f"{NAMESPACE}.launch_", f"{NAMESPACE}.wait_"


def opaque_schema(name: str) -> str:
    """Return the schema of a kind's opaque operator that has no other arguments than a tensor and a bucket of it."""
    return f"{name}(Tensor input, str bucket) -> Tensor"


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


def is_communication(node: fx.Node) -> bool:
    """Tell whether ``node`` is an operator of ours, or takes a result out of one."""
    if is_getitem(node):
        return is_communication(list_of(node))
    return node.op == "call_function" and str(node.target).startswith(f"{NAMESPACE}.")


def has_ours(graph: fx.Graph) -> bool:
    """Tell whether ``graph`` holds any operator of this library."""
    return any(map(is_communication, graph.nodes))


def is_pinned(graph: fx.Graph) -> bool:
    """Tell whether ``graph`` has control dependencies, which hide the nodes that they are of."""
    return any("control_deps" in str(node.target) for node in graph.nodes)


# ---- opaque operators ----


def opaque_kind(node: fx.Node) -> Kind | None:
    """Return the kind of collective that an opaque node asks for; None if ``node`` is none."""
    name = str(node.target)
    if node.op != "call_function" or not name.startswith(f"{NAMESPACE}."):
        return None
    return kinds.of_opaque(name.removeprefix(f"{NAMESPACE}.").removesuffix(".default"))


def asked_of(node: fx.Node) -> Bucket:
    """Return the bucket of an opaque node alone."""
    kind = opaque_kind(node)
    assert kind is not None
    return kind.bucket_of_one(str(node.args[-1]), value_of(source_of(node)))


def travels(node: fx.Node) -> bool:
    """Tell whether ``node`` is an opaque one for which anything leaves this rank's compute."""
    if opaque_kind(node) is None:
        return False
    alone = asked_of(node)
    return alone.spec.local_steps(alone.params[0]) is None


def spec_of(node: fx.Node) -> CommSpec:
    """Return the spec of an ``unshard``, ``reduce_grad`` or ``with_gradient`` node."""
    value = value_of(source_of(node))
    return CommSpec.decode(str(node.args[-1])).for_input(value.shape, value.dtype)


def params_of(nodes: Sequence[fx.Node]) -> list[ParamSpec]:
    """Return what travels at each node. Models of one class name units alike; in one graph they are numbered."""
    met, params = Counter[tuple[str, str, str]](), list[ParamSpec]()
    for node in nodes:
        (param,) = asked_of(node).params
        place = (str(node.target), param.unit, param.name)
        if met[place]:
            outermost, dot, rest = param.unit.partition(".")
            param = replace(param, unit=f"{outermost}#{met[place]}{dot}{rest}")
        met[place] += 1
        params.append(param)
    return params


# ---- launches and waits ----


def is_launch(node: fx.Node) -> bool:
    """Tell whether ``node`` starts a stage of a bucket."""
    return node.op == "call_function" and str(node.target).startswith(_LAUNCH)


def is_wait(node: fx.Node) -> bool:
    """Tell whether ``node`` waits for a stage."""
    return node.op == "call_function" and str(node.target).startswith(_WAIT)


def stage_of(node: fx.Node) -> str:
    """Return the stage that a launch or a wait belongs to."""
    return str(node.target).removesuffix(".default").removeprefix(_LAUNCH).removeprefix(_WAIT)


def kind_of(node: fx.Node) -> Kind:
    """Return the kind of a launch or a wait."""
    return kinds.of_stage(stage_of(node))


def bucket_of(node: fx.Node) -> Bucket:
    """Return what a launch or a wait carries."""
    bucket: Bucket = kind_of(node).bucket.decode(str(node.args[1]))
    return bucket


def is_first_stage(launch: fx.Node) -> bool:
    """Tell whether a launch takes tensors, rather than the handle of the stage before."""
    return stage_of(launch) == bucket_of(launch).stages[0]


def is_ours(node: fx.Node) -> bool:
    """Tell whether ``node`` is a launch, a wait, or takes a result out of a wait."""
    return is_wait(list_of(node)) if is_getitem(node) else is_launch(node) or is_wait(node)


def inputs_of(launch: fx.Node) -> list[fx.Node]:
    return list(launch.args[0])  # type: ignore[arg-type]


def results_of_wait(wait: fx.Node) -> dict[int, fx.Node]:
    """Return the results of a wait that are read, by their index."""
    items = (item for item in getitems_of(wait) if not is_part(item))
    return dict(sorted((index_of(item), item) for item in items))


def set_contract(launch: fx.Node, contract: Contract) -> None:
    """Let ranks agree on ``contract`` before ``launch``."""
    launch.args = (*launch.args[:2], contract.pack())


def contract_at(launch: fx.Node) -> Contract | None:
    """Return what ranks agree on before ``launch``."""
    return Contract.unpack(str(launch.args[2])) if len(launch.args) > 2 else None


def unsharded_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    """Yield what a graph, opaque or lowered, makes of parameters ahead of use, with the unsharded shapes."""
    for node in graph.nodes:
        if (kind := opaque_kind(node)) is not None and kind.is_ahead:
            yield node, asked_of(node).layouts[0].shape
        elif is_wait(node) and kind_of(node).is_ahead:
            layouts = bucket_of(node).layouts
            yield from ((item, layouts[index].shape) for index, item in results_of_wait(node).items())


def gradients_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    """Yield the unsharded gradients that a graph, opaque or lowered, reduces, with their shapes."""
    for node in graph.nodes:
        if (kind := opaque_kind(node)) is not None and not kind.is_ahead:
            yield source_of(node), asked_of(node).layouts[0].shape
        elif is_launch(node) and not kind_of(node).is_ahead and is_first_stage(node):
            layouts = bucket_of(node).layouts
            yield from ((grad, layout.shape) for grad, layout in zip(inputs_of(node), layouts, strict=True))


# ---- tensors and lists ----


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


def index_of(item: fx.Node) -> int:
    """Return which result in the list of :func:`list_of` a ``getitem`` takes."""
    source, index = source_of(item), int(item.args[1])  # type: ignore[arg-type]
    return source.args[1].start + index if is_part(source) else index  # type: ignore[union-attr]


def getitems_of(source: fx.Node) -> Iterator[fx.Node]:
    """Yield every ``getitem`` from a list, the parts before what is taken from them."""
    for user in filter(is_getitem, source.users):
        yield user
        if is_part(user):
            yield from getitems_of(user)


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


# ---- regions ----


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
