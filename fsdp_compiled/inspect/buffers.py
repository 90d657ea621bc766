"""What the recipes of collectives allocate for a bucket: buffers beside what goes in and what comes out."""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from ..passes.graph import nodes
from ..sharding.spec import AllGatherBucket, Bucket, ReductionBucket

GLOO = "gloo's copy"


class Buffers(NamedTuple):
    """Bytes that a launch allocates; ``has_results`` tells whether the results have their memory from then on."""

    packed: int  # until the last wait
    copied: int = 0  # by gloo, until it is done. *Source:* profiled with torch 2.13.0: it works on flat copies
    has_results: bool = False


def buffers_of(launch: fx.Node, copies: bool) -> Buffers:
    """Return what the recipe of a bucket's collective allocates; of kinds that others define, one packed buffer.

    ``copies`` tells whether the collective works on copies of its buffers, as gloo's do.
    """
    bucket = nodes.bucket_of(launch)
    world, itemsize = bucket.spec.world, bucket.spec.dtype.itemsize
    mine = bucket.packed.numel * itemsize  # what this rank contributes, or gets of a reduce-scatter
    copied = world * mine if copies and world > 1 else 0
    if isinstance(bucket, AllGatherBucket):
        is_cast = len(bucket.params) > 1 and any(param.dtype != bucket.spec.dtype for param in bucket.params)
        in_place = bucket.into_place or world == 1
        packed = mine * is_cast if in_place else world * mine
        copied += mine * (in_place and world > 1 and len(bucket.params) > 1)
        return Buffers(packed + mine * (not bucket.inputs_persist), copied, has_results=in_place or not copies)
    if isinstance(bucket, ReductionBucket):
        return Buffers(world * mine + mine * (world > 1), copied)
    return Buffers(world * mine)


def keeps_buffer(bucket: Bucket) -> bool:
    """Tell whether reduced gradients stay in the packed buffer, neither divided nor cast."""
    is_plain = isinstance(bucket, ReductionBucket) and bucket.spec.scaling.post_divide == 1.0
    return is_plain and {param.gradient_dtype for param in bucket.params} == {bucket.spec.dtype}
