"""Copy-in and copy-out on any device: plain torch on a CPU, one Triton kernel a bucket on a GPU.

The functions do the work; the operators of the same names let graphs call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..layout import ShardLayout
from ..passes import ir
from . import reference
from .comm import define


def copy_in_shards(shards: Sequence[Tensor], row: Tensor) -> None:
    """See :func:`reference.copy_in_shards`."""
    _for(row.device).copy_in_shards(shards, row)


def copy_out_gathered(rows: Tensor, outs: Sequence[Tensor], dims: Sequence[int]) -> None:
    """See :func:`reference.copy_out_gathered`."""
    _for(rows.device).copy_out_gathered(rows, outs, dims)


def copy_in_gradients(
    grads: Sequence[Tensor], dims: Sequence[int], world: int, dtype: torch.dtype, divisor: float
) -> Tensor:
    """See :func:`reference.copy_in_gradients`."""
    return _for(grads[0].device).copy_in_gradients(grads, dims, world, dtype, divisor)


def copy_out_reduced(row: Tensor, outs: Sequence[Tensor], divisor: float, accumulate: bool) -> None:
    """See :func:`reference.copy_out_reduced`."""
    _for(row.device).copy_out_reduced(row, outs, divisor, accumulate)


def to_host(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in memory of the host, pinned if it has to move; it is there when the stream is that far."""
    return tensor.to("cpu", non_blocking=True)


def _for(device: torch.device) -> ModuleType:
    if device.type != "cuda":
        return reference
    try:
        from . import kernels
    except ImportError as error:
        raise ImportError(
            "fsdp_compiled copies parameters on a GPU by Triton kernels, and triton is not installed; "
            "install PyTorch's CUDA build, which brings its triton, or: pip install triton"
        ) from error
    return kernels


def _copy_in_gradients_fake(
    grads: Sequence[Tensor], dims: Sequence[int], world: int, dtype: torch.dtype, divisor: float
) -> Tensor:
    layouts = [ShardLayout(tuple(grad.shape), dim, world) for grad, dim in zip(grads, dims, strict=True)]
    row_length = reference.row_numel([layout.shard_numel for layout in layouts])
    return grads[0].new_empty(world, row_length, dtype=dtype)


define(ir.COPY_IN_SHARDS_SCHEMA, copy_in_shards, lambda *_: None)
define(ir.COPY_OUT_GATHERED_SCHEMA, copy_out_gathered, lambda *_: None)
define(ir.COPY_IN_GRADIENTS_SCHEMA, copy_in_gradients, _copy_in_gradients_fake)
define(ir.COPY_OUT_REDUCED_SCHEMA, copy_out_reduced, lambda *_: None)
