"""The operators that tracing and the joint pass leave in a graph: ``unshard`` and its backward ``reduce_grad``.

``take_shard`` cuts an unsharded parameter for a smaller group; ``with_gradient`` gives the gradient of ``unshard`` to
a parameter that an all-gather extension made. Each has a schema, a fake, an autograd formula and an implementation
by the same launch and wait that the eager hooks use, so a graph that meets no pass still computes the right thing,
one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import ShardLayout
from ..passes import ir
from ..passes.route import Route
from . import copies, reference, streams
from .comm import define, differentiate, process_group, register_work
from .launch import GATHERS, TO_HOST, launch_gather, launch_reduction


def unshard(shard: Tensor, sink: Tensor | None, route: str) -> Tensor:
    """Gather one parameter; its gradient comes back to ``shard`` averaged over the ranks.

    Args:
        shard: this rank's padded shard, in its original dtype.
        sink: if given, the gradient goes to this leaf in ``route.reduce_dtype`` instead: unsharded and not
            reduced, or (``route.sink_is_sharded``) as a padded shard, reduced over the shards only.
        route: :meth:`Route.encode`.

    Returns:
        The unsharded parameter, ``route.shape`` in ``route.dtype``.
    """
    return torch.ops.fsdp_compiled.unshard(shard, sink, route)


def reduce_grad(grad: Tensor, route: str) -> Tensor:
    """Average an unsharded gradient over the ranks.

    Args:
        grad: ``route.shape``, any floating-point dtype.
        route: :meth:`Route.encode`.

    Returns:
        This rank's padded shard of the mean, in ``route.grad_dtype``.
    """
    return torch.ops.fsdp_compiled.reduce_grad(grad, route)


def with_gradient(whole: Tensor, leaf: Tensor, sink: Tensor | None, route: str) -> Tensor:
    """Return ``whole``, an unsharded parameter that was gathered some other way, with the gradient of ``unshard``.

    Args:
        whole: ``route.shape``.
        leaf: gets the reduced gradient, unless there is a sink.
        sink: see :func:`unshard`.
        route: :meth:`Route.encode`.
    """
    if type(whole) is not Tensor:
        return _subclass_with_gradient(whole, leaf, sink, route)
    return torch.ops.fsdp_compiled.with_gradient(whole, leaf, sink, route)


class _WithGradient(torch.autograd.Function):
    """:func:`with_gradient` of a tensor subclass, whose own dispatch knows ``detach`` but no operator of ours."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, leaf: Tensor, sink: Tensor | None, route: str) -> Tensor:
        _save_for_backward(ctx, (leaf, sink, route), whole)
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_unshard_backward(ctx, grad)


# Dynamo would try backward with a gradient of the subclass, where it is a plain one.
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _subclass_with_gradient(whole: Tensor, leaf: Tensor, sink: Tensor | None, route: str) -> Tensor:
    return _WithGradient.apply(whole, leaf, sink, route)


def _layout(route: Route) -> ShardLayout:
    return ShardLayout(route.shape, route.dim, route.shard_world)


def _unshard(shard: Tensor, sink: Tensor | None, text: str) -> Tensor:
    route = Route.decode(text).for_shard(shard)
    layout = _layout(route)
    flat = shard.new_empty(layout.world * layout.shard_numel, dtype=route.dtype, device=route.device or shard.device)
    launch_gather([shard], [layout], route, lambda: [flat]).wait()
    return flat[: layout.numel].view(layout.shape)


def _launch_gather(shards: Sequence[Tensor], texts: Sequence[str], in_place: bool, lasting: bool) -> Tensor:
    """Start a bucket's gather: all parameters one after the other, each padded to a multiple of the world.

    Each begins where :func:`ir.aligned` lets it.

    ``in_place`` is what :func:`launch_gather` calls so: each is gathered straight into its part of the result.
    ``_c10d_functional.wait_tensor`` waits for the result. ``lasting`` shards outlive the wait, as parameters do;
    others, whose memory a graph may use again at once, are copied in by the compute stream. On the CPU nothing is
    left to wait for.
    """
    routes = _routes(shards, texts)
    whole = _launch_gather_fake(shards, texts, in_place, lasting)
    layouts = [_layout(route) for route in routes]
    sizes = [layout.world * layout.shard_numel for layout in layouts]
    outs = [out[:size] for out, size in zip(whole.split([ir.aligned(size) for size in sizes]), sizes, strict=True)]
    side = streams.streams_of(whole.device)
    if side is not None and not lasting:
        row = _copied_in(shards, whole)
        side.lend(GATHERS, row)
        shards = row.split([shard.numel() for shard in shards]) if in_place else [row]
    pending = launch_gather(shards, layouts, routes[0], lambda: outs, in_place)
    if side is None:
        pending.wait()
    else:
        register_work(whole, streams.After(side, GATHERS))
    return whole


def _copied_in(shards: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return ``shards`` as one row of their own, where and in the dtype that they travel."""
    row = like.new_empty(sum(shard.numel() for shard in shards))
    copies.copy_in_shards([shard.to(row.device, non_blocking=True) for shard in shards], row)
    return row


def _launch_gather_fake(shards: Sequence[Tensor], texts: Sequence[str], in_place: bool, lasting: bool) -> Tensor:
    routes = _routes(shards, texts)
    numel = sum(ir.aligned(route.shard_world * _layout(route).shard_numel) for route in routes)
    return shards[0].new_empty(numel, dtype=routes[0].dtype, device=routes[0].device or shards[0].device)


def _routes(shards: Sequence[Tensor], texts: Sequence[str]) -> list[Route]:
    return [Route.decode(text).for_shard(shard) for shard, text in zip(shards, texts, strict=True)]


def _unshard_fake(shard: Tensor, sink: Tensor | None, text: str) -> Tensor:
    route = Route.decode(text).for_shard(shard)
    if shard.device.type == "meta":
        raise RuntimeError(meta_parameter(route.param))
    return shard.new_empty(route.shape, dtype=route.dtype, device=route.device or shard.device)


def meta_parameter(name: str) -> str:
    """Return the message for a forward with a parameter that has no storage yet."""
    return (
        f"{name}: expected a parameter with storage, got one on the meta device; "
        "call model.to_empty(device=...) and initialise it before the first forward"
    )


def _reduce_grad(grad: Tensor, text: str) -> Tensor:
    route = Route.decode(text)
    pending = launch_reduction([grad], [_layout(route)], route, [route.grad_dtype])
    (reduced,) = pending.wait()
    if route.device:
        pending.wait_on_host()
    # An operator's result must not share storage with its input, as it would where nothing is communicated.
    return reduced if route.communicates else reduced.clone()


def _reduce_grad_fake(grad: Tensor, text: str) -> Tensor:
    route = Route.decode(text)
    device = "cpu" if route.device else grad.device
    return grad.new_empty(_layout(route).shard_shape, dtype=route.grad_dtype, device=device)


def _send_to_host(row: Tensor) -> Tensor:
    """Start moving ``row`` to the host; ``_c10d_functional.wait_tensor`` lets the host wait for the result.

    The move reads a copy of ``row``, whose memory a graph may use again at once.
    """
    side, source = streams.streams_of(row.device), row.clone()
    if side is None:
        return copies.to_host(source)
    with side.beside(TO_HOST):
        host = copies.to_host(source)
    side.lend(TO_HOST, source)
    register_work(host, streams.After(side, TO_HOST, to_host=True))
    return host


def _send_to_host_fake(row: Tensor) -> Tensor:
    return torch.empty_like(row, device="cpu")


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, sink, ctx.route = inputs
    ctx.has_sink = sink is not None


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.has_sink:
        return reduce_grad(grad, ctx.route), None, None
    route = Route.decode(ctx.route)
    if route.sink_is_sharded:
        return None, reduce_grad(grad, route.over_shards_only().encode()), None
    return None, grad.to(route.reduce_dtype), None


def _take_shard(whole: Tensor, dim: int, world: int, group: str) -> Tensor:
    rank = dist.get_group_rank(process_group(group), dist.get_rank())
    return reference.take_shard(whole, ShardLayout(tuple(whole.shape), dim, world), rank)


def _take_shard_fake(whole: Tensor, dim: int, world: int, group: str) -> Tensor:
    return whole.new_empty(ShardLayout(tuple(whole.shape), dim, world).shard_shape)


define(ir.UNSHARD_SCHEMA, _unshard, _unshard_fake)
define(ir.LAUNCH_GATHER_SCHEMA, _launch_gather, _launch_gather_fake)
define(ir.SEND_TO_HOST_SCHEMA, _send_to_host, _send_to_host_fake)
define(ir.REDUCE_GRAD_SCHEMA, _reduce_grad, _reduce_grad_fake)
define(ir.TAKE_SHARD_SCHEMA, _take_shard, _take_shard_fake)
define(ir.WITH_GRADIENT_SCHEMA, lambda whole, *_: whole.clone(), lambda whole, *_: torch.empty_like(whole))
differentiate("unshard", _unshard_backward, _save_for_backward)
differentiate(
    "with_gradient",
    lambda ctx, grad: (None, *_unshard_backward(ctx, grad)),
    lambda ctx, inputs, output: _save_for_backward(ctx, inputs[1:], output),
)
