"""Takes what a region only passes through, or a view of it, from where the region has it.

AOTAutograd parts a region in two before the graph around it, and lets its forward half return whatever its backward
half needs: an unsharded parameter, which would then be saved, or an activation, which Inductor would then take for
another tensor than the argument that it is. This pass must not decide what is saved.

Results may share memory with each other, too, by what Inductor makes of the region. Around it, Inductor does not know
that, and would write another tensor over one of them once that one has been read: it must reuse no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch._inductor import config  # see inductor.py

from .cost.compute import is_view
from .graph import nodes

REGION_OPTIONS = {"allow_buffer_reuse": False, "inplace_buffers": False}  # of Inductor, for graphs that call regions
_MAYBE_VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default}


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
            if config.allow_buffer_reuse or config.inplace_buffers:
                raise RuntimeError(
                    "regions: expected Inductor's options allow_buffer_reuse=False and inplace_buffers=False, or "
                    "results could be overwritten; compile the model by fsdp_compiled.compile(model, regions=...)"
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
            known[node] = nodes.insert_copy(item, node, known)
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
