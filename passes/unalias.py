"""What graphs that call regions need besides: one operator for each parameter, and results without shared memory.

AOTAutograd parts a region in two before the graph around it, and lets its forward half return whatever its backward
half needs: an unsharded parameter, which would then be saved, or an activation. ``Unalias`` takes these from outside
the region, where Inductor sees whose memory they are. More results come to share memory by what Inductor makes of the
region, where it drops a copy or lets a concatenation hold its parts. ``Protect`` finds them after that, and keeps
Inductor from writing other tensors over one of them once that one has been read. Neither decides what is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .cost.compute import is_view, node_bytes, work_of
from .graph import emit, nodes
from .inductor import source_hash
from .torch_internals import V, config, custom_graph_pass, ir

_MAYBE_VIEWS = ("aten._unsafe_view.default", "aten.reshape.default")
_OWN = "fsdp_compiled_own_memory"  # key in the meta of a node with whose memory no region has to do
_SLOT = "_pre_fusion_custom_pass"
_SchedulerPass = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)  # torch 2.11


def region_options(given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of Inductor without which graphs that call regions are refused; ``given`` are the user's.

    Raises:
        NotImplementedError: the user has a pass of his own where ``Protect`` must be.
    """
    options = protected(given or {})
    if not options:
        raise NotImplementedError(
            f"regions: expected no pass in Inductor's option {_SLOT}, where theirs must be, "
            f"got {_in_slot(given or {})!r}; take it out, or compile without regions"
        )
    return options


def protected(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of :func:`region_options`, or none where the user has a pass of his own."""
    return {_SLOT: Protect()} if isinstance(_in_slot(given), Protect | None) else {}


def suits_default(options: Mapping[str, Any]) -> bool:
    """Tell whether graphs may call regions that nobody has asked for; with CUDA graphs they are untested."""
    return isinstance(_in_slot(options), Protect) and not options.get("triton.cudagraphs", config.triton.cudagraphs)


def install() -> None:
    """Let every later ``torch.compile`` of this process have :func:`region_options`, but for a pass of the user's."""
    for slot, run in protected({}).items():
        setattr(config, slot, run)


def uninstall() -> None:
    if isinstance(getattr(config, _SLOT), Protect):
        setattr(config, _SLOT, None)


def _in_slot(options: Mapping[str, Any]) -> object:
    return options.get(_SLOT, getattr(config, _SLOT))


@dataclass(frozen=True)
class Expand:
    """One operator for each parameter that is read; one for several is cheaper to trace. Numerics cannot change.

    ::

        w1, w2 = unshard_all([s1, s2])  ->  w1 = unshard(s1); w2 = unshard(s2)
        d1, d2 = reduce_all([g1, g2])   ->  d1 = reduce_grad(g1); d2 = reduce_grad(g2)
    """

    def __call__(self, graph: fx.Graph) -> None:
        for name in ("unshard_all", "reduce_all"):
            for node in nodes.calls_of(graph, name):
                emit.expand(node)


@dataclass(frozen=True)
class Unalias:
    """No result of a region shares memory with its arguments. Numerics cannot change.

    Products that no region reads are marked for ``Protect``, logits among them::

        y, s, v = region(x, w), where s = w and v = w.t()  ->  s = w; v = w.t()
    """

    def __call__(self, graph: fx.Graph) -> None:
        calls = list(_regions_called(graph))
        for call, region in calls:
            _unalias(call, region)
        if calls:
            _mark_own(graph)


def may_be_overwritten(placeholder: fx.Node) -> bool:
    """Tell whether a backward graph that calls regions may write over what it is given."""
    return _OWN in placeholder.meta


def _mark_own(graph: fx.Graph) -> None:
    """Mark products that no region reads, nor what may lie in their memory: views, and copies that Inductor drops."""
    read = set[fx.Node]()
    for node in reversed(graph.nodes):
        of_its_memory = (each for each in node.users if is_view(each) or node_bytes(each) == node_bytes(node))
        if any(nodes.region_of(user) is not None for user in node.users) or not read.isdisjoint(of_its_memory):
            read.add(node)
        elif work_of(node) == "matrix products":
            node.meta[_OWN] = True


def _regions_called(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Graph]]:
    for call in graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        yield call, nodes.region_module_of(call).graph


def _unalias(call: fx.Node, region: fx.Graph) -> None:
    if not isinstance(getattr(config, _SLOT), Protect):
        raise RuntimeError(
            f"regions: expected {Protect()} in Inductor's option {_SLOT}, or results could be overwritten; "
            "compile the model by fsdp_compiled.compile(model, regions=...)"
        )
    operands = dict(zip(region.find_nodes(op="placeholder"), nodes.operands_of(call), strict=True))
    results = nodes.results_of(region)
    for item in list(call.users):
        result = results[nodes.index_of(item)]
        if result is not None and _is_of_argument(result):
            emit.replace_by([item], [_copied(result, item, dict(operands))])


def _is_of_argument(node: fx.Node) -> bool:
    """Tell whether ``node`` is an argument of the region, or a view of one."""
    while node.op != "placeholder":
        if not (is_view(node) or str(node.target) in _MAYBE_VIEWS) or nodes.is_getitem(node):
            return False
        node = nodes.source_of(node)
    return True


def _copied(node: fx.Node, before: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return what stands for a region's ``node`` around it: ``known``, or a copy."""
    if node not in known:
        for source in node.all_input_nodes:
            _copied(source, before, known)
        known[node] = emit.insert_copy(before, node, known)
    return known[node]


@dataclass(frozen=True)
class MakePicklable:
    """The graphs of regions can be read from a compile cache. Numerics cannot change.

    AOTAutograd's cache holds a backward graph with those of its regions as code, and reads these by symbolic tracing,
    to which a size in a list is none of an operator's arguments::

        full([1, s, 8], 2)  ->  (scalar_tensor(s) - scalar_tensor(s) + 2).expand([1, s, 8]).clone()

    Code generation fuses either into what reads it. Torch would fold a product with zero into a ``full`` again.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for _, region in _regions_called(graph):
            for node in region.find_nodes(op="call_function", target=torch.ops.aten.full.default):
                _make_traceable(node)


def _make_traceable(full: fx.Node) -> None:
    aten, (size, fill), value = torch.ops.aten, full.args, nodes.value_of(full)
    varies = [each for each in size if isinstance(each, fx.Node)]  # type: ignore[union-attr]
    if not varies or value.is_complex():
        return
    scalar = emit.insert(full, aten.scalar_tensor.default, varies[0], value=value.new_empty((), dtype=torch.int64))
    scalar.kwargs = {"dtype": torch.int64, "device": value.device}
    zero = emit.insert(full, aten.sub.Tensor, scalar, scalar)
    zero = zero if value.dtype == torch.bool else emit.insert_cast(full, zero, value.dtype)
    filled = emit.insert_cast(full, emit.insert(full, aten.add.Tensor, zero, fill), value.dtype)
    expanded = emit.insert(full, aten.expand.default, filled, size)
    emit.replace_by([full], [emit.insert(full, aten.clone.default, expanded, value=value)])


@dataclass(frozen=True)
class Protect(_SchedulerPass):  # type: ignore[misc, valid-type]
    """Nothing is written over what shares memory with a region's result. It runs before Inductor plans memory.

    Nor over inputs that AOTAutograd gave away to a backward graph and ``Unalias`` has not marked: it has not seen
    which of them share memory, and Inductor takes the inputs of regions at the same positions for given away, too.
    """

    def __call__(self, scheduled: list[Any]) -> list[Any]:
        graph = V.graph
        calls = [each for each in graph.operations if isinstance(each, ir.InvokeSubgraph)]
        if not calls and not hasattr(graph, "parent"):  # it neither calls a region nor is one
            return scheduled
        own = {each.target for each in graph.graph.find_nodes(op="placeholder") if may_be_overwritten(each)}
        given = (name for name, each in graph.graph_inputs_original.items() if isinstance(each, ir.DonatedBuffer))
        graph.never_reuse_buffers.update(name for name in given if name not in own)
        for call in calls:
            graph.never_reuse_buffers.update(_shared(graph, call))
        return scheduled

    def uuid(self) -> str:
        return source_hash(Path(__file__).parent)


def _shared(graph: Any, call: Any) -> set[str]:
    """Return the buffers around a region that share memory by the region's doing: results and arguments."""
    read = (each for each in call.outputs if isinstance(each, ir.MultiOutput))
    results = [_memory_of(graph, each) for each in read if each.get_name() not in graph.removed_buffers]
    arguments = [_memory_of(graph, argument) for argument in call.inputs]
    pairs = [*combinations(results, 2), *product(results, arguments)]
    return {name for one, other in pairs if one & other for name in one | other}


def _memory_of(graph: Any, node: Any) -> set[str]:
    """Return the names of the buffers in whose memory a tensor may lie, those within regions among them."""
    if isinstance(node, (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)):
        return set()
    found, left = set[str](), [node.get_name()]
    while left:
        if (name := left.pop()) in found:
            continue
        found.add(name)
        if (buffer := graph.name_to_buffer.get(name)) is None:  # an input, a constant, or within a region
            continue
        left += [*buffer.get_inputs_that_alias_output(), *buffer.get_mutation_names()]
        call = buffer.inputs[0] if isinstance(buffer, ir.MultiOutput) else None
        if isinstance(call, ir.InvokeSubgraph):
            left += _through_region(call, buffer.indices[0][1])
    return found


def _through_region(call: Any, index: int) -> list[str]:
    """Return what a result shares memory with: its region's arguments, and buffers in it by names of their own."""
    region = call.subgraph.graph
    arguments = dict(zip(region.graph_input_names, call.inputs, strict=True))
    return [
        arguments[name].get_name() if name in arguments else f"{name} of {call.get_name()}"
        for name in _memory_of(region, region.graph_outputs[index])
    ]
