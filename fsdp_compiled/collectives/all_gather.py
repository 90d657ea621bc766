"""The recipe of an all-gather: move, cast, pack, gather, unpack. Hooks and graph operators call it.

Its copies run with it on one side stream; shards that do not persist are copied by the compute stream first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..passes.cost import CLUSTERS, Cluster, Times
from ..passes.kinds import Kind, Request
from ..sharding.dtensor import process_group
from ..sharding.spec import AllGatherBucket, AllGatherSpec, CommSpec, ParamSpec
from . import backend, copies, reference, streams
from .backend import AllGather
from .communicators import registered
from .streams import Pending

ALL_GATHERS = "all-gathers"  # the side stream


class _Started(NamedTuple):
    """An all-gather under way: the work, its output, and what it reads until it is done."""

    work: dist.Work | None
    output: Tensor | None
    inputs: Sequence[Tensor]


def launch_all_gather(
    shards: Sequence[Tensor], bucket: AllGatherBucket, allocate: Callable[[], Sequence[Tensor]] | None = None
) -> Pending[Sequence[Tensor]]:
    """Start the all-gather of a bucket.

    Args:
        shards: padded, of this rank, in any dtype and on any device.
        bucket: what they are.
        allocate: returns contiguous tensors, flat or of ``padded_shape``, in the bucket's dtype and on the device of
            compute, whose first ``numel`` elements become the parameter in row-major order. It is called when their
            memory is needed: now, or in ``wait`` where the output is unpacked then. None for new tensors.

    Returns:
        Work that ends in those tensors; new ones have ``padded_shape``.
    """
    device, world, dtype = bucket.device_of(shards), bucket.spec.group.world, bucket.spec.dtype
    with backend.profiled("all_gather", bucket):
        if not bucket.inputs_persist:
            packed = torch.empty(bucket.packed.numel, dtype=dtype, device=device)
            copies.pack([shard.to(device) for shard in shards], packed)
            shards = bucket.packed.pieces(packed)
        outs: Sequence[Tensor] = ()
        if bucket.into_place or world == 1 or streams.streams_of(device) is not None:  # which fill them now
            new = (torch.empty(each.padded_shape, dtype=dtype, device=device) for each in bucket.layouts)
            outs = allocate() if allocate else list(new)

        def begin() -> _Started:
            sent = [shard.to(device, non_blocking=True) for shard in shards] if bucket.spec.device else shards
            if world == 1:
                reference.copy_each(_flat(sent), _flat(outs))
                return _Started(None, None, sent)
            return _start_into_place(sent, outs, bucket) if bucket.into_place else _start_packed(sent, bucket)

        def finish(started: _Started) -> Sequence[Tensor]:
            backend.wait(started.work, device)
            if started.output is None:
                return outs
            with backend.profiled("all_gather_copy_out", bucket):
                return _unpack(started.output, outs or (allocate() if allocate else ()), bucket)

        waiting = partial(backend.profiled, "all_gather_wait", bucket)
        return streams.launch(ALL_GATHERS, device, begin, finish, waiting)


def _start_packed(shards: Sequence[Tensor], bucket: AllGatherBucket) -> _Started:
    spec, numel = bucket.spec, bucket.packed.numel
    group = process_group(spec.group.name)
    custom: AllGather | None = registered(spec.comm, AllGather) if spec.comm else None
    allocate = torch.empty if custom is None else custom.allocate
    output = allocate([numel * spec.group.world], dtype=spec.dtype, device=shards[0].device)
    if len(shards) == 1 and shards[0].dtype == spec.dtype:
        packed = shards[0].reshape(-1)
    else:
        packed = output.view(spec.group.world, numel)[group.rank()]
        copies.pack(shards, packed)
    gather = backend.all_gather if custom is None else partial(custom, async_op=True)
    return _Started(gather(output, packed, group), output, [packed])


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.reshape(-1) for tensor in tensors]


def _start_into_place(shards: Sequence[Tensor], outs: Sequence[Tensor], bucket: AllGatherBucket) -> _Started:
    group, outs = process_group(bucket.spec.group.name), _flat(outs)
    if all(shard.dtype == bucket.spec.dtype for shard in shards):
        sent = _flat(shards)
    elif len(outs) == 1:
        sent = [outs[0].view(bucket.spec.group.world, -1)[group.rank()]]
        copies.pack(shards, sent[0])
    else:
        packed = outs[0].new_empty(bucket.packed.numel)
        copies.pack(shards, packed)
        sent = bucket.packed.pieces(packed)
    if len(outs) == 1:
        return _Started(backend.all_gather(outs[0], sent[0], group), None, sent)
    return _Started(backend.all_gather_coalesced(outs, sent, group), None, sent)


def _unpack(output: Tensor, outs: Sequence[Tensor], bucket: AllGatherBucket) -> Sequence[Tensor]:
    output = output.view(bucket.spec.group.world, -1)
    if not outs:  # on a CPU, where no side stream asks for the memory before
        return reference.unpacked_parameters(output, bucket.layouts)
    dims = [layout.dim for layout in bucket.layouts]
    pairs = zip(outs, bucket.layouts, strict=True)
    copies.unpack(output, [out.view(layout.padded_shape) if layout.dim else out for out, layout in pairs], dims)
    return outs


def all_gather_bucket(spec: AllGatherSpec, params: Sequence[ParamSpec], device: torch.device) -> AllGatherBucket:
    """Return the bucket of these parameters, gathered each into its own memory where that is faster.

    Compute runs on ``device``; one cluster stands for all devices of a type, because ranks on unequal machines must
    decide alike.
    """
    return _into_place(AllGatherBucket(spec, tuple(params)), CLUSTERS["CPU" if device.type == "cpu" else "H100"])


def _into_place(bucket: AllGatherBucket, cluster: Cluster, sizes: Sequence[int] = ()) -> AllGatherBucket:
    """Decide that; only dimension 0 can be, and an empty parameter only alone.

    ``sizes`` are the bucket's where they are known: to make layouts for every candidate of a search takes long.
    """
    if bucket.spec.group.world == 1 or bucket.spec.comm or any(param.dim for param in bucket.params):
        return bucket
    sizes = sizes or bucket.sizes
    is_faster = (len(sizes) == 1 or all(sizes)) and cluster.saves_by_gathering_into_place(sizes)
    return replace(bucket, into_place=is_faster)


def _bucket_of_one(text: str, shard: Tensor) -> AllGatherBucket:
    spec = CommSpec.decode(text).for_input(shard.shape, shard.dtype)
    return all_gather_bucket(spec.all_gather, (spec.param,), shard.device)  # every device decides alike for one


def _bucket_of(requests: Sequence[Request], cluster: Cluster) -> AllGatherBucket:
    params, inputs_persist = tuple(r.param for r in requests), all(r.inputs_persist for r in requests)
    bucket = AllGatherBucket(requests[0].spec, params, inputs_persist=inputs_persist)  # type: ignore[arg-type]
    return _into_place(bucket, cluster, [r.bytes for r in requests])


def _times(requests: Sequence[Request], cluster: Cluster) -> Times:
    (lane,), sizes = requests[0].lanes, [each.bytes for each in requests]
    return cluster.all_gather_times(sizes, lane, _bucket_of(requests, cluster))


def _results(like: Tensor, bucket: AllGatherBucket) -> list[Tensor]:
    return [like.new_empty(layout.shape, dtype=bucket.spec.dtype) for layout in bucket.layouts]


def _wait(pending: Pending[Sequence[Tensor]], stage: str, bucket: AllGatherBucket) -> list[Tensor]:
    return [
        param if layout.is_even else param.narrow(layout.dim, 0, layout.shape[layout.dim])
        for param, layout in zip(pending.wait(), bucket.layouts, strict=True)
    ]


ALL_GATHER = Kind(
    "all-gather",
    opaque="unshard",
    bucket=AllGatherBucket,
    launch={"all_gather": launch_all_gather},
    wait=_wait,
    results=_results,
    read=_bucket_of_one,
    make=_bucket_of,
    times=_times,
)
