"""The operators that tracing leaves in a graph, and how to read and write them as FX nodes.

This is the only file that knows operator names, schemas and argument positions. It knows nothing of modules,
process groups or schedules.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import fx

NAMESPACE = "fsdp_compiled"
UNSHARD_SCHEMA = "unshard(Tensor shard, Tensor? sink, str route) -> Tensor"
REDUCE_GRAD_SCHEMA = "reduce_grad(Tensor grad, str route) -> Tensor"
CUSTOM_ALL_GATHER_SCHEMA = "custom_all_gather(Tensor row, int world, str group, str comm) -> Tensor"
CUSTOM_REDUCE_SCATTER_SCHEMA = "custom_reduce_scatter(Tensor rows, str op, int world, str group, str comm) -> Tensor"
REDUCE_HOOK_SCHEMA = "reduce_hook(Tensor row, str hook) -> Tensor"
WITH_GRADIENT_SCHEMA = "with_gradient(Tensor whole, Tensor leaf, Tensor? sink, str route) -> Tensor"
TAKE_SHARD_SCHEMA = "take_shard(Tensor whole, int dim, int world, str group) -> Tensor"
LAUNCH_GATHER_SCHEMA = "launch_gather(Tensor[] shards, str[] routes, bool in_place) -> Tensor"
COPY_IN_SHARDS_SCHEMA = "copy_in_shards(Tensor[] shards, Tensor(a!) row) -> ()"
COPY_OUT_GATHERED_SCHEMA = "copy_out_gathered(Tensor rows, Tensor(a!)[] outs, int[] dims) -> ()"
COPY_IN_GRADIENTS_SCHEMA = (
    "copy_in_gradients(Tensor[] grads, int[] dims, int world, ScalarType dtype, float divisor) -> Tensor"
)
COPY_OUT_REDUCED_SCHEMA = "copy_out_reduced(Tensor row, Tensor(a!)[] outs, float divisor, bool accumulate) -> ()"
# In the meta of opaque nodes their Ticket, of emitted ones their Bundle; needed no longer than one compilation.
_TICKET, _MARK = "fsdp_compiled_ticket", "fsdp_compiled"
_C10D = "_c10d_functional"


@dataclass(frozen=True)
class Route:
    """Where one parameter travels and in which dtypes: the constant argument of our operators.

    Identity and policy travel in an argument rather than in ``node.meta`` because arguments survive every graph
    rewrite and enter the compile-cache keys; meta does neither. They travel as one text, see :meth:`encode`,
    because Dynamo guards every constant that a parameter's read takes, in every step.
    """

    shape: tuple[int, ...]  # of the unsharded parameter
    dim: int  # the sharded dimension
    dtype: torch.dtype  # of the all-gather and of the unsharded parameter
    reduce_dtype: torch.dtype  # of the reduce-scatter
    grad_dtype: torch.dtype  # of the sharded parameter and its gradient
    reshard: bool  # gather again in backward rather than keep from forward
    unit: str  # full name of the unit
    param: str  # full name of the parameter
    shard_group: str  # process group names; "" where the world is 1
    shard_world: int
    replicate_group: str
    replicate_world: int
    reduce_group: str = ""  # of the reduce-scatter, if it has one of its own
    pre_divide: float = 1.0  # with op and post_divide: see Reduction
    op: str = "avg"
    post_divide: float = 1.0
    post_forward_group: str = ""  # backward gathers over this smaller group from what forward left
    post_forward_world: int = 0  # 0: there is none
    gather_comm: str = ""  # names of what the user put in place of the collectives, see collectives.custom
    reduce_comm: str = ""
    reduce_hook: str = ""
    sink_is_sharded: bool = False  # the gradient stops before the replicas, see collectives.ops.unshard
    device: str = ""  # type of the device of compute, where the shard lives on another one
    follows_shard: bool = False  # shape and dtype are those of whatever shard is given, as with extensions

    @property
    def scatter_group(self) -> str:
        """Name of the process group of the reduce-scatter."""
        return self.reduce_group or self.shard_group

    def post_forward(self) -> Route:
        """Return the way from what forward left, sharded over the smaller group, to the unsharded parameter."""
        return replace(
            self,
            grad_dtype=self.dtype,
            shard_group=self.post_forward_group,
            shard_world=self.post_forward_world,
            post_forward_group="",
            post_forward_world=0,
            gather_comm="",
        )

    def in_dtype(self, dtype: torch.dtype) -> Route:
        """Return the same way for another dtype of the all-gather."""
        return self if dtype == self.dtype else replace(self, dtype=dtype)

    def over_shards_only(self) -> Route:
        """Return the way of a gradient that is not reduced over replicas yet and stays in ``reduce_dtype``."""
        return replace(
            self,
            grad_dtype=self.reduce_dtype,
            replicate_group="",
            replicate_world=1,
            post_divide=1.0,
            reduce_hook="",
        )

    def for_shard(self, shard: torch.Tensor) -> Route:
        """Return the way of this ``shard``."""
        if not self.follows_shard:
            return self
        shape = (shard.shape[0] * self.shard_world, *shard.shape[1:])
        return replace(self, shape=shape, dim=0, dtype=shard.dtype, grad_dtype=shard.dtype, follows_shard=False)

    def encode(self) -> str:
        """Return the fields that differ from their defaults as JSON, the operators' argument."""
        written = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return json.dumps(written, default=lambda dtype: str(dtype).removeprefix("torch."))

    @staticmethod
    @cache
    def decode(text: str) -> Route:
        """Read back what :meth:`encode` wrote."""
        read = json.loads(text)
        dtypes = {name: getattr(torch, value) for name, value in read.items() if name.endswith("dtype")}
        return Route(**{**read, **dtypes, "shape": tuple(read["shape"])})


@dataclass(frozen=True)
class Reduction:
    """How a sum over ranks becomes a mean without overflow: divide, reduce with ``op``, divide."""

    pre_divide: float
    op: str
    post_divide: float


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


def reduction_for(
    dtype: torch.dtype, world: int, divide_factor: float | None = None, sum_only: bool = False
) -> Reduction:
    """Return how gradients in ``dtype`` are reduced over ``world`` ranks: to the mean, or the sum over a divisor.

    fp32 and bf16 have the exponent range to be averaged by the collective itself. fp16 may overflow in the sum
    and underflow when divided first, so it is divided by about the square root of the divisor on either side.

    Args:
        dtype: of the reduce-scatter.
        world: all ranks, replicas included.
        divide_factor: what to divide the sum by; None for ``world``.
        sum_only: use no averaging collective.

    *Source:* the pre / post split is the one of Horovod and of PyTorch DDP's fp16 hooks.
    """
    divisor = world if divide_factor is None else divide_factor
    if world == 1:
        return Reduction(divisor, "sum", 1.0)
    if dtype in (torch.float32, torch.bfloat16, torch.float64):
        if divisor == world and not sum_only:
            return Reduction(1.0, "avg", 1.0)
        return Reduction(1.0, "sum", divisor)
    pre = 1
    while divisor % pre == 0 and divisor / pre > pre:
        pre *= 2
    return Reduction(float(pre), "sum", divisor / pre)


def scaling_of(route: Route) -> Reduction:
    """Return how the route's reduction divides."""
    return Reduction(route.pre_divide, route.op, route.post_divide)


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
    return any(is_unshard(node) or is_reduce_grad(node) or _MARK in node.meta for node in graph.nodes)


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
    return node.meta.get(_MARK)


class Emitter:
    """Appends ``call_function`` nodes at one place of a graph and gives each its fake value."""

    def __init__(self, before: fx.Node, bundle: Bundle | None = None) -> None:
        self._graph = before.graph
        self._before = before
        self._bundle = bundle

    def __call__(self, op: torch._ops.OpOverload, *args: Any) -> fx.Node:
        """Insert ``op(*args)`` and return its node; ``args`` may hold nodes at any depth."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(op, args)
        node.meta |= {"val": op(*fx.map_arg(args, value_of)), _MARK: self._bundle}
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Insert a conversion to ``dtype``, unless ``node`` has that already."""
        if value_of(node).dtype == dtype:
            return node
        return self(torch.ops.prims.convert_element_type.default, node, dtype)

    def put(self, node: fx.Node, device: str) -> fx.Node:
        """Insert a copy to a device, unless ``node`` is there already."""
        if value_of(node).device.type == device:
            return node
        return self(torch.ops.prims.device_put.default, node, torch.device(device))

    def getitem(self, node: fx.Node, index: int) -> fx.Node:
        """Insert ``node[index]`` for an operator that returns a list."""
        with self._graph.inserting_before(self._before):
            item = self._graph.call_function(operator.getitem, (node, index))
        item.meta |= {"val": node.meta["val"][index], _MARK: self._bundle}
        return item


def emit_reduce_grad(emit: Emitter, grad: fx.Node, route: Route) -> fx.Node:
    """Insert a reduction of ``grad`` and return its node."""
    return emit(torch.ops.fsdp_compiled.reduce_grad.default, grad, route.encode())


def emit_unshard(emit: Emitter, shard: fx.Node, route: Route) -> fx.Node:
    """Insert a gather of ``shard``, without a gradient, and return its node."""
    return emit(torch.ops.fsdp_compiled.unshard.default, shard, None, route.encode())


def emit_all_gather(emit: Emitter, row: fx.Node, route: Route) -> fx.Node:
    """Insert the launch and the wait of an all-gather of ``row`` and return the result."""
    place, dtype = (route.shard_world, route.shard_group), value_of(row).dtype
    is_float8 = dtype.is_floating_point and dtype.itemsize == 1
    if is_float8:  # which gloo does not know
        row = emit(torch.ops.aten.view.dtype, row, torch.uint8)
    if route.gather_comm:
        launch = emit(torch.ops.fsdp_compiled.custom_all_gather.default, row, *place, route.gather_comm)
    else:
        launch = emit(torch.ops._c10d_functional.all_gather_into_tensor.default, row, *place)
    rows = emit(torch.ops._c10d_functional.wait_tensor.default, launch)
    return emit(torch.ops.aten.view.dtype, rows, dtype) if is_float8 else rows


def emit_launch_gather(emit: Emitter, bucket: Sequence[fx.Node], in_place: bool) -> fx.Node:
    """Insert the launch of a gather that leaves the compute stream with its copies, and the wait; return the wait."""
    shards, texts = [source_of(node) for node in bucket], [str(node.args[-1]) for node in bucket]
    launch = emit(torch.ops.fsdp_compiled.launch_gather.default, shards, texts, in_place)
    return emit(torch.ops._c10d_functional.wait_tensor.default, launch)


def aligned(numel: int) -> int:
    """Return ``numel`` rounded up so far that in a flat buffer what follows begins at a multiple of 16 bytes."""
    return -(-numel // 16) * 16


def emit_copy_in_gradients(emit: Emitter, bucket: Sequence[fx.Node]) -> fx.Node:
    """Insert the copy-in of a bucket's gradients by one kernel, ``[world, row length]``, divided already."""
    route = route_of(bucket[0])
    grads, dims = [source_of(node) for node in bucket], [route_of(node).dim for node in bucket]
    how = (dims, route.shard_world, route.reduce_dtype, route.pre_divide)
    return emit(torch.ops.fsdp_compiled.copy_in_gradients.default, grads, *how)


def emit_reduce_scatter(emit: Emitter, rows: fx.Node, route: Route) -> fx.Node:
    """Insert the launch and the wait of a reduce-scatter of 1-D ``rows`` and return the wait."""
    place = (route.op, route.shard_world, route.scatter_group)
    if route.reduce_comm:
        launch = emit(torch.ops.fsdp_compiled.custom_reduce_scatter.default, rows, *place, route.reduce_comm)
    else:
        launch = emit(torch.ops._c10d_functional.reduce_scatter_tensor.default, rows, *place)
    return emit(torch.ops._c10d_functional.wait_tensor.default, launch)


def emit_all_reduce(emit: Emitter, row: fx.Node, route: Route) -> fx.Node:
    """Insert the launch and the wait of an all-reduce of ``row`` over the replicas and return the wait."""
    launch = emit(torch.ops._c10d_functional.all_reduce.default, row, route.op, route.replicate_group)
    return emit(torch.ops._c10d_functional.wait_tensor.default, launch)


def emit_reduce_hook(emit: Emitter, row: fx.Node, route: Route) -> fx.Node:
    """Insert the user's hook on a reduced row and return its result."""
    return emit(torch.ops.fsdp_compiled.reduce_hook.default, row, route.reduce_hook)


def emit_take_shard(emit: Emitter, whole: fx.Node, route: Route) -> fx.Node:
    """Insert the cut of an unsharded parameter for the smaller group and return this rank's padded piece."""
    place = (route.dim, route.post_forward_world, route.post_forward_group)
    return emit(torch.ops.fsdp_compiled.take_shard.default, whole, *place)


def is_with_gradient(node: fx.Node) -> bool:
    """Tell whether ``node`` is the identity on an unsharded parameter that was there for its gradient."""
    return _is_op(node, "with_gradient")


def is_take_shard(node: fx.Node) -> bool:
    """Tell whether ``node`` cuts an unsharded parameter for a smaller group."""
    return _is_op(node, "take_shard")


def is_bucket_split(node: fx.Node) -> bool:
    """Tell whether ``node`` cuts a bucket of ours into its members."""
    return _MARK in node.meta and str(node.target) == "aten.split_with_sizes.default"


def put_in_order(order: Iterable[fx.Node], graph: fx.Graph) -> None:
    """Move the nodes, which are all of the graph's, into this order."""
    last = graph._root
    for node in order:
        if last.next is not node:
            last.append(node)
        last = node


def _is_ours(node: fx.Node, names: Sequence[str]) -> bool:
    return _MARK in node.meta and str(node.target) in {f"{name}.default" for name in names}


def is_gather_launch(node: fx.Node) -> bool:
    """Tell whether ``node`` starts an all-gather of ours."""
    return leaves_compute(node) or _is_ours(
        node, [f"{_C10D}.all_gather_into_tensor", f"{NAMESPACE}.custom_all_gather"]
    )


def leaves_compute(node: fx.Node) -> bool:
    """Tell whether ``node`` starts an all-gather of ours that takes its copies along to a side stream."""
    return _is_ours(node, [f"{NAMESPACE}.launch_gather"])


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
    return _is_ours(node, [f"{_C10D}.wait_tensor"])


def travelling_bytes(node: fx.Node) -> int:
    """Return the size of what an opaque node sends around: unsharded and padded, in the dtype of the wire."""
    route = route_of(node)
    shard = value_of(source_of(node)) if is_unshard(node) else value_of(node)
    dtype = route.dtype if is_unshard(node) else route.reduce_dtype
    return int(shard.numel()) * dtype.itemsize * route.shard_world


def is_heavy(node: fx.Node) -> bool:
    """Tell whether ``node`` is compute that Inductor runs as a kernel of its own, at a place of its own."""
    return node.op == "call_function" and any(word in str(node.target) for word in _HEAVY)


_HEAVY = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution", "_scaled_dot_product")
