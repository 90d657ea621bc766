"""The operators that a bucket is lowered to: a launch and a wait for each collective.

A launch returns a *handle*, a tensor of one element whose Python object carries the work under way; the wait takes
the handle and returns the results. So nothing aliases, no table of works is needed, and what an exception leaves
behind is freed with the handle. The wait returns a list, so that every parameter and gradient is a buffer of its own
to Inductor, and kernels of equal layers are equal. A reduction of several stages passes handles on between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..agreement import agree
from ..errors import FSDPError
from ..passes.graph import nodes
from ..sharding.contract import Contract
from ..sharding.spec import AllGatherBucket, ReductionBucket
from . import reduction
from .all_gather import compute_device, launch_all_gather, unpadded
from .library import define
from .streams import Pending

_STAGES = {
    "reduce_scatter": reduction.launch_reduce_scatter,
    "all_reduce": reduction.launch_all_reduce,
    "copy_to_host": reduction.launch_copy_to_host,
}


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


def _agree(contract: str) -> None:
    """Agree with the other ranks on all collectives of a graph, before its first launch."""
    if contract:
        agree(Contract.unpack(contract))


def _fake_handle(inputs: Sequence[Tensor], text: str, contract: str = "") -> Tensor:
    return inputs[0].new_empty(1, dtype=torch.uint8)


# ---- all-gather ----


def _launch_all_gather(shards: Sequence[Tensor], text: str, contract: str = "") -> Tensor:
    _agree(contract)
    bucket = AllGatherBucket.decode(text)
    return _handle(compute_device(shards, bucket), launch_all_gather(shards, bucket))


def _launch_all_gather_fake(shards: Sequence[Tensor], text: str, contract: str = "") -> Tensor:
    return shards[0].new_empty(1, dtype=torch.uint8, device=compute_device(shards, AllGatherBucket.decode(text)))


def _wait_all_gather(handle: Tensor, text: str) -> list[Tensor]:
    padded = _take(handle).wait()
    return [unpadded(*each) for each in zip(padded, AllGatherBucket.decode(text).layouts, strict=True)]


def _wait_all_gather_fake(handle: Tensor, text: str) -> list[Tensor]:
    bucket = AllGatherBucket.decode(text)
    return [handle.new_empty(layout.shape, dtype=bucket.spec.dtype) for layout in bucket.layouts]


# ---- reduction ----


def _launch_reduction_stage(stage: str, inputs: Sequence[Tensor], text: str, contract: str = "") -> Tensor:
    """Start a stage on gradients, or on what the handle of the stage before carries."""
    _agree(contract)
    bucket = ReductionBucket.decode(text)
    packed = reduction.pack(inputs, bucket).view(-1) if stage == bucket.stages[0] else _take(inputs[0])
    is_last = stage == bucket.stages[-1]

    def finish(packed: Tensor) -> Any:
        return reduction.finish_reduction(packed, bucket) if is_last else packed

    return _handle(packed.device, _STAGES[stage](packed, bucket, finish))


def _wait_reduction_stage(stage: str, handle: Tensor, text: str) -> list[Tensor]:
    """Return the sharded gradients, or a handle for the stage that follows."""
    pending: Pending[Any] = _take(handle)
    result = pending.wait()
    if stage == "copy_to_host":
        pending.wait_on_host()
    return result if stage == ReductionBucket.decode(text).stages[-1] else [_handle(handle.device, result)]


def _wait_reduction_stage_fake(stage: str, handle: Tensor, text: str) -> list[Tensor]:
    bucket = ReductionBucket.decode(text)
    if stage != bucket.stages[-1]:
        return [torch.empty_like(handle)]
    return [
        handle.new_empty(layout.shard_shape, dtype=param.dtype, device="cpu" if stage == "copy_to_host" else None)
        for layout, param in zip(bucket.layouts, bucket.params, strict=True)
    ]


define(nodes.launch_schema("all_gather"), _launch_all_gather, _launch_all_gather_fake)
define(nodes.wait_schema("all_gather"), _wait_all_gather, _wait_all_gather_fake)
for _stage in _STAGES:
    define(nodes.launch_schema(_stage), partial(_launch_reduction_stage, _stage), _fake_handle)
    _waits = partial(_wait_reduction_stage, _stage), partial(_wait_reduction_stage_fake, _stage)
    define(nodes.wait_schema(_stage), *_waits)
