"""The library's operators as FX nodes: what each is, what it carries, what is known about its tensors.

This file alone knows how operators are named and where their arguments stand; what a kind is, it asks :mod:`kinds`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from ...sharding.contract import Contract
from ...sharding.spec import Bucket, CommSpec, ParamSpec
from .. import kinds
from ..cost.compute import text_of, work_of
from ..kinds import Kind

NAMESPACE = "fsdp_compiled"
UNSHARD_SCHEMA = "unshard(Tensor shard, Tensor? unsharded_grad, Tensor? shard_grad, str spec) -> Tensor"
UNSHARD_ALL_SCHEMA = "unshard_all(Tensor[] shards, Tensor[] leaves, int[] targets, str[] specs) -> Tensor[]"
# What is done twice with equal arguments is taken for the same and done once; ``number`` tells calls apart, which add
# what there is besides their arguments.
REDUCE_SCHEMA = "reduce_grad(Tensor grad, str spec, *, int number=0) -> Tensor"
REDUCE_ALL_SCHEMA = "reduce_all(Tensor[] grads, str[] specs, *, int number=0) -> Tensor[]"
WITH_GRADIENT_SCHEMA = (
    "with_gradient(Tensor unsharded, Tensor shard, Tensor? unsharded_grad, Tensor? shard_grad, str spec) -> Tensor"
)
KEEP_GRAD_SCHEMA = "keep_grad(Tensor grad, Tensor? leaf, str spec, *, int number=0) -> Tensor"
TAKE_SHARD_SCHEMA = "take_shard(Tensor unsharded, int dim, int world, str group) -> Tensor"

OPAQUE_SCHEMA = "{}(Tensor input, str bucket) -> Tensor"  # of a kind whose own operator takes no other arguments
# What starts a stage, on tensors or on the handle of the stage before; the first of a graph carries a Contract.
LAUNCH_SCHEMA = "launch_{}(Tensor[] inputs, str bucket, str contract='') -> Tensor"
WAIT_SCHEMA = "wait_{}(Tensor handle, str bucket) -> Tensor[]"  # returns results, or a handle for the next stage

PART = 16  # results of a long list are taken from parts of it, since torch walks through the list for each of them


def operator_of(node: fx.Node) -> str:
    """Return the name of our operator that ``node`` calls; "" if it calls none."""
    return _name_of(node.target) if node.op == "call_function" else ""


@lru_cache(maxsize=1024)  # torch makes the text anew each time that it is asked for
def _name_of(target: Any) -> str:
    namespace, _, name = str(target).removesuffix(".default").partition(".")
    return name if namespace == NAMESPACE else ""


def calls_of(graph: fx.Graph, *names: str) -> list[fx.Node]:
    """Return the nodes that call our operators of these names, in order; torch finds them without a walk."""
    targets = (getattr(getattr(torch.ops, NAMESPACE), name).default for name in names)
    return sorted(node for target in targets for node in graph.find_nodes(op="call_function", target=target))


def is_communication(node: fx.Node) -> bool:
    """Tell whether ``node`` is an operator of ours, or takes a result out of one."""
    return is_communication(list_of(node)) if is_getitem(node) else bool(operator_of(node))


def has_ours(graph: fx.Graph) -> bool:
    return any(map(operator_of, graph.nodes))


def is_pinned(graph: fx.Graph) -> bool:
    """Tell whether ``graph`` has control dependencies, which hide the nodes that they are of."""
    return any("control_deps" in text_of(node.target) for node in graph.nodes if node.op == "call_function")


# ---- opaque operators ----


def opaque_nodes_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that ask for a collective of one tensor, in order."""
    return calls_of(graph, *(name for name, kind in kinds.by_operator.items() if kind.opaque == name))


def asked_of(node: fx.Node) -> Bucket:
    """Return the bucket of an opaque node alone."""
    return kind_of(node).bucket_of_one(str(node.args[-1]), value_of(source_of(node)))


def spec_of(node: fx.Node) -> CommSpec:
    """Return the spec of an ``unshard``, ``reduce_grad``, ``keep_grad`` or ``with_gradient`` node."""
    value = value_of(source_of(node))
    return CommSpec.decode(str(node.args[-1])).for_input(value.shape, value.dtype)


def params_of(asked: Mapping[fx.Node, Bucket]) -> list[ParamSpec]:
    """Return what travels at each opaque node, given its bucket alone.

    Models of one class name units alike; in one graph they are numbered.
    """
    met, params = Counter[tuple[str, str, str]](), list[ParamSpec]()
    for node, bucket in asked.items():
        (param,) = bucket.params
        place = (str(node.target), param.unit, param.name)
        if met[place]:
            outermost, dot, rest = param.unit.partition(".")
            param = replace(param, unit=f"{outermost}#{met[place]}{dot}{rest}")
        met[place] += 1
        params.append(param)
    return params


# ---- launches and waits ----


def launches_of(graph: fx.Graph) -> list[fx.Node]:
    return calls_of(graph, *(name for name in kinds.by_operator if name.startswith("launch_")))


def waits_of(graph: fx.Graph) -> list[fx.Node]:
    return calls_of(graph, *(name for name in kinds.by_operator if name.startswith("wait_")))


def is_launch(node: fx.Node) -> bool:
    return operator_of(node).startswith("launch_")


def is_wait(node: fx.Node) -> bool:
    return operator_of(node).startswith("wait_")


def stage_of(node: fx.Node) -> str:
    return operator_of(node).partition("_")[2]


def kind_of(node: fx.Node) -> Kind:
    """Return the kind of an opaque node, a launch or a wait."""
    return kinds.by_operator[operator_of(node)]


def bucket_of(node: fx.Node) -> Bucket:
    """Return what a launch or a wait carries."""
    return kind_of(node).bucket.decode(str(node.args[1]))


def is_first_launch(node: fx.Node) -> bool:
    """Tell whether ``node`` is a launch that takes tensors, not the handle of the stage before."""
    return is_launch(node) and stage_of(node) == bucket_of(node).stages[0]


def is_ours(node: fx.Node) -> bool:
    """Tell whether ``node`` is a launch, a wait, or takes a result out of a wait."""
    return is_wait(list_of(node)) if is_getitem(node) else is_launch(node) or is_wait(node)


def inputs_of(launch: fx.Node) -> list[fx.Node]:
    return list(launch.args[0])  # type: ignore[arg-type]


def set_contract(launch: fx.Node, contract: Contract) -> None:
    """Let ranks agree on ``contract`` before ``launch``."""
    launch.args = (*launch.args[:2], contract.pack())


def contract_at(launch: fx.Node) -> Contract | None:
    return Contract.unpack(str(launch.args[2])) if len(launch.args) > 2 else None


def unsharded_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    """Yield what a graph, opaque or lowered, makes of parameters ahead of use, with the unsharded shapes."""
    for node in sorted([*opaque_nodes_of(graph), *waits_of(graph)]):
        if not kind_of(node).is_ahead:
            continue
        if not is_wait(node):
            yield node, asked_of(node).layouts[0].shape
        else:
            layouts, items = bucket_of(node).layouts, (item for item in getitems_of(node) if not is_part(item))
            yield from ((item, layouts[index_of(item)].shape) for item in sorted(items, key=index_of))


def gradients_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    """Yield the unsharded gradients that a graph, opaque or lowered, reduces, with their shapes."""
    for node in sorted([*opaque_nodes_of(graph), *launches_of(graph)]):
        if kind_of(node).is_ahead:
            continue
        if not is_launch(node):
            yield source_of(node), asked_of(node).layouts[0].shape
        elif is_first_launch(node):
            layouts = bucket_of(node).layouts
            yield from ((grad, layout.shape) for grad, layout in zip(inputs_of(node), layouts, strict=True))


# ---- tensors and lists ----


def source_of(node: fx.Node) -> fx.Node:
    """Return the tensor that an operator takes first: a shard, a gradient, a handle."""
    return node.args[0]  # type: ignore[return-value]


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

    What forward has computed for backward, which may be freed or overwritten there, has other names.
    """
    return node.op == "placeholder" and re.match(r"primals|arg\d", str(node.target)) is not None


def is_write(node: fx.Node) -> bool:
    """Tell whether ``node`` writes to an input of the graph; AOTAutograd has the graph do so at its end."""
    return node.target is torch.ops.aten.copy_.default and source_of(node).op == "placeholder"


def written_of(graph: fx.Graph) -> dict[Hashable, fx.Node]:
    """Return the inputs that a graph writes to, by :func:`memory_of` each."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return {memory_of(source_of(node)): source_of(node) for node in copies if is_write(node)}


def memory_of(node: fx.Node) -> Hashable:
    """Return what inputs have in common that begin at the same memory: a shard, and the DTensor that lies in it."""
    value = value_of(node)
    return value.untyped_storage()._cdata, value.storage_offset()


def is_heavy(node: fx.Node) -> bool:
    """Tell whether ``node`` is compute that Inductor runs by itself, at a place of its own, or a region of it."""
    return work_of(node) != "fused kernels" or region_of(node) is not None


def device_of(graph: fx.Graph) -> torch.device:
    """Return the device that the graph computes on, though shards may live on the CPU."""
    devices = (value.device for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


# ---- regions ----


def region_of(node: fx.Node) -> fx.Graph | None:
    """Return the graph of the region that ``node`` calls; None if it calls none."""
    return region_module_of(node).graph if node.target is torch.ops.higher_order.invoke_subgraph else None


def region_module_of(call: fx.Node) -> fx.GraphModule:
    module = call.graph.owning_module
    assert module is not None
    return module.get_submodule(str(source_of(call).target))  # type: ignore[return-value]


def operands_of(call: fx.Node) -> tuple[Any, ...]:
    return call.args[2:]


def results_of(region: fx.Graph) -> Sequence[fx.Node | None]:
    (output,) = region.find_nodes(op="output")
    return output.args[0]  # type: ignore[return-value]
