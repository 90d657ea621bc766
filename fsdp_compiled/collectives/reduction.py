"""The recipe of a reduction: cast, divide, pack, reduce-scatter, all-reduce, hook, divide, cast, unpack, to the host.

Hooks run it as one :class:`Pending`; a graph runs its stages by operators of their own. Packing stays on the compute
stream, because gradients are freed right after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..expect import unexpected
from ..passes.cost import Cluster, Times
from ..passes.kinds import Kind, Request
from ..sharding.dtensor import process_group
from ..sharding.spec import CommSpec, ReductionBucket, ReductionSpec
from . import backend, copies, earlier, reference, streams
from .backend import ReduceScatter
from .communicators import Hook, registered
from .streams import Pending

_STREAMS = {"reduce_scatter": "reduce-scatters", "all_reduce": "all-reduces", "copy_to_host": "to host"}
Started = tuple[Tensor, dist.Work | None]  # a stage's output, and the work that fills it
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

    def finish(packed: Tensor) -> list[Tensor]:
        _add(partial, packed, bucket)
        if bucket.spec.replicas.world > 1:
            with backend.profiled("all_reduce", bucket):
                _, work = _all_reduce(packed, bucket)
            with backend.profiled("all_reduce_wait", bucket):
                backend.wait(work, packed.device)
        return finish_reduction(packed, bucket)

    packed = pack(grads, bucket)
    if bucket.spec.replicas.world == 1:
        return _launch_stage("reduce_scatter", packed, bucket, finish)
    scattered = _launch_stage("reduce_scatter", packed, bucket, lambda output: output)
    return scattered.then(_STREAMS["all_reduce"], packed.device, finish)


def _add(partial: Sequence[Tensor | None], packed: Tensor, bucket: ReductionBucket) -> None:
    if any(part is not None for part in partial):
        for part, piece in zip(partial, bucket.packed.pieces(packed), strict=True):
            if part is not None:
                piece.add_(part.reshape(-1))


def launch_replica_reduction(partial: Sequence[Tensor], bucket: ReductionBucket) -> Pending[list[Tensor]]:
    """Start reducing over replicas what the shard group has reduced already: padded shards in the bucket's dtype."""
    packed = partial[0].new_empty(bucket.packed.numel)
    copies.pack(partial, packed)
    return _launch_stage("all_reduce", packed, bucket, lambda packed: finish_reduction(packed, bucket))


def pack(grads: Sequence[Tensor], bucket: ReductionBucket) -> Tensor:
    """Return the reduce-scatter input, ``[world, packed numel]``, by the compute stream; one gradient may be it."""
    spec = bucket.spec
    for grad, param in zip(grads, bucket.params, strict=True):
        if grad.layout is not torch.strided:
            do = "create nn.Embedding and nn.EmbeddingBag with sparse=False"
            raise unexpected(f"{param.name}.grad", "a dense gradient", grad.layout, do, NotImplementedError)
    if len(grads) == 1 and _needs_no_packing(grads[0], bucket):
        return grads[0].contiguous().view(spec.shards.world, -1)
    dims = [layout.dim for layout in bucket.layouts]
    with backend.profiled("gradient_copy_in", bucket):
        packed = grads[0].new_empty(spec.shards.world, bucket.packed.numel, dtype=spec.dtype)
        copies.pack(grads, packed, dims, spec.scaling.pre_divide)
        return packed


def _needs_no_packing(grad: Tensor, bucket: ReductionBucket) -> bool:
    """Tell whether a gradient alone is its reduce-scatter input: not cast, divided, padded, permuted or conjugate."""
    layout, spec = bucket.layouts[0], bucket.spec
    is_plain = bucket.inputs_persist and grad.dtype == spec.dtype and spec.scaling.pre_divide == 1.0
    is_plain &= not grad.is_conj() and not grad.is_neg()
    return is_plain and spec.shards.world > 1 and layout.dim == 0 and layout.is_even  # its output is a new tensor


def _launch_stage(
    stage: str,
    packed: Tensor,
    bucket: ReductionBucket,
    finish: Callable[[Tensor], Result],
    sums: Sequence[Tensor | None] = (),
) -> Pending[Result]:
    """Start a stage on packed gradients and ``sums`` to add to them.

    ``finish`` continues with its 1-D output, on the same side stream.
    """

    def begin() -> Started:
        _add(sums, packed.view(-1), bucket)
        return _START[stage](packed.view(-1), bucket)

    def end(started: Started) -> Result:
        output, work = started
        if work is not None:
            backend.wait(work, packed.device)
        return finish(output)

    waiting = partial(backend.profiled, f"{stage}_wait", bucket)
    with backend.profiled(stage, bucket):
        return streams.launch(_STREAMS[stage], packed.device, begin, end, waiting)


def _reduce_scatter(packed: Tensor, bucket: ReductionBucket) -> Started:
    spec = bucket.spec
    if spec.shards.world == 1:
        return packed, None
    group, op = process_group(spec.shards.name), backend.REDUCE_OPS[spec.scaling.op]
    numel = packed.numel() // spec.shards.world
    if not spec.comm:
        output = packed.new_empty(numel)
        return output, backend.reduce_scatter(output, packed, group, op)
    custom: ReduceScatter = registered(spec.comm, ReduceScatter)
    output = custom.allocate([numel], dtype=packed.dtype, device=packed.device)
    return output, custom(output, packed.contiguous(), group, op, async_op=True)


def _all_reduce(packed: Tensor, bucket: ReductionBucket) -> Started:
    """Start the all-reduce over replicas, in place."""
    group, op = process_group(bucket.spec.replicas.name), backend.REDUCE_OPS[bucket.spec.scaling.op]
    return packed, backend.all_reduce(packed, group, op)


def finish_reduction(packed: Tensor, bucket: ReductionBucket) -> list[Tensor]:
    """Return the padded sharded gradients from reduced, packed ones, 1-D: hook, divide, cast, unpack, to the host."""
    to_host, divisor = bucket.spec.to_host, bucket.spec.scaling.post_divide
    dtypes = {param.gradient_dtype for param in bucket.params}
    with backend.profiled("gradient_copy_out", bucket):
        if bucket.spec.hook:
            registered(bucket.spec.hook, Hook)(packed)
        if dtypes == {packed.dtype} and divisor == 1.0:
            outs = [packed]
        else:
            shapes = [packed.shape] if len(dtypes) == 1 else [layout.shard_shape for layout in bucket.layouts]
            pairs = zip(shapes, bucket.params, strict=False)
            outs = [packed.new_empty(shape, dtype=param.gradient_dtype) for shape, param in pairs]
            copies.unpack(packed, outs, divisor=divisor)
        if to_host:
            outs = list(map(copies.to_host, outs))
        return reference.packed_shards(outs[0], bucket.layouts) if len(dtypes) == 1 else outs


_START: dict[str, Callable[[Tensor, ReductionBucket], Started]] = {
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "copy_to_host": lambda packed, bucket: (packed, None),  # which finish_reduction does
}


def _launch_in_graph(stage: str, given: Sequence[Tensor] | Tensor, bucket: ReductionBucket) -> Pending[Any]:
    """Start a stage on gradients, or on what the stage before returned; the last one returns sharded gradients.

    Each takes the sums along that earlier backwards have left for it.
    """
    packed = given if isinstance(given, Tensor) else pack(earlier.with_sums(given, bucket), bucket)
    is_last = stage == bucket.stages[-1]
    sums = earlier.partial_sums(bucket) if stage == "all_reduce" else ()
    return _launch_stage(stage, packed, bucket, lambda out: finish_reduction(out, bucket) if is_last else out, sums)


def _wait(pending: Pending[Any], stage: str, bucket: ReductionBucket) -> Any:
    result = pending.wait()
    if stage == "copy_to_host":
        pending.wait_on_host()
    return result


def _bucket_of_one(text: str, grad: Tensor) -> ReductionBucket:
    spec = CommSpec.decode(text)
    return ReductionBucket(spec.reduction, (spec.param,), inputs_persist=True)


def _times(requests: Sequence[Request], cluster: Cluster) -> Times:
    spec, size, lanes = requests[0].spec, sum(request.bytes for request in requests), requests[0].lanes
    assert isinstance(spec, ReductionSpec)
    scattered = size // spec.shards.world
    first, *others = lanes[:-1] if spec.to_host else lanes
    passes = 2 if spec.shards.world == 1 else 1  # over replicas alone: an all-reduce goes around twice
    stages_us = [first.link.collective_us(size, first.world, True, passes)]
    stages_us += [lane.link.collective_us(scattered, lane.world, True, passes=2) for lane in others]
    if spec.to_host:
        stages_us.append(0.0 if cluster.on_host else cluster.host_us(scattered))
    return Times(tuple(stages_us), cluster.packing_us(size))


def _results(like: Tensor, bucket: ReductionBucket) -> list[Tensor]:
    device = "cpu" if bucket.spec.to_host else None
    shapes = zip(bucket.layouts, bucket.params, strict=True)
    return [like.new_empty(layout.shard_shape, dtype=param.gradient_dtype, device=device) for layout, param in shapes]


REDUCTION = Kind(
    "reduction",
    opaque="reduce_grad",
    bucket=ReductionBucket,
    launch={stage: partial(_launch_in_graph, stage) for stage in _START},
    wait=_wait,
    results=_results,
    is_ahead=False,
    read=_bucket_of_one,
    times=_times,
)
