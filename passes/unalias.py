"""Results of regions that share memory with each other or with arguments, which Inductor takes for separate tensors.

AOTAutograd parts a region in two before the graph around it, and lets its forward half return whatever its backward
half needs: an unsharded parameter, which would then be saved, or an activation. ``Unalias`` takes these from outside
the region, where Inductor sees whose memory they are. More results come to share memory by what Inductor makes of the
region, where it drops a copy or lets a concatenation hold its parts. ``Protect`` finds them after that, and keeps
Inductor from writing other tensors over one of them once that one has been read. Neither decides what is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config, custom_graph_pass, ir  # see inductor.py; its types are not complete
from torch._inductor.virtualized import V

from .cost.compute import is_view
from .graph import emit, nodes
from .inductor import source_hash

_MAYBE_VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default}
_SLOT = "_pre_fusion_custom_pass"
_SchedulerPass = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)  # torch 2.11


def region_options(given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of Inductor without which graphs that call regions are refused; ``given`` are the user's.

    Raises:
        NotImplementedError: the user has a pass of his own where ``Protect`` must be.
    """
    user = (given or {}).get(_SLOT, getattr(config, _SLOT))
    if user is not None and not isinstance(user, Protect):
        raise NotImplementedError(
            f"regions: expected no pass in Inductor's option {_SLOT}, where theirs must be, got {user!r}; "
            "take it out, or compile without regions"
        )
    return {_SLOT: Protect()}


@dataclass(frozen=True)
class Unalias:
    """No result of a region shares memory with its arguments. Numerics cannot change.

    ::

        y, s, v = region(x, w), where s = w and v = w.t()  ->  s = w; v = w.t()
    """

    def __call__(self, graph: fx.Graph) -> None:
        for call in list(graph.nodes):
            region = nodes.region_of(call)
            if region is None:
                continue
            if not isinstance(getattr(config, _SLOT), Protect):
                raise RuntimeError(
                    f"regions: expected {Protect()} in Inductor's option {_SLOT}, or results could be overwritten; "
                    "compile the model by fsdp_compiled.compile(model, regions=...)"
                )
            _unalias(call, region)


def _unalias(call: fx.Node, region: fx.Graph) -> None:
    operands = dict(zip(region.find_nodes(op="placeholder"), nodes.operands_of(call), strict=True))
    results = nodes.results_of(region)
    for item in list(call.users):
        result = results[nodes.index_of(item)]
        if result is None or not _is_of_argument(result):
            continue
        known = dict(operands)
        for node in _made_of_arguments(result):
            known[node] = emit.insert_copy(item, node, known)
        item.replace_all_uses_with(known[result])
        call.graph.erase_node(item)


def _is_of_argument(node: fx.Node) -> bool:
    """Tell whether ``node`` is an argument of the region, or a view of one."""
    while node.op != "placeholder":
        if not (is_view(node) or node.target in _MAYBE_VIEWS) or nodes.is_getitem(node):
            return False
        node = nodes.source_of(node)
    return True


def _made_of_arguments(result: fx.Node) -> list[fx.Node]:
    """Return the views, and the sizes that they take, from arguments to ``result``, in order."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node.op != "placeholder" and node not in found:
            for source in node.all_input_nodes:
                visit(source)
            found[node] = None

    visit(result)
    return list(found)


@dataclass(frozen=True)
class Protect(_SchedulerPass):  # type: ignore[misc, valid-type]
    """Nothing is written over what shares memory with a region's result. It runs before Inductor plans memory.

    Nor over inputs that AOTAutograd gave away to a backward graph: it has not seen which of them share memory, and
    Inductor takes the inputs of regions at the same positions for given away, too.
    """

    def __call__(self, scheduled: list[Any]) -> list[Any]:
        graph = V.graph
        graph.never_reuse_buffers.update(
            name for name, original in graph.graph_inputs_original.items() if isinstance(original, ir.DonatedBuffer)
        )
        for call in graph.operations:
            if isinstance(call, ir.InvokeSubgraph):
                graph.never_reuse_buffers.update(_shared(graph, call))
        return scheduled

    def uuid(self) -> str:
        """Return a hash of the passes' sources."""
        return source_hash(Path(__file__).parent)


def _shared(graph: Any, call: Any) -> set[str]:
    """Return the buffers around a region that share memory by the region's doing: results and arguments."""
    results = [_memory_of(graph, result) for result in call.outputs if _is_read(graph, result)]
    arguments = [_memory_of(graph, argument) for argument in call.inputs]
    pairs = [*combinations(results, 2), *product(results, arguments)]
    return {name for one, other in pairs if one & other for name in one | other}


def _is_read(graph: Any, result: Any) -> bool:
    return isinstance(result, ir.MultiOutput) and result.get_name() not in graph.removed_buffers


def _memory_of(graph: Any, node: Any) -> set[str]:
    """Return the names of the buffers in whose memory a tensor may lie, those within regions among them."""
    if isinstance(node, (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)):
        return set()
    found: set[str] = set()
    left = [node.get_name()]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        buffer = graph.name_to_buffer.get(name)
        if buffer is None:  # an input, a constant, or within a region
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
