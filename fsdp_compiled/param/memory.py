"""What memory a tensor has: none, or the same as another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # checked on torch 2.11.0, 2.13.0 and 2.15.0

from .extension import is_extended


def without_memory(like: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and device whose elements are all one."""
    return torch.zeros(1, dtype=like.dtype, device=like.device).expand(like.shape)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are the same view of the same memory; of a subclass, the same object."""
    if a is b:
        return True
    is_subclass = is_extended(a) or is_traceable_wrapper_subclass(a)
    if a.device != b.device or a.dtype != b.dtype or a.shape != b.shape or is_subclass:
        return False
    return a.numel() == 0 or (a.device.type != "meta" and a.data_ptr() == b.data_ptr())


def identifiable(local: Tensor, padded: Tensor) -> Tensor:
    """Let an empty shard answer ``data_ptr()`` with the address of its padding, and return the shard.

    accelerate finds an optimizer's parameters again by that address, which is 0 for every empty tensor.
    """
    if not local.numel() and padded.numel():
        local.data_ptr = padded.data_ptr  # type: ignore[method-assign]
    return local
