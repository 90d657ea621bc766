"""The recipe of a reduction: cast, divide, pack, reduce-scatter, all-reduce, hook, divide, cast, unpack, to the host.

Hooks run it as one :class:`Pending`; a graph runs its stages by operators of their own. Packing stays on the compute
stream, because gradients are freed right after it. It knows tensors and buckets; it must not know units, or when
anything waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..passes.cost import Cluster, Times
from ..passes.kinds import Kind, Request
from ..sharding.dtensor import process_group
from ..sharding.spec import CommSpec, ReductionBucket, ReductionSpec
from . import backend, copies, profiler, reference, streams
from .interfaces import Hook, ReduceScatter, registered
from .streams import Pending

REDUCE_SCATTERS, ALL_REDUCES, TO_HOST = "reduce-scatters", "all-reduces", "to host"  # side streams
Result = TypeVar("Result")


def launch_reduction(
    grads: Sequence[Tensor], bucket: ReductionBucket, partial: Sequence[Tensor | None] = ()
) -> Pending[list[Tensor]]:
    """Start reducing unsharded gradients as one bucket.

    Args:
        grads: of the parameters' shapes, any floating-point dtype.
        bucket: what they are.
        partial: for each what earlier reductions over the shard group left, added before replicas are reduced.

    Returns:
        Work that ends in the padded sharded gradients, which may share memory. If the bucket goes to the host, the
        host reads them and has to wait as well.
    """
    packed = pack(grads, bucket)

    def finish(output: Tensor) -> list[Tensor]:
        return finish_reduction(_plus_partial(output, partial, bucket), bucket)

    if bucket.spec.replicas.world == 1:
        return launch_reduce_scatter(packed, bucket, finish)

    def all_reduce(output: Tensor) -> list[Tensor]:
        packed = _plus_partial(output, partial, bucket)
        work = _start_all_reduce(packed, bucket)
        with profiler.of("all_reduce_wait", bucket):
            backend.wait(work, packed.device)
        return finish_reduction(packed, bucket)

    scattered = launch_reduce_scatter(packed, bucket, lambda output: output)
    return scattered.then(ALL_REDUCES, packed.device, all_reduce)


def launch_replica_reduction(partial: Sequence[Tensor], bucket: ReductionBucket) -> Pending[list[Tensor]]:
    """Start reducing over replicas what the shard group has reduced already: padded shards in the bucket's dtype."""
    packed = partial[0].new_empty(bucket.packed.numel)
    copies.pack_shards(partial, packed)
    return launch_all_reduce(packed, bucket, lambda packed: finish_reduction(packed, bucket))


def pack(grads: Sequence[Tensor], bucket: ReductionBucket) -> Tensor:
    """Return the reduce-scatter input, ``[world, packed numel]``, by the compute stream; one gradient may be it."""
    if len(grads) == 1 and needs_no_packing(grads[0], bucket):
        return grads[0].reshape(bucket.spec.shards.world, -1)
    dims = [layout.dim for layout in bucket.layouts]
    spec = bucket.spec
    with profiler.of("gradient_copy_in", bucket):
        return copies.pack_gradients(grads, dims, spec.shards.world, spec.dtype, spec.scaling.pre_divide)


def needs_no_packing(grad: Tensor, bucket: ReductionBucket) -> bool:
    """Tell whether a gradient alone is its reduce-scatter input: not cast, divided, padded or permuted."""
    layout, spec = bucket.layouts[0], bucket.spec
    is_plain = bucket.inputs_persist and grad.dtype == spec.dtype and spec.scaling.pre_divide == 1.0
    return is_plain and spec.shards.world > 1 and layout.dim == 0 and layout.is_even  # its output is a new tensor


def launch_reduce_scatter(
    packed: Tensor, bucket: ReductionBucket, finish: Callable[[Tensor], Result]
) -> Pending[Result]:
    """Start the reduce-scatter of a packed bucket.

    Args:
        packed: the reduce-scatter input; with one shard only, already the output.
        bucket: what it holds.
        finish: continues with the 1-D output, on the same side stream.
    """
    world, waiting = bucket.spec.shards.world, profiler.later("reduce_scatter_wait", bucket)
    if world == 1:
        return streams.launch(REDUCE_SCATTERS, packed.device, lambda: packed.view(-1), finish, waiting)

    def end(started: tuple[Tensor, dist.Work | None]) -> Result:
        output, work = started
        backend.wait(work, packed.device)
        return finish(output)

    with profiler.of("reduce_scatter", bucket):
        return streams.launch(
            REDUCE_SCATTERS, packed.device, lambda: _start_reduce_scatter(packed.view(-1), bucket), end, waiting
        )


def _start_reduce_scatter(packed: Tensor, bucket: ReductionBucket) -> tuple[Tensor, dist.Work | None]:
    spec = bucket.spec
    group, op = process_group(spec.shards.name), backend.REDUCE_OPS[spec.scaling.op]
    if not spec.comm:
        output = packed.new_empty(packed.numel() // spec.shards.world)
        return output, backend.reduce_scatter(output, packed, group, op)
    custom: ReduceScatter = registered(spec.comm, ReduceScatter)
    output = custom.allocate([packed.numel() // spec.shards.world], dtype=packed.dtype, device=packed.device)
    return output, custom(output, packed.contiguous(), group, op, async_op=True)


def launch_all_reduce(packed: Tensor, bucket: ReductionBucket, finish: Callable[[Tensor], Result]) -> Pending[Result]:
    """Start the all-reduce over replicas of packed gradients, in place; ``finish`` continues with them."""

    def end(work: dist.Work) -> Result:
        backend.wait(work, packed.device)
        return finish(packed)

    waiting = profiler.later("all_reduce_wait", bucket)
    return streams.launch(ALL_REDUCES, packed.device, lambda: _start_all_reduce(packed, bucket), end, waiting)


def _start_all_reduce(packed: Tensor, bucket: ReductionBucket) -> dist.Work:
    spec = bucket.spec
    group, op = process_group(spec.replicas.name), backend.REDUCE_OPS[spec.scaling.op]
    with profiler.of("all_reduce", bucket):
        return backend.all_reduce(packed, group, op)


def launch_copy_to_host(
    packed: Tensor, bucket: ReductionBucket, finish: Callable[[Tensor], Result]
) -> Pending[Result]:
    """Start ``finish``, which copies reduced, packed gradients to the host; called as the other stages are."""
    with profiler.of("copy_to_host", bucket):
        return streams.launch(
            TO_HOST, packed.device, lambda: packed, finish, profiler.later("copy_to_host_wait", bucket)
        )


def finish_reduction(packed: Tensor, bucket: ReductionBucket) -> list[Tensor]:
    """Return the padded sharded gradients from reduced, packed ones: hook, divide, cast, unpack, to the host.

    Args:
        packed: 1-D; the hook may change it.
        bucket: what it holds.
    """
    with profiler.of("gradient_copy_out", bucket):
        return _finish(packed, bucket)


def _finish(packed: Tensor, bucket: ReductionBucket) -> list[Tensor]:
    if bucket.spec.hook:
        registered(bucket.spec.hook, Hook)(packed)
    dtypes = {param.dtype for param in bucket.params}
    if len(dtypes) == 1:
        packed = _scaled(packed, dtypes.pop(), bucket.spec.scaling.post_divide)
        return reference.packed_shards(copies.to_host(packed) if bucket.spec.to_host else packed, bucket.layouts)
    outs = [
        packed.new_empty(layout.shard_shape, dtype=param.dtype)
        for layout, param in zip(bucket.layouts, bucket.params, strict=True)
    ]
    copies.unpack_gradients(packed, outs, bucket.spec.scaling.post_divide)
    return [copies.to_host(out) for out in outs] if bucket.spec.to_host else outs


def _scaled(packed: Tensor, dtype: torch.dtype, divisor: float) -> Tensor:
    if divisor == 1.0 and dtype == packed.dtype:
        return packed
    out = packed.new_empty(packed.shape, dtype=dtype)
    copies.unpack_gradients(packed, [out], divisor)
    return out


def _plus_partial(packed: Tensor, partial: Sequence[Tensor | None], bucket: ReductionBucket) -> Tensor:
    if all(part is None for part in partial):
        return packed
    parts = [
        packed.new_zeros(layout.shard_shape) if part is None else part
        for part, layout in zip(partial, bucket.layouts, strict=True)
    ]
    carried = torch.empty_like(packed)
    copies.pack_shards(parts, carried)
    return packed.add_(carried)


# ---- the kind ----

_LAUNCH = {
    "reduce_scatter": launch_reduce_scatter,
    "all_reduce": launch_all_reduce,
    "copy_to_host": launch_copy_to_host,
}


def _launch_in_graph(stage: str, given: Sequence[Tensor] | Tensor, bucket: ReductionBucket) -> Pending[Any]:
    """Start a stage on gradients, or on what the stage before returned; the last one returns sharded gradients."""
    packed = given if isinstance(given, Tensor) else pack(given, bucket).view(-1)
    is_last = stage == bucket.stages[-1]
    return _LAUNCH[stage](packed, bucket, lambda packed: finish_reduction(packed, bucket) if is_last else packed)


def _wait(pending: Pending[Any], stage: str, bucket: ReductionBucket) -> Any:
    result = pending.wait()
    if stage == "copy_to_host":
        pending.wait_on_host()
    return result


def _bucket_of_one(text: str, grad: Tensor) -> ReductionBucket:
    spec = CommSpec.decode(text)
    return ReductionBucket(spec.reduction, (spec.param,))


def _times(requests: Sequence[Request], cluster: Cluster) -> Times:
    spec, size, lanes = requests[0].spec, sum(request.bytes for request in requests), requests[0].lanes
    assert isinstance(spec, ReductionSpec)
    scattered = size // spec.shards.world
    collectives = lanes[:-1] if spec.to_host else lanes
    first, *others = collectives
    passes = 2 if spec.shards.world == 1 else 1  # over replicas alone: an all-reduce goes around twice
    stages_us = [first.link.collective_us(size, first.world, True, passes)]
    stages_us += [lane.link.collective_us(scattered, lane.world, True, passes=2) for lane in others]
    if spec.to_host:
        stages_us.append(cluster.host_us(scattered) if requests[0].device.type != "cpu" else 0.0)
    return Times(tuple(stages_us), cluster.packing_us(size))


def _results(like: Tensor, bucket: ReductionBucket) -> list[Tensor]:
    device = "cpu" if bucket.spec.to_host else None
    shapes = zip(bucket.layouts, bucket.params, strict=True)
    return [like.new_empty(layout.shard_shape, dtype=param.dtype, device=device) for layout, param in shapes]


REDUCTION = Kind(
    "reduction",
    opaque="reduce_grad",
    bucket=ReductionBucket,
    launch={stage: partial(_launch_in_graph, stage) for stage in _LAUNCH},
    wait=_wait,
    results=_results,
    is_ahead=False,
    read=_bucket_of_one,
    times=_times,
)
