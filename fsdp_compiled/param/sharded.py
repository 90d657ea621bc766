"""This rank's shard of one parameter: its memory, the DTensor that lies in it, and what replaces either.

It knows one shard; it must not know modules, nor when anything is all-gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # checked on torch 2.11.0, 2.13.0 and 2.15.0

from ..collectives import padded_shard
from ..sharding.dtensor import local_of
from ..sharding.layout import ShardLayout
from .extension import InnerTensors, is_extended
from .placement import ParamPlacement
from .replaced import storage_of


class ShardStorage:
    """The memory of one sharded parameter, with padding."""

    def __init__(
        self, sharded: nn.Parameter, padded: Tensor, layout: ShardLayout, inner: InnerTensors | None
    ) -> None:
        self.layout = layout
        self.inner = inner  # of a wrapper subclass without an all-gather of its own
        self.padded = padded if inner is None else inner.extend(padded.detach())  # not the user's tensor
        self.local = _identifiable(local_of(sharded), padded)  # of the DTensor; it lies in ``padded``
        self.spec = sharded._spec  # type: ignore[attr-defined]
        self.storage = storage_of(sharded)

    def unpadded(self, padded: Tensor) -> Tensor:
        """Return the part of a padded shard, or of its gradient, that is not padding."""
        return unpadded(padded, self.layout, self.local.shape[self.layout.dim])

    def new_dtensor(self, local: Tensor) -> DTensor:
        """Return a DTensor as the sharded parameter is, over another local tensor: a gradient."""
        # Without DTensor.__init__, which does nothing but leave Dynamo, for 2 us a gradient.
        return DTensor.__new__(DTensor, local, self.spec, requires_grad=False)

    def holds(self, local: Tensor) -> bool:
        """Tell whether ``local`` still lies in this memory."""
        return local is self.local or same_memory(local, self.unpadded(self.padded))

    def adopt_memory(self, current: nn.Parameter, placement: ParamPlacement) -> Tensor:
        """Return padded memory for ``current``, a DTensor as this one, and let its local tensor lie in it."""
        local = local_of(current)
        padded = placement.pinned(self._with_padding(local.detach()))
        if not same_memory(local, padded) or tuple(local.shape) != self.layout.shard_shape:
            current._local_tensor = self.unpadded(padded)  # type: ignore[attr-defined]
        return padded

    def _with_padding(self, local: Tensor) -> Tensor:
        """Return ``local`` with padding: behind it in its own memory, if that is a shard's, or else copied."""
        nbytes = self.layout.shard_numel * local.itemsize
        is_padded = type(local) is Tensor and local.is_contiguous() and local.shape != self.layout.shard_shape
        if is_padded and not local.storage_offset() and local.untyped_storage().nbytes() == nbytes:
            return torch.as_strided(local, self.layout.shard_shape, local.stride(), 0)
        return padded_shard(local, self.layout)


def unpadded(padded: Tensor, layout: ShardLayout, length: int) -> Tensor:
    """Return the first ``length`` of a padded shard's sharded dimension."""
    return padded if length == layout.chunk else padded.narrow(layout.dim, 0, length)


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


def _identifiable(local: Tensor, padded: Tensor) -> Tensor:
    """Let an empty shard answer ``data_ptr()`` with the address of its padding, and return the shard.

    accelerate finds an optimizer's parameters again by that address, which is 0 for every empty tensor.
    """
    if not local.numel() and padded.numel():
        local.data_ptr = padded.data_ptr  # type: ignore[method-assign]
    return local
