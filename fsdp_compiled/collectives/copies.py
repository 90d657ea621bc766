"""Packing and unpacking of buckets, by the fastest way that their device has.

Where Triton has a driver for the device, NVIDIA's and AMD's GPUs among others, one Triton kernel copies a bucket.
Everywhere else, and for complex numbers, the plain torch functions of :mod:`reference` do. It must not know recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from . import reference


def pack_shards(shards: Sequence[Tensor], packed: Tensor) -> None:
    """See :func:`reference.pack_shards`."""
    _for(packed).pack_shards(shards, packed)


def unpack_parameters(output: Tensor, outs: Sequence[Tensor], dims: Sequence[int]) -> None:
    """See :func:`reference.unpack_parameters`."""
    _for(output).unpack_parameters(output, outs, dims)


def pack_gradients(
    grads: Sequence[Tensor], dims: Sequence[int], world: int, dtype: torch.dtype, divisor: float
) -> Tensor:
    """See :func:`reference.pack_gradients`."""
    return _for(grads[0]).pack_gradients(grads, dims, world, dtype, divisor)


def unpack_gradients(packed: Tensor, outs: Sequence[Tensor], divisor: float) -> None:
    """See :func:`reference.unpack_gradients`."""
    _for(packed).unpack_gradients(packed, outs, divisor)


def to_host(tensor: Tensor) -> Tensor:
    """Return ``tensor`` on the host, pinned if it moves; valid once the current stream reaches this point."""
    return tensor.to("cpu", non_blocking=True)


def _for(tensor: Tensor) -> ModuleType:
    return reference if tensor.is_complex() else _module(tensor.device.type)


@cache
def _module(kind: str) -> ModuleType:
    """Return what copies on devices of this type."""
    if kind == "cpu":
        return reference
    try:
        from . import kernels
    except ImportError as error:
        raise ImportError(
            "fsdp_compiled copies parameters on a GPU by Triton kernels, and triton is not installed; "
            "install PyTorch's CUDA build, which brings its triton, or: pip install triton"
        ) from error
    return kernels if kernels.run_on(kind) else reference
