"""The two operators that tracing leaves in a graph: ``unshard`` and its backward ``reduce_grad``.

Each has a schema, a fake, an autograd formula and an implementation by the same launch and wait that the eager
hooks use, so a graph that meets no pass still computes the right thing, one parameter at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layout import ShardLayout
from ..passes import ir
from ..passes.ir import Route
from .launch import Group, launch_gather, launch_reduction

_library = torch.library.Library(ir.NAMESPACE, "DEF")
_library.define(ir.UNSHARD_SCHEMA)
_library.define(ir.REDUCE_GRAD_SCHEMA)


def unshard(shard: Tensor, sink: Tensor | None, route: tuple[Any, ...]) -> Tensor:
    """Gather one parameter; its gradient comes back to ``shard`` averaged over the ranks.

    Args:
        shard: this rank's padded shard, in its original dtype.
        sink: if given, backward skips the reduction and accumulates the unsharded gradient into this leaf of
            ``route.shape`` and ``route.reduce_dtype`` instead.
        route: :meth:`Route.args`.

    Returns:
        The unsharded parameter, ``route.shape`` in ``route.dtype``.
    """
    return torch.ops.fsdp_compiled.unshard(shard, sink, *route)


def reduce_grad(grad: Tensor, route: tuple[Any, ...]) -> Tensor:
    """Average an unsharded gradient over the ranks.

    Args:
        grad: ``route.shape``, any floating-point dtype.
        route: :meth:`Route.args`.

    Returns:
        This rank's padded shard of the mean, in ``route.grad_dtype``.
    """
    return torch.ops.fsdp_compiled.reduce_grad(grad, *route)


def _layout(route: Route) -> ShardLayout:
    return ShardLayout(route.shape, route.dim, route.shard_world)


def _group(route: Route) -> Group:
    return Group(route.shard_group, route.shard_world, route.replicate_group, route.replicate_world)


def _unshard(shard: Tensor, sink: Tensor | None, *args: Any) -> Tensor:
    route = Route.from_args(args)
    layout = _layout(route)
    gather = launch_gather([shard], [layout], route.dtype, _group(route))
    flat = shard.new_empty(layout.world * layout.shard_numel, dtype=route.dtype)
    gather.wait([flat])
    return flat[: layout.numel].view(layout.shape)


def _unshard_fake(shard: Tensor, sink: Tensor | None, *args: Any) -> Tensor:
    route = Route.from_args(args)
    if shard.device.type == "meta":
        raise RuntimeError(meta_parameter(route.param))
    return shard.new_empty(route.shape, dtype=route.dtype)


def meta_parameter(name: str) -> str:
    """Return the message for a forward with a parameter that has no storage yet."""
    return (
        f"{name}: expected a parameter with storage, got one on the meta device; "
        "call model.to_empty(device=...) and initialise it before the first forward"
    )


def _reduce_grad(grad: Tensor, *args: Any) -> Tensor:
    route = Route.from_args(args)
    pending = launch_reduction([grad], [_layout(route)], route.reduce_dtype, _group(route))
    (reduced,) = pending.wait([route.grad_dtype])
    # An operator's result must not share storage with its input, as it would where nothing is communicated.
    return reduced.clone() if _group(route).world == 1 else reduced


def _reduce_grad_fake(grad: Tensor, *args: Any) -> Tensor:
    route = Route.from_args(args)
    return grad.new_empty(_layout(route).shard_shape, dtype=route.grad_dtype)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, sink, *args = inputs
    ctx.has_sink = sink is not None
    ctx.route = tuple(args)


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    none_for_args = (None,) * len(ctx.route)
    if ctx.has_sink:
        return (None, grad.to(Route.from_args(ctx.route).reduce_dtype), *none_for_args)
    return (reduce_grad(grad, ctx.route), None, *none_for_args)


for _name, _run, _fake in (
    ("unshard", _unshard, _unshard_fake),
    ("reduce_grad", _reduce_grad, _reduce_grad_fake),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{ir.NAMESPACE}::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    f"{ir.NAMESPACE}::unshard", _unshard_backward, setup_context=_save_for_backward, lib=_library
)
