"""The operators that tracing leaves in a graph, and how to read them as FX nodes.

This file and :mod:`emitter`, which writes them, are the only ones that know operator names, schemas and argument
positions. It knows nothing of modules, process groups or schedules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import fx

from .route import Route

NAMESPACE = "fsdp_compiled"
UNSHARD_SCHEMA = "unshard(Tensor shard, Tensor? sink, str route) -> Tensor"
REDUCE_GRAD_SCHEMA = "reduce_grad(Tensor grad, str route) -> Tensor"
CUSTOM_ALL_GATHER_SCHEMA = "custom_all_gather(Tensor row, int world, str group, str comm) -> Tensor"
CUSTOM_REDUCE_SCATTER_SCHEMA = "custom_reduce_scatter(Tensor rows, str op, int world, str group, str comm) -> Tensor"
REDUCE_HOOK_SCHEMA = "reduce_hook(Tensor row, str hook) -> Tensor"
WITH_GRADIENT_SCHEMA = "with_gradient(Tensor whole, Tensor leaf, Tensor? sink, str route) -> Tensor"
TAKE_SHARD_SCHEMA = "take_shard(Tensor whole, int dim, int world, str group) -> Tensor"
LAUNCH_GATHER_SCHEMA = "launch_gather(Tensor[] shards, str[] routes, bool in_place, bool lasting) -> Tensor"
SEND_TO_HOST_SCHEMA = "send_to_host(Tensor row) -> Tensor"
COPY_IN_SHARDS_SCHEMA = "copy_in_shards(Tensor[] shards, Tensor(a!) row) -> ()"
COPY_OUT_GATHERED_SCHEMA = "copy_out_gathered(Tensor rows, Tensor(a!)[] outs, int[] dims) -> ()"
COPY_IN_GRADIENTS_SCHEMA = (
    "copy_in_gradients(Tensor[] grads, int[] dims, int world, ScalarType dtype, float divisor) -> Tensor"
)
COPY_OUT_REDUCED_SCHEMA = "copy_out_reduced(Tensor row, Tensor(a!)[] outs, float divisor, bool accumulate) -> ()"
# In the meta of opaque nodes their Ticket, of emitted ones their Bundle; needed no longer than one compilation.
_TICKET, MARK = "fsdp_compiled_ticket", "fsdp_compiled"
_C10D = "_c10d_functional"


@dataclass(frozen=True)
class Ticket:
    """Which bucket an opaque node travels in, and the memory bound that the bucket was made for."""

    bucket: int
    bound_bytes: int = 0


@dataclass(frozen=True)
class Bundle:
    """The nodes that one bucket was lowered to: packing, launch, wait, unpacking.

    Args:
        index: of the bucket among those of its kind in this graph.
        reduces: whether gradients are reduced, rather than parameters gathered.
        params: full names, in packing order.
        sizes: bytes of each, unsharded and padded, as it travels.
        shard_world: ranks that it is gathered or scattered over.
        replicate_world: ranks that its reduction is all-reduced over.
        bound_bytes: see :class:`Ticket`.
        kept_bytes: of parameters that the graph returns unsharded, for backward.
        is_in_place: the collective's buffer is the one parameter, or gradient, and nothing is copied.
    """

    index: int
    reduces: bool
    params: tuple[str, ...]
    sizes: tuple[int, ...]
    shard_world: int
    replicate_world: int
    bound_bytes: int = 0
    kept_bytes: int = 0
    is_in_place: bool = False


def _is_op(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and str(node.target) == f"{NAMESPACE}.{name}.default"


def is_unshard(node: fx.Node) -> bool:
    """Tell whether ``node`` gathers one parameter."""
    return _is_op(node, "unshard")


def is_reduce_grad(node: fx.Node) -> bool:
    """Tell whether ``node`` reduces one gradient."""
    return _is_op(node, "reduce_grad")


def has_ours(graph: fx.Graph) -> bool:
    """Tell whether ``graph`` holds any operator of this library, or what one was lowered to."""
    return any(is_unshard(node) or is_reduce_grad(node) or MARK in node.meta for node in graph.nodes)


def route_of(node: fx.Node) -> Route:
    """Return the way of an ``unshard``, ``reduce_grad`` or ``with_gradient`` node."""
    return Route.decode(str(node.args[-1])).for_shard(value_of(source_of(node)))


def source_of(node: fx.Node) -> fx.Node:
    """Return the tensor that the node carries: the shard of an unshard, the gradient of a reduce_grad."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def value_of(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor that stands for the node's result."""
    return node.meta["val"]


def give_ticket(node: fx.Node, ticket: Ticket) -> None:
    """Say which bucket an opaque node travels in."""
    node.meta[_TICKET] = ticket


def ticket_of(node: fx.Node) -> Ticket | None:
    """Return what :func:`give_ticket` said, or None."""
    return node.meta.get(_TICKET)


def bundle_of(node: fx.Node) -> Bundle | None:
    """Return the bundle that an emitted node belongs to; None for all others."""
    return node.meta.get(MARK)


def granularity(numel: int) -> int:
    """Return how many elements of a shard of so many a GPU may at most move at a time, a power of two."""
    return gcd(16, numel)


def aligned(numel: int) -> int:
    """Return ``numel`` rounded up so far that in a flat buffer what follows begins at a multiple of 16 bytes."""
    return -(-numel // 16) * 16


def is_with_gradient(node: fx.Node) -> bool:
    """Tell whether ``node`` is the identity on an unsharded parameter that was there for its gradient."""
    return _is_op(node, "with_gradient")


def is_take_shard(node: fx.Node) -> bool:
    """Tell whether ``node`` cuts an unsharded parameter for a smaller group."""
    return _is_op(node, "take_shard")


def is_bucket_split(node: fx.Node) -> bool:
    """Tell whether ``node`` cuts a bucket of ours into its members."""
    return MARK in node.meta and str(node.target) == "aten.split_with_sizes.default"


def put_in_order(order: Iterable[fx.Node], graph: fx.Graph) -> None:
    """Move the nodes, which are all of the graph's, into this order."""
    last = graph._root
    for node in order:
        if last.next is not node:
            last.append(node)
        last = node


def _is_ours(node: fx.Node, names: Sequence[str]) -> bool:
    return MARK in node.meta and str(node.target) in {f"{name}.default" for name in names}


def is_gather_launch(node: fx.Node) -> bool:
    """Tell whether ``node`` starts an all-gather of ours."""
    return leaves_compute(node) or _is_ours(
        node, [f"{_C10D}.all_gather_into_tensor", f"{NAMESPACE}.custom_all_gather"]
    )


def leaves_compute(node: fx.Node) -> bool:
    """Tell whether ``node`` starts an all-gather of ours that takes its copies along to a side stream."""
    return _is_ours(node, [f"{NAMESPACE}.launch_gather"])


def copies_in_first(launch: fx.Node) -> bool:
    """Tell whether compute copies in what a node that :func:`leaves_compute` gathers: it may not last."""
    return not launch.args[3]


def is_scatter_launch(node: fx.Node) -> bool:
    """Tell whether ``node`` starts a reduce-scatter of ours."""
    return _is_ours(node, [f"{_C10D}.reduce_scatter_tensor", f"{NAMESPACE}.custom_reduce_scatter"])


def is_all_reduce_launch(node: fx.Node) -> bool:
    """Tell whether ``node`` starts an all-reduce of ours."""
    return _is_ours(node, [f"{_C10D}.all_reduce"])


def is_launch(node: fx.Node) -> bool:
    """Tell whether ``node`` starts a collective of ours."""
    return is_gather_launch(node) or is_scatter_launch(node) or is_all_reduce_launch(node)


def group_of(launch: fx.Node) -> tuple[str, int]:
    """Return the name and the size of the process group that a collective of ours runs over."""
    bundle = bundle_of(launch)
    assert bundle is not None
    world = bundle.replicate_world if is_all_reduce_launch(launch) else bundle.shard_world
    if leaves_compute(launch):
        return Route.decode(launch.args[1][0]).shard_group, world  # type: ignore[arg-type, index]
    return str(launch.args[3 if is_scatter_launch(launch) else 2]), world


def is_wait(node: fx.Node) -> bool:
    """Tell whether ``node`` waits for a collective of ours."""
    return _is_ours(node, [f"{_C10D}.wait_tensor"]) and not is_sent_to_host(source_of(node))


def is_sent_to_host(node: fx.Node) -> bool:
    """Tell whether ``node`` starts moving reduced gradients to the host."""
    return _is_ours(node, [f"{NAMESPACE}.send_to_host"])


def is_arrival(node: fx.Node) -> bool:
    """Tell whether ``node`` lets the host wait for gradients that move there."""
    return _is_ours(node, [f"{_C10D}.wait_tensor"]) and is_sent_to_host(source_of(node))


def begins(node: fx.Node) -> bool:
    """Tell whether ``node`` starts work beside compute: a collective, or gradients' way to the host."""
    return is_launch(node) or is_sent_to_host(node)


def copies_in_gradients(node: fx.Node) -> bool:
    """Tell whether ``node`` is the one kernel that packs a bucket's gradients."""
    return _is_ours(node, [f"{NAMESPACE}.copy_in_gradients"])


def awaits(node: fx.Node) -> bool:
    """Tell whether ``node`` waits for what :func:`begins`."""
    return is_wait(node) or is_arrival(node)


def has_streams(node: fx.Node) -> bool:
    """Tell whether copies may leave the compute stream where ``node`` computes; its result may live elsewhere."""
    return value_of(source_of(node) if is_reduce_grad(node) else node).device.type == "cuda"


def gathers_beside_compute(node: fx.Node) -> bool:
    """Tell whether an unshard takes its copies along to a side stream."""
    return has_streams(node) and (route_of(node).shard_world > 1 or changes_device(source_of(node), node))


def is_row(node: fx.Node) -> bool:
    """Tell whether a ``reduce_grad`` alone reduces its gradient as it is: not cast, divided, padded or permuted."""
    route = route_of(node)
    return route.reduces_as_it_is(value_of(source_of(node)).dtype, route.shape, route.dim)


def changes_device(source: fx.Node, result: fx.Node) -> bool:
    """Tell whether ``result``, made of ``source``, lives elsewhere."""
    return value_of(source).device.type != value_of(result).device.type


def is_parameter(node: fx.Node) -> bool:
    """Tell whether ``node`` is a parameter's shard, which outlives the step, by the name that AOTAutograd gives it.

    Inputs of forward graphs and what backward graphs take of them are called primals, those of inference graphs arg;
    what forward has computed for backward, which may be freed or overwritten there, has other names.
    """
    return node.op == "placeholder" and re.match(r"primals|arg\d", str(node.target)) is not None


def travelling_bytes(node: fx.Node) -> int:
    """Return the size of what an opaque node sends around: unsharded and padded, in the dtype of the wire."""
    route = route_of(node)
    dtype = route.dtype if is_unshard(node) else route.reduce_dtype
    return shard_numel(node) * dtype.itemsize * route.shard_world


def shard_numel(node: fx.Node) -> int:
    """Return the elements of the padded shard that an opaque node gathers from, or reduces to."""
    return int((value_of(source_of(node)) if is_unshard(node) else value_of(node)).numel())


def is_heavy(node: fx.Node) -> bool:
    """Tell whether ``node`` is compute that Inductor runs as a kernel of its own, at a place of its own."""
    return node.op == "call_function" and any(word in str(node.target) for word in _HEAVY)


_HEAVY = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution", "_scaled_dot_product")
