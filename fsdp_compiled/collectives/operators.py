"""The operators that graphs hold: for one tensor alone, and for a bucket a launch and a wait for each stage.

Tracing and the joint pass leave ``unshard`` and its backward ``reduce_grad``, without sync ``keep_grad``;
``take_shard`` cuts an unsharded parameter for a smaller group, and ``with_gradient`` gives the gradient of
``unshard`` to a parameter that an all-gather extension made. Each has a schema, a fake, an autograd formula and an
implementation by the recipes that the eager hooks use, so a graph that meets no pass still computes the right thing,
one parameter at a time.

A launch returns a *handle*, a tensor of one element whose Python object carries the started work; the wait takes
the handle and returns the results. So nothing aliases, no table of works is needed, and what an exception leaves
behind is freed with the handle. The wait returns a list, so that every parameter and gradient is a buffer of its own
to Inductor, and kernels of equal layers are equal. Stages that follow pass handles on between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..agreement.ledger import agree
from ..errors import FSDPError
from ..passes import kinds, products
from ..passes.graph import nodes
from ..passes.kinds import Kind
from ..sharding.contract import Contract, contract_of
from ..sharding.dtensor import process_group
from ..sharding.layout import ShardLayout
from ..sharding.spec import CommSpec
from . import earlier, reference
from .all_gather import ALL_GATHER
from .reduction import REDUCTION

_library = torch.library.Library(nodes.NAMESPACE, "DEF")
_SHARD, _UNSHARDED, _OTHER = range(3)  # what a gradient goes to: see the first three arguments of unshard


# ---- any kind ----


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator: its schema, what it computes on every device, and on fake tensors."""
    # CUDA graphs cannot hold what these do: they wait for other streams, and some read from the host.
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    name = schema.split("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{nodes.NAMESPACE}::{name}", partial(_traced, fake), lib=_library)


def _traced(fake: Callable[..., Any], *args: Any, **number: int) -> Any:
    products.found_ours()
    return fake(*args, **number)


def define_kind(kind: Kind) -> None:
    """Let graphs hold collectives of ``kind``: define its operators. The process keeps them for good."""
    _define_stages(kind)
    _define(nodes.OPAQUE_SCHEMA.format(kind.opaque), partial(_opaque, kind), partial(_opaque_fake, kind))


def _define_stages(kind: Kind) -> None:
    kinds.register(kind)
    for stage in kind.launch:
        _define(nodes.LAUNCH_SCHEMA.format(stage), partial(_launch, kind, stage), partial(_launch_fake, kind, stage))
        _define(nodes.WAIT_SCHEMA.format(stage), partial(_wait, kind, stage), partial(_wait_fake, kind, stage))


def _opaque(kind: Kind, tensor: Tensor, *others: Any, number: int = 0) -> Tensor:
    """Do for one tensor what its kind does, stage by stage; ranks agree before. The last argument is the text."""
    bucket = kind.bucket_of_one(others[-1], tensor)
    agree(contract_of(bucket))
    given: Any = [tensor]
    for stage in bucket.stages:
        given = kind.wait(kind.launch[stage](given, bucket), stage, bucket)
    (result,) = given
    return result


def _opaque_fake(kind: Kind, tensor: Tensor, text: str, number: int = 0) -> Tensor:
    (result,) = kind.results(tensor, kind.bucket_of_one(text, tensor))
    return result


def _handle(device: torch.device, carried: Any) -> Tensor:
    handle = torch.empty(1, dtype=torch.uint8, device=device)
    handle.carried = carried  # type: ignore[attr-defined]
    return handle


def _take(handle: Tensor) -> Any:
    """Return what a handle carries, once."""
    carried = handle.__dict__.pop("carried", None)
    if carried is None:
        raise FSDPError("a collective was waited for that no launch started, or twice")
    return carried


def _launch(kind: Kind, stage: str, inputs: Sequence[Tensor], text: str, contract: str = "") -> Tensor:
    """Start a stage on tensors, or on what the handle of the stage before carries."""
    if contract:  # the first launch of a graph has that of all collectives of the graph
        agree(Contract.unpack(contract))
    bucket = kind.bucket.decode(text)
    given = inputs if stage == bucket.stages[0] else _take(inputs[0])
    return _handle(bucket.device_of(inputs), kind.launch[stage](given, bucket))


def _launch_fake(kind: Kind, stage: str, inputs: Sequence[Tensor], text: str, contract: str = "") -> Tensor:
    return inputs[0].new_empty(1, dtype=torch.uint8, device=kind.bucket.decode(text).device_of(inputs))


def _wait(kind: Kind, stage: str, handle: Tensor, text: str) -> list[Tensor]:
    """Return the results, or a handle for the stage that follows."""
    bucket = kind.bucket.decode(text)
    result = kind.wait(_take(handle), stage, bucket)
    return result if stage == bucket.stages[-1] else [_handle(handle.device, result)]


def _wait_fake(kind: Kind, stage: str, handle: Tensor, text: str) -> list[Tensor]:
    bucket = kind.bucket.decode(text)
    return kind.results(handle, bucket) if stage == bucket.stages[-1] else [torch.empty_like(handle)]


# ---- all-gathers and reductions ----


def unshard(shard: Tensor, unsharded_grad: Tensor | None, shard_grad: Tensor | None, spec: str) -> Tensor:
    """All-gather one parameter; its gradient comes back to ``shard`` averaged over the ranks.

    Args:
        shard: this rank's padded shard, in its original dtype.
        unsharded_grad: if given, the unsharded gradient is not reduced: it is added to the sum that this leaf of one
            element stands for, see :func:`keep_grad`.
        shard_grad: if given, it goes to this leaf as a padded shard, in the dtype that ``spec`` says.
        spec: :meth:`CommSpec.encode`, of :meth:`CommSpec.over_shards_only` if it is not reduced over replicas.

    Returns:
        The unsharded parameter.
    """
    return torch.ops.fsdp_compiled.unshard(shard, unsharded_grad, shard_grad, spec)


def unshard_all(reads: Sequence[tuple[Tensor, Tensor | None, Tensor | None, str]]) -> list[Tensor]:
    """Do :func:`unshard` for each of ``reads``, its arguments, by one operator: tracing takes as long as for one."""
    shards, specs = [read[0] for read in reads], [read[3] for read in reads]
    leaves = [leaf for read in reads for leaf in read[1:3] if leaf is not None]
    targets = [_UNSHARDED if read[1] is not None else _OTHER if read[2] is not None else _SHARD for read in reads]
    return torch.ops.fsdp_compiled.unshard_all(shards, leaves, targets, specs)


def reduce_grad(grad: Tensor, spec: str) -> Tensor:
    """Average an unsharded gradient, of any floating-point dtype, over the ranks.

    Returns this rank's padded shard of the mean, in the dtype of the parameter's gradient.
    """
    return _numbered(torch.ops.fsdp_compiled.reduce_grad.default, grad, spec)


def keep_grad(grad: Tensor, leaf: Tensor | None, spec: str) -> Tensor:
    """Add an unsharded gradient to the sum of those that are not reduced yet, as soon as it is there.

    Were it returned, all gradients of a graph would be in memory at the end of backward, and the sums as well.

    ``leaf`` is what :func:`unshard` was given as ``unsharded_grad``. A trace keeps it for backward only if parameters
    of two models have the same name: others find their sum by that. Returns a gradient for ``leaf``, which tells
    that there was one.
    """
    mode, name = get_proxy_mode(), CommSpec.decode(spec).param.name
    is_unique = mode is not None and len(set(_shards_read(mode.tracer.graph, name))) == 1
    return _numbered(torch.ops.fsdp_compiled.keep_grad.default, grad, None if is_unique else leaf, spec)


def _shards_read(graph: fx.Graph, name: str) -> Iterator[Any]:
    """Yield the shard of each read in a trace of a parameter that has this name."""
    reads = list[tuple[Any, str]]()
    for operator, place in (("unshard", 0), ("with_gradient", 1)):
        found = graph.find_nodes(op="call_function", target=getattr(torch.ops.fsdp_compiled, operator).default)
        reads += [(node.args[place], node.args[-1]) for node in found]
    for node in graph.find_nodes(op="call_function", target=torch.ops.fsdp_compiled.unshard_all.default):
        reads += zip(node.args[0], node.args[-1], strict=True)
    return (shard for shard, text in reads if CommSpec.decode(text).param.name == name)


def _numbered(op: Any, *args: Any) -> Any:
    """Call ``op`` with the number of its calls with the same text, the last argument, that the trace holds so far."""
    mode = get_proxy_mode()
    before = mode.tracer.graph.find_nodes(op="call_function", target=op) if mode is not None else ()
    number = sum(node.args[-1] == args[-1] for node in before)
    return op(*args, number=number) if number else op(*args)


def with_gradient(
    unsharded: Tensor, shard: Tensor, unsharded_grad: Tensor | None, shard_grad: Tensor | None, spec: str
) -> Tensor:
    """Return ``unsharded``, a parameter that an all-gather extension made, with the gradient of :func:`unshard`."""
    if type(unsharded) is not Tensor:
        return _subclass_with_gradient(unsharded, shard, unsharded_grad, shard_grad, spec)
    return torch.ops.fsdp_compiled.with_gradient(unsharded, shard, unsharded_grad, shard_grad, spec)


class _WithGradient(torch.autograd.Function):
    """:func:`with_gradient` of a tensor subclass, whose own dispatch knows ``detach`` but no operator of ours."""

    @staticmethod
    def forward(ctx: Any, unsharded: Tensor, *others: Any) -> Tensor:
        _save_for_backward(ctx, others, unsharded)
        return unsharded.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_unshard_backward(ctx, grad)


# Dynamo would try backward with a gradient of the subclass, where it is a plain one.
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _subclass_with_gradient(unsharded: Tensor, *others: Any) -> Tensor:
    return _WithGradient.apply(unsharded, *others)


def _for_each(run: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Return the operator on several tensors: the first argument; the last one is a text for each."""
    return lambda tensors, *others, number=0: list(map(run, tensors, others[-1]))


def _unshard_fake(shard: Tensor, *others: Any) -> Tensor:
    bucket = ALL_GATHER.bucket_of_one(others[-1], shard)
    if shard.device.type == "meta":
        raise RuntimeError(meta_parameter(bucket.params[0].name))
    return shard.new_empty(bucket.layouts[0].shape, dtype=bucket.spec.dtype, device=bucket.device_of([shard]))


def meta_parameter(name: str) -> str:
    """Return the message for a forward with a parameter that has no storage yet."""
    return (
        f"{name}: expected a parameter with storage, got one on the meta device; "
        "call model.to_empty(device=...) and initialise it before the first forward"
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, unsharded_grad, shard_grad, ctx.spec = inputs
    ctx.unsharded_grad, ctx.has_other_shard = unsharded_grad, shard_grad is not None


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of (shard, unsharded_grad, shard_grad, spec): one of the first three."""
    if ctx.unsharded_grad is not None:
        return None, keep_grad(grad, ctx.unsharded_grad, ctx.spec), None, None
    reduced = reduce_grad(grad, ctx.spec)
    return (None, None, reduced, None) if ctx.has_other_shard else (reduced, None, None, None)


def _save_all_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    _, ctx.leaves, ctx.targets, ctx.specs = inputs
    ctx.set_materialize_grads(False)  # a parameter that was not read has no gradient


def _unshard_all_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the gradients of (shards, leaves, targets, specs)."""
    found, leaves, to_reduce = list[Tensor | None](grads), iter(ctx.leaves), list[int]()
    for index, (grad, target, text) in enumerate(zip(grads, ctx.targets, ctx.specs, strict=True)):
        leaf = next(leaves) if target != _SHARD else None
        if grad is not None and target == _UNSHARDED:
            found[index] = keep_grad(grad, leaf, text)
        elif grad is not None:
            to_reduce.append(index)
    if to_reduce:
        given, texts = [grads[index] for index in to_reduce], [ctx.specs[index] for index in to_reduce]
        reduced = _numbered(torch.ops.fsdp_compiled.reduce_all.default, given, texts)
        for index, result in zip(to_reduce, reduced, strict=True):
            found[index] = result
    of_shards = [each if target == _SHARD else None for each, target in zip(found, ctx.targets, strict=True)]
    of_leaves = [each for each, target in zip(found, ctx.targets, strict=True) if target != _SHARD]
    return of_shards, of_leaves, None, None


def _keep_grad(grad: Tensor, leaf: Tensor | None, text: str, number: int = 0) -> Tensor:
    earlier.keep(grad, leaf, CommSpec.decode(text).param.name)
    return _keep_grad_fake(grad).zero_()


def _keep_grad_fake(grad: Tensor, *_: Any, number: int = 0) -> Tensor:
    return grad.new_empty(1, dtype=torch.float32)


def _take_shard(unsharded: Tensor, dim: int, world: int, group: str) -> Tensor:
    layout = ShardLayout(tuple(unsharded.shape), dim, world)
    return reference.take_shard(unsharded, layout, process_group(group).rank())


def _take_shard_fake(unsharded: Tensor, dim: int, world: int, group: str) -> Tensor:
    return unsharded.new_empty(ShardLayout(tuple(unsharded.shape), dim, world).shard_shape)


for _kind in (ALL_GATHER, REDUCTION):  # whose opaque operators take more than a tensor and a text
    _define_stages(_kind)
_define(nodes.REDUCE_SCHEMA, partial(_opaque, REDUCTION), partial(_opaque_fake, REDUCTION))
_define(nodes.UNSHARD_SCHEMA, partial(_opaque, ALL_GATHER), _unshard_fake)
_define(nodes.UNSHARD_ALL_SCHEMA, _for_each(partial(_opaque, ALL_GATHER)), _for_each(_unshard_fake))
_define(nodes.REDUCE_ALL_SCHEMA, _for_each(partial(_opaque, REDUCTION)), _for_each(partial(_opaque_fake, REDUCTION)))
_define(nodes.KEEP_GRAD_SCHEMA, _keep_grad, _keep_grad_fake)
_define(nodes.TAKE_SHARD_SCHEMA, _take_shard, _take_shard_fake)
_define(nodes.WITH_GRADIENT_SCHEMA, lambda value, *_: value.clone(), lambda value, *_: torch.empty_like(value))
_differentiate = partial(torch.library.register_autograd, lib=_library)
_differentiate("fsdp_compiled::unshard", _unshard_backward, setup_context=_save_for_backward)
_differentiate("fsdp_compiled::unshard_all", _unshard_all_backward, setup_context=_save_all_for_backward)
_differentiate("fsdp_compiled::with_gradient", _WithGradient.backward, setup_context=_save_for_backward)
