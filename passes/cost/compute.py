"""What a node costs on a given cluster with the sizes that it has, by arithmetic alone: for those who look at graphs.

Nothing is decided from it: ranks whose inputs differ in size would decide differently. It puts no guard on sizes that
vary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...sharding.dtensor import process_group
from .cluster import Cluster

Work = Literal["matrix products", "attention", "other collectives", "fused kernels"]

# What has no formula of its own counts as another operator that takes the same arguments first.
COUNTED_AS: Mapping[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
# What writes to places that data decide, as the gradients of an embedding are added up.
SCATTERS = (
    torch.ops.aten.index_put,
    torch.ops.aten._unsafe_index_put,
    torch.ops.aten._unsafe_masked_index_put_accumulate,
    torch.ops.aten.index_add,
    torch.ops.aten.scatter,
    torch.ops.aten.scatter_add,
    torch.ops.aten.scatter_reduce,
)
# Collectives that other parallelism has put into a graph: whether they reduce, and how often they go around the ring.
_COLLECTIVES = {
    torch.ops._c10d_functional.all_gather_into_tensor: (False, 1),
    torch.ops._c10d_functional.reduce_scatter_tensor: (True, 1),
    torch.ops._c10d_functional.all_reduce: (True, 2),
    torch.ops._c10d_functional.all_to_all_single: (False, 1),
}
# Higher-order operators, and where among their arguments the operator stands that they call.
_WITH_RANDOM_STATE = {"run_and_save_rng_state": 0, "run_with_rng_state": 1, "graphsafe_run_with_rng_state": 0}
_UNKNOWN = 8192  # a size that depends on data. *Source:* Inductor's unbacked_symint_fallback.


def node_us(node: fx.Node, cluster: Cluster) -> float:
    """Return the estimated time of a compute node: the longer of its FLOPs and its memory traffic.

    Matrix products and attention read their inputs and write their output. Other nodes count their output only:
    Inductor fuses most of them with what they read. Views are free. A size that varies counts as in the first call.
    """
    if node.op != "call_function" or is_view(node):
        return 0.0
    flops = flops_of(node)
    if flops is None:
        return cluster.memory_us(node_bytes(node))
    traffic = sum(map(node_bytes, [node, *node.all_input_nodes]))
    itemsize = min((tensor.element_size() for tensor in tensors_of(node) if tensor.is_floating_point()), default=4)
    if is_attention(node):
        return cluster.attention_us(flops, traffic, itemsize, is_backward(node))
    return cluster.product_us(flops, traffic, itemsize)


def is_collective(node: fx.Node) -> bool:
    """Tell whether a node is a collective that other parallelism has put into the graph."""
    return packet_of(node) in _COLLECTIVES


def collective_us(node: fx.Node, cluster: Cluster) -> float:
    """Return the time of such a collective, for which compute waits: nothing is moved in between."""
    reduces, passes = _COLLECTIVES[packet_of(node)]
    ranks = dist.get_process_group_ranks(process_group(call_of(node).args[-1]))
    size = max(map(node_bytes, [node, *node.all_input_nodes]))
    return cluster.link_of(ranks).collective_us(size, len(ranks), reduces, passes)


def flops_of(node: fx.Node) -> float | None:
    """Return the FLOPs that a product or an attention needs, by torch's formulas; None for other nodes."""
    operator = packet_of(node) or call_of(node).target  # higher-order operators, as of flex attention, have no packet
    formula = flop_registry.get(COUNTED_AS.get(operator, operator))
    if node.op != "call_function" or formula is None:
        return None
    stand_in = _with_equal_heads(node) if is_attention(node) else _stand_in
    call = call_of(node)
    args, kwargs = map_aggregate(call.args, stand_in), map_aggregate(call.kwargs, stand_in)
    return formula(*args, **kwargs, out_val=stand_in(node)) * (needed_of(node) if is_attention(node) else 1.0)


text_of = lru_cache(maxsize=1024)(str)  # torch makes the text of an operator anew each time that it is asked for


class Call(NamedTuple):
    """What a node calls, and with what."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def call_of(node: fx.Node) -> Call:
    """Return what a node calls, also where it saves or restores the random state for it, as checkpointing does."""
    first = _WITH_RANDOM_STATE.get(text_of(node.target))
    if first is None:
        return Call(node.target, node.args, node.kwargs)
    given = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    return Call(node.args[first], node.args[first + 1 :], given)


def is_backward(attention: fx.Node) -> bool:
    return "backward" in str(call_of(attention).target)


def needed_of(attention: fx.Node) -> float:
    """Return the share of FLOPs by formula that attention needs: half where it skips what lies behind a query."""
    call = call_of(attention)
    schema = getattr(call.target, "_schema", None)  # higher-order operators have none
    names = [argument.name for argument in schema.arguments] if schema else []
    given = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
    return 0.5 if given.get("is_causal") is True else 1.0


def packet_of(node: fx.Node) -> Any:
    """Return the operator that a node calls, whatever its overload; None for other functions."""
    return getattr(call_of(node).target, "overloadpacket", None)


def signature_of(node: fx.Node) -> str:
    """Return an operator and its operands' shapes as profilers name them, such as ``aten::mm 64x128 128x352``."""
    given = (each.meta.get("val") for each in call_of(node).args if isinstance(each, fx.Node))
    operator = COUNTED_AS.get(packet_of(node), packet_of(node))
    return shown_signature(
        profiler_name(operator), [list(map(_counted, t.shape)) for t in given if isinstance(t, torch.Tensor)]
    )


def profiler_name(operator: Any) -> str:
    """Return the name under which profilers show an operator, such as ``aten::mm``."""
    return str(operator).replace(".", "::")


def shown_signature(operator: str, shapes: Iterable[Sequence[int]]) -> str:
    """Return an operator's name and shapes as text."""
    return " ".join([operator, *("x".join(map(str, shape)) for shape in shapes)])


def is_attention(node: fx.Node) -> bool:
    """Tell by its operator's name whether a node is an attention, or the backward of one."""
    return node.op == "call_function" and names_attention(text_of(call_of(node).target))


@lru_cache(maxsize=1024)
def names_attention(operator: str) -> bool:
    """Tell whether an operator of this name is an attention, or the backward of one."""
    return any(word in operator for word in ("attention", "attn"))


def work_of(node: fx.Node) -> Work:
    """Return what a node's kernel does. Convolutions count as matrix products."""
    if is_attention(node):
        return "attention"
    is_product = node.op == "call_function" and packet_of(node) in flop_registry
    return "matrix products" if is_product else "fused kernels"


def node_bytes(node: fx.Node) -> int:
    return sum(map(tensor_bytes, tensors_of(node)))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a fake tensor's elements. A size that varies counts as in the first call."""
    return prod(map(_counted, tensor.shape)) * tensor.element_size()


def _stand_in(value: Any) -> Any:
    """Return what formulas for FLOPs take in place of an argument: tensors without memory, numbers."""
    if isinstance(value, fx.Node):
        return map_aggregate(value.meta.get("val"), _stand_in)
    if isinstance(value, torch.Tensor):
        return torch.empty([_counted(size) for size in value.shape], dtype=value.dtype, device="meta")
    return _counted(value) if isinstance(value, torch.SymInt) else value


def _with_equal_heads(node: fx.Node) -> Callable[[Any], Any]:
    """Return what gives attention's arguments with as many heads in all, as the formulas of torch 2.11 want them.

    Queries, keys, values and gradients are ``[batch, heads, length, features]`` or ``[length, heads, features]``.
    """

    def is_heads(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() in (3, 4)

    first = map(_stand_in, call_of(node).args[:3])  # queries are among them; what flex attention captures is not
    heads = max((found.shape[1] for found in first if is_heads(found)), default=0)

    def given(argument: Any) -> Any:
        found = _stand_in(argument)
        return found.new_empty(found.shape[0], heads, *found.shape[2:]) if is_heads(found) else found

    return given


def _counted(size: int | torch.SymInt) -> int:
    hint = size if isinstance(size, int) else size.node.hint
    return _UNKNOWN if hint is None else int(hint)


def is_view(node: fx.Node) -> bool:
    """Tell whether a node's result shares its input's memory, or takes a piece out of a list."""
    return bool(getattr(node.target, "is_view", False)) or getattr(node.target, "__name__", "") == "getitem"


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors that stand for a node's results."""
    return tensors_among(results_of(node))


def tensors_among(values: Any) -> list[torch.Tensor]:
    """Return the tensors in lists, tuples and dicts."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def results_of(node: fx.Node) -> Any:
    """Return the fake values of a node's results, None for those that are unknown.

    Where AOTAutograd lets a node save the random state it notes no value, but on those that take results out of it.
    """
    if "val" in node.meta:
        return node.meta["val"]
    items: list[Any] = [user for user in node.users if getattr(user.target, "__name__", "") == "getitem"]
    taken: dict[int, Any] = {item.args[1]: results_of(item) for item in items}
    return tuple(taken.get(index) for index in range(1 + max(taken))) if taken else None
