"""Packing and unpacking of buckets, by the fastest way that their device has.

Where Triton has a driver for the device, NVIDIA's and AMD's GPUs among others, one Triton kernel copies a bucket.
Everywhere else, and for complex numbers, the plain torch functions of :mod:`reference` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

from torch import Tensor

from . import reference


def pack(tensors: Sequence[Tensor], packed: Tensor, dims: Sequence[int] | None = None, divisor: float = 1.0) -> None:
    """See :func:`reference.pack`. Without ``dims``: padded shards of this rank, and ``packed`` is 1-D."""
    _for(packed).pack(tensors, *_unsharded(tensors, packed, dims), divisor)


def unpack(packed: Tensor, outs: Sequence[Tensor], dims: Sequence[int] | None = None, divisor: float = 1.0) -> None:
    """See :func:`reference.unpack`. Without ``dims``: padded shards of this rank, and ``packed`` is 1-D."""
    packed, dims = _unsharded(outs, packed, dims)
    _for(packed).unpack(packed, outs, dims, divisor)


def _unsharded(tensors: Sequence[Tensor], packed: Tensor, dims: Sequence[int] | None) -> tuple[Tensor, Sequence[int]]:
    """Return buffer and dimensions; shards of a rank are what is unsharded among one rank."""
    return (packed.view(1, -1), [0] * len(tensors)) if dims is None else (packed, dims)


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
