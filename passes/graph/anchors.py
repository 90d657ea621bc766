"""A graph's compute as every rank has it, whatever the sizes of its inputs: what schedules are decided from.

Ranks decide alike and cannot ask each other while they compile, though one may see 128 tokens and another 4096, one a
fixed size and another one that varies. So nothing here reads a size that is not a parameter's, or guards one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..cost import Cluster
from ..cost.compute import call_of, is_attention, is_backward, is_view, needed_of, packet_of, tensors_of
from . import nodes

SEQUENCE = 4096  # nominal length of a sequence, in tokens, unless there are fewer tokens
PARAMETER = "fsdp_compiled_parameter"  # key in the meta of a parameter's value: its :class:`Weight`
# Times the FLOPs of forward. *Source:* torch.utils.flop_counter: five products, not two.
_BACKWARD_OF_ATTENTION = 2.5
_SIZES = (int, torch.SymInt)


class Weight(NamedTuple):
    """A parameter that compute reads, or whose gradient it makes, by its unsharded shape."""

    numel: int
    width: int  # of the last dimension

    @property
    def is_vector(self) -> bool:
        return self.numel <= self.width


Read = tuple[Mapping[int, Weight], Mapping[int, Weight]]  # of a region: parameters by operand, gradients by result
_Weights = dict[fx.Node, Weight]


def _weights(shapes: Iterable[tuple[fx.Node, tuple[int, ...]]]) -> _Weights:
    return {node: Weight(prod(shape), shape[-1] if shape else 1) for node, shape in shapes}


class AnchoredCompute:
    """A graph's compute in order, whose positions are its anchors, and what lies between two of them.

    An *anchor* reads a parameter, makes the gradient of one that is no vector, is an attention, or is a region with
    such nodes. Anchor ``k`` has position ``2 k + 1``; everything between it and the anchor before, position ``2 k``.
    So positions do not change with nodes that only some ranks have: those that follow from a fixed size, or from what
    AOTAutograd saves. What is computed from parameters alone has no position: it belongs to what reads it.

    Args:
        graph: with parameters all-gathered by operators of ours, opaque or lowered.
        is_ours: tells what is no compute, but belongs to a collective.
        tokens: nominal number of them, that a rank's batch holds.
    """

    def __init__(self, graph: fx.Graph, is_ours: Callable[[fx.Node], bool], tokens: int) -> None:
        known = _weights(nodes.unsharded_of(graph))
        known |= {n: n.meta[PARAMETER] for n in graph.nodes if n.op == "placeholder" and PARAMETER in n.meta}
        values = _with_derived(graph, known)
        self._tokens, self._values = tokens, values
        inside = (node for node in graph.nodes if node.op not in ("placeholder", "output"))
        self.nodes = [node for node in inside if node not in values and not is_ours(node)]
        self.position: dict[fx.Node, int] = {}
        self._anchors = list(_anchors(graph, values, _makers(_weights(nodes.gradients_of(graph)))))
        anchors, count = {node for node, _ in self._anchors}, 0
        for node in self.nodes:
            self.position[node] = 2 * count + (node in anchors)
            count += node in anchors

    @property
    def end(self) -> int:
        """The position after the last node."""
        return 2 * len(self._anchors) + 1

    def after(self, source: fx.Node) -> int:
        """Return the first position at which ``source`` exists; the end if parameters alone give it."""
        return self.end if source in self._values else self.position.get(source, -1) + 1

    def reads(self, tensor: fx.Node) -> tuple[int, int]:
        """Return the positions of the first and the last node that read ``tensor``, or a view of it.

        Nodes that have no position are looked through. Both are the end of the graph if nothing reads it.
        """
        first, last = self.end, -1
        stack, seen = [(tensor, True)], set[fx.Node]()
        while stack:
            source, is_direct = stack.pop()
            for user in source.users:
                place = self.position.get(user)
                if place is not None:
                    first, last = min(first, place) if is_direct else first, max(last, place)
                if user not in seen and (place is None or is_view(user)):
                    seen.add(user)
                    stack.append((user, is_direct and place is None))
        return first, max(first, last)

    def time(self, cluster: Cluster) -> tuple[float, ...]:
        """Return the estimated time at each position in microseconds, for the nominal number of tokens."""
        known, times = dict[Any, float](), [0.0] * self.end
        for node, weight in self._anchors:
            times[self.position[node]] = _anchor_us(node, weight, cluster, self._tokens, known)
        return tuple(times)


def mark_parameters(graph: fx.Graph) -> None:
    """Note beside what is computed from parameters alone that it is; what forward keeps for backward stays noted."""
    for node, weight in _with_derived(graph, _weights(nodes.unsharded_of(graph))).items():
        node.meta[PARAMETER] = weight


def _with_derived(graph: fx.Graph, known: _Weights) -> _Weights:
    """Add to values of parameters what is computed from them alone, such as a transposed or a cast one."""
    found = dict(known)
    for node in graph.nodes:
        sources = _operands_of(node)
        if node.op != "call_function" or not sources or node in found or not found.keys() >= set(sources):
            continue
        is_random = torch.Tag.nondeterministic_seeded in getattr(call_of(node).target, "tags", ())
        if not is_random and not nodes.is_communication(node) and nodes.region_of(node) is None:
            weights = [found[source] for source in sources]
            found[node] = Weight(sum(each.numel for each in weights), max(each.width for each in weights))
    return found


def _operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node computes with, without sizes, which are nodes only where they vary."""
    return [each for each in node.all_input_nodes if not isinstance(each.meta.get("val"), _SIZES)]


def _makers(gradients: _Weights) -> _Weights:
    """Return the nodes that make gradients of parameters that are no vectors, seen through sums, casts and views."""
    makers: _Weights = {}
    for source, weight in gradients.items():
        stack = [] if weight.is_vector else [source]
        while stack:
            node = stack.pop()
            if node.op != "call_function" or node in makers:
                continue
            region = nodes.region_of(nodes.source_of(node) if nodes.is_getitem(node) else node)
            sources = _operands_of(node)
            if region is None and (packet_of(node) is torch.ops.aten.add or len(sources) == 1):
                stack += sources
            else:
                makers[node] = weight
    return makers


def _anchors(graph: fx.Graph, read: _Weights, made: _Weights) -> Iterator[tuple[fx.Node, Weight | Read]]:
    """Yield the anchors in order, each with the parameter that it computes with, or those of the region."""
    for node in graph.nodes:
        if node.op != "call_function" or node in read or nodes.is_communication(node) or nodes.is_getitem(node):
            continue  # a gradient is made by a region, and not by taking it out of the region's results
        if nodes.region_of(node) is not None:
            operands = {at: read[each] for at, each in enumerate(nodes.operands_of(node)) if each in read}
            yield node, (operands, {nodes.index_of(i): made[i] for i in nodes.getitems_of(node) if i in made})
            continue
        weights = [read[source] for source in node.all_input_nodes if source in read]
        if weights or node in made or _is_torchs_attention(node):
            # of the matrix, and not of the bias that it adds, though a matrix of [k, 1] has no more elements
            product = max(weights, key=lambda each: (each.numel, -each.width), default=made.get(node, Weight(0, 0)))
            yield node, product


def _anchor_us(node: fx.Node, read: Weight | Read, cluster: Cluster, tokens: int, known: dict[Any, float]) -> float:
    if isinstance(read, Weight):
        return _product_us(node, read, cluster, tokens)
    region = nodes.region_module_of(node).graph
    key = region, tuple(read[0].items()), tuple(read[1].items())
    if key not in known:
        inputs, results = list(region.find_nodes(op="placeholder")), nodes.results_of(region)
        values = _with_derived(region, {inputs[at]: weight for at, weight in read[0].items()})
        made = _makers({result: w for at, w in read[1].items() if (result := results[at]) is not None})
        inner = _anchors(region, values, made)
        known[key] = sum(_anchor_us(each, weight, cluster, tokens, known) for each, weight in inner)
    return known[key]


def _product_us(node: fx.Node, weight: Weight, cluster: Cluster, tokens: int) -> float:
    """Return the longer of FLOPs and memory traffic: every token meets every element of a parameter once.

    Attention is quadratic in the length of a sequence.
    What is no product reads and writes a token's worth of the parameter's last dimension.
    """
    itemsize = min((tensor.element_size() for tensor in tensors_of(node)), default=4)
    traffic, flops = 2 * tokens * weight.width, 0.0
    if _is_torchs_attention(node):
        width = _width_of_attention(node)
        factor = _BACKWARD_OF_ATTENTION if is_backward(node) else 1.0
        flops = factor * needed_of(node) * 4 * tokens * min(tokens, SEQUENCE) * width
        traffic = int(factor * 4 * tokens * width) * itemsize
        return cluster.attention_us(flops, traffic, itemsize, is_backward(node))
    if not weight.is_vector and packet_of(node) in flop_registry:
        flops = 2.0 * weight.numel * tokens * _products(node)
        traffic = weight.numel + tokens * (weight.width + weight.numel // max(weight.width, 1))
    traffic *= itemsize
    return cluster.product_us(flops, traffic, itemsize) if flops else cluster.memory_us(traffic)


def _products(node: fx.Node) -> int:
    """Return how many products a node is: the backward of a convolution makes up to two gradients by one each."""
    mask = node.args[-1] if "convolution_backward" in str(node.target) else None
    return sum(map(bool, mask[:2])) if isinstance(mask, (list, tuple)) else 1


def _is_torchs_attention(node: fx.Node) -> bool:
    """Tell whether a node is an attention of torch's own: which dimension is a length, only those tell."""
    target = call_of(node).target
    return is_attention(node) and getattr(target, "namespace", "aten") in ("aten", "higher_order")


def _width_of_attention(node: fx.Node) -> int:
    """Return heads times features: operators take ``[batch, heads, length, features]`` or heads before features."""
    shapes = (tensor.shape for each in node.all_input_nodes for tensor in tensors_of(each))
    shape = next((shape for shape in shapes if len(shape) > 2), None)  # a random state may come first
    if shape is None:
        return 0
    heads_first = len(shape) == 4 and not any(
        word in str(call_of(node).target) for word in ("aten._flash", "aten._efficient")
    )
    heads, features = shape[1 if heads_first else -2], shape[-1]
    return heads * features if isinstance(heads, int) and isinstance(features, int) else 0
