"""What a graph's own compute costs on a given cluster, by arithmetic alone, and how large results are.

It must not know collectives, and puts no guard on sizes that vary.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .cluster import EFFICIENCY, Cluster

_aten = torch.ops.aten
_PRODUCTS: set[Any] = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
_ATTENTION = {packet for packet in flop_registry if "_scaled_dot_product" in str(packet)}
_OF_TENSORS = {packet for packet in flop_registry if str(packet).startswith(("aten._flash_", "aten._efficient_"))}
_ZEROS: set[Any] = {_aten.full.default, _aten.new_zeros.default, _aten.zeros.default}
_UNKNOWN = 8192  # a size that depends on data. *Source:* Inductor's unbacked_symint_fallback.


def node_us(node: fx.Node, cluster: Cluster) -> float:
    """Return the estimated time of a compute node: the longer of its FLOPs and its memory traffic.

    Matrix products and attention read their inputs and write their output. Other nodes count their output only:
    Inductor fuses most of them with what they read. Views are free. So is what pads a product on a GPU, where
    Inductor finds out by measuring, on each rank for itself, whether to pad: the product counts as padded always.
    """
    if node.op != "call_function" or is_view(node) or _pads_a_product(node):
        return 0.0
    packet = _packet(node)
    count = flop_registry.get(packet)
    if count is None:
        return 1e6 * size_bytes(node) / (EFFICIENCY * cluster.memory_bytes_per_s)
    shape = _shape_for(packet, node)
    flops = _extent(count(*fx.map_arg(node.args, shape), **fx.map_arg(node.kwargs, shape), out_val=shape(node)))
    if packet in _PRODUCTS:
        traffic = sum(prod(shape(each)) * each.meta["val"].element_size() for each in [node, *node.all_input_nodes])
    else:
        traffic = size_bytes(node) + sum(map(size_bytes, node.all_input_nodes))
    is_16bit = any(tensor.element_size() <= 2 for tensor in _tensors(node))
    peak = cluster.flops_16bit if is_16bit else cluster.flops_32bit
    seconds = max(flops / peak, traffic / cluster.memory_bytes_per_s) / EFFICIENCY
    return max(seconds * 1e6, cluster.kernel_us)


def _shape_for(packet: Any, node: fx.Node) -> Callable[[fx.Node], Any]:
    """Return what gives the inputs and the output of ``node`` as the formula for its FLOPs wants them."""
    if packet in _OF_TENSORS:
        return _value
    if packet in _PRODUCTS:
        return _padded_shape
    if packet in _ATTENTION:
        return _with_equal_heads(node)
    return _shape


def _shape(node: fx.Node) -> Any:
    value = _value(node)
    return torch.Size(map(_extent, value.shape)) if isinstance(value, torch.Tensor) else value


def _padded_shape(node: fx.Node) -> torch.Size:
    """Return the shape that Inductor may pad a product's input or output to. *Source:* its pad_mm."""
    value = node.meta["val"]
    step = 1 if value.device.type == "cpu" else max(1, 16 // value.element_size())
    return torch.Size(size if size == 1 else -(-size // step) * step for size in _shape(node))


def _with_equal_heads(node: fx.Node) -> Callable[[fx.Node], Any]:
    """Return what gives attention's inputs as the formulas of torch 2.11 want them, with as many heads in all.

    Queries, keys, values and their gradients are ``[batch, heads, length, features]``.
    """
    heads = max(found[1] for each in node.all_input_nodes if len(found := _shape(each)) == 4)

    def shape(each: fx.Node) -> Any:
        found = _shape(each)
        is_heads = isinstance(found, torch.Size) and len(found) == 4
        return torch.Size((found[0], heads, *found[2:])) if is_heads else found

    return shape


def _extent(size: int | torch.SymInt) -> int:
    """Return a size as a number, without a guard on it.

    One that varies counts as the next power of two, so that ranks that see somewhat different ones estimate alike.
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return _UNKNOWN if hint is None else 1 << max(0, hint - 1).bit_length()


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


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = _value(node)
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def size_bytes(node: fx.Node) -> int:
    """Return the size of a node's result, all tensors of it."""
    return sum(prod(map(_extent, t.shape)) * t.element_size() for t in _tensors(node))
