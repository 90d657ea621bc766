"""What a graph's own compute costs on a given cluster, by arithmetic alone.

It must not know collectives, and puts no guard on sizes that vary.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from .cluster import EFFICIENCY, Cluster
from .extents import PADDED_BYTES, counted

_aten = torch.ops.aten
_PRODUCTS: set[Any] = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
_ZEROS: set[Any] = {_aten.full.default, _aten.new_zeros.default, _aten.zeros.default}


def node_us(node: fx.Node, cluster: Cluster, model: Set[int] = frozenset()) -> float:
    """Return the estimated time of a compute node: the longer of its FLOPs and its memory traffic.

    Matrix products and attention read their inputs and write their output. Other nodes count their output only:
    Inductor fuses most of them with what they read. Views are free. So is what pads a product on a GPU, where
    Inductor finds out by measuring, on each rank for itself, whether to pad: the product counts as padded always.

    Sizes are rounded, but for the extents in ``model``; see :func:`extents.counted`.
    """
    if node.op != "call_function" or is_view(node) or _pads_a_product(node):
        return 0.0
    packet = _packet(node)
    formula = flop_registry.get(packet)
    counts = _Counts(model, packet in _PRODUCTS)
    if formula is None:
        return 1e6 * counts.bytes(node) / (EFFICIENCY * cluster.memory_bytes_per_s)
    traffic = sum(map(counts.bytes, [node, *node.all_input_nodes]))
    is_attention = any(word in str(packet) for word in ("attention", "attn"))
    stand_in = _with_equal_heads(node, counts.stand_in) if is_attention else counts.stand_in
    args, kwargs = map_aggregate(node.args, stand_in), map_aggregate(node.kwargs, stand_in)
    flops = formula(*args, **kwargs, out_val=stand_in(node))
    is_16bit = any(tensor.element_size() <= 2 for tensor in _tensors(node))
    peak = cluster.flops_16bit if is_16bit else cluster.flops_32bit
    seconds = max(flops / peak, traffic / cluster.memory_bytes_per_s) / EFFICIENCY
    return max(seconds * 1e6, cluster.kernel_us)


@dataclass(frozen=True)
class _Counts:
    """The sizes that estimates are made from."""

    model: Set[int]  # see :func:`extents.counted`
    of_product: bool  # a GPU's tensors count as padded to the multiples that Inductor may pad products to

    def shape(self, tensor: torch.Tensor) -> list[int]:
        is_padded = self.of_product and tensor.device.type != "cpu"
        step = max(1, PADDED_BYTES // tensor.element_size()) if is_padded else 1
        return [counted(size, self.model, step) for size in tensor.shape]

    def bytes(self, node: fx.Node) -> int:
        """Return the size of a node's result, all tensors of it."""
        return sum(prod(self.shape(tensor)) * tensor.element_size() for tensor in _tensors(node))

    def stand_in(self, value: Any) -> Any:
        """Return what formulas for FLOPs take in place of an argument: tensors without memory, rounded numbers."""
        if isinstance(value, fx.Node):
            return tree_map(self.stand_in, value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            return torch.empty(self.shape(value), dtype=value.dtype, device="meta")
        is_number = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
        return counted(value, self.model) if is_number else value


def _with_equal_heads(node: fx.Node, stand_in: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what gives attention's arguments with as many heads in all, as the formulas of torch 2.11 want them.

    Later ones want a multiple, which rounding may break. Queries, keys, values and their gradients are
    ``[batch, heads, length, features]`` or ``[length, heads, features]``.
    """

    def is_heads(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() in (3, 4)

    found_heads = (found.shape[1] for each in node.all_input_nodes if is_heads(found := stand_in(each)))
    heads = max(found_heads, default=0)

    def given(argument: Any) -> Any:
        found = stand_in(argument)
        return found.new_empty(found.shape[0], heads, *found.shape[2:]) if is_heads(found) else found

    return given


def _pads_a_product(node: fx.Node) -> bool:
    """Tell whether ``node`` makes zeros, or appends them, for matrix products alone."""
    zeros = node.all_input_nodes[1:] if node.target == _aten.cat.default else [node]
    if len(zeros) != 1 or zeros[0].target not in _ZEROS or not node.users:
        return False
    return all(_packet(user) in _PRODUCTS or _pads_a_product(user) for user in node.users)


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def is_view(node: fx.Node) -> bool:
    """Tell whether a node's result shares its input's memory, or takes a piece out of a list."""
    return bool(getattr(node.target, "is_view", False)) or getattr(node.target, "__name__", "") == "getitem"


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]
