"""This rank's shard of one parameter: its memory, the DTensor that lies in it, and what replaces either."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..collectives import padded_shard, take_shard
from ..sharding.dtensor import dtensor_like, local_of, set_local
from ..sharding.layout import ShardLayout
from .extension import AllGatherExtension, InnerTensors, is_extended, is_wrapper
from .placement import ParamPlacement


class ShardStorage:
    """The memory of one sharded parameter, with padding."""

    def __init__(self, param: nn.Parameter, padded: Tensor, layout: ShardLayout, inner: InnerTensors | None) -> None:
        self.sharded, self.layout = param, layout
        self.inner = inner  # of a wrapper subclass without an all-gather of its own
        self.padded = padded if inner is None else inner.extend(padded.detach())  # not the user's tensor
        self.local = local_of(param)  # it lies in ``padded``
        if not self.local.numel() and padded.numel():
            # accelerate finds an optimizer's parameters again by this address, which is 0 for every empty tensor.
            self.local.data_ptr = padded.data_ptr  # type: ignore[method-assign]
        self.of_dtensor = param.untyped_storage()  # without memory; another one after ``sharded.data = ...``

    def unpadded(self, padded: Tensor) -> Tensor:
        """Return the part of a padded shard, or of its gradient, that is not padding."""
        return unpadded(padded, self.layout, self.local.shape[self.layout.dim])

    def new_dtensor(self, local: Tensor) -> DTensor:
        """Return a DTensor as the sharded parameter is, over another local tensor, such as a gradient."""
        return dtensor_like(self.sharded, local)

    @property
    def versions(self) -> list[int]:
        """How often the DTensor and its local tensor were written to, as autograd counts, each by itself."""
        return [each._version for each in (self.sharded, self.local) if not each.is_inference()]

    def follow(self, unsharded: Tensor, rank: int) -> None:
        """Take from the unsharded parameter what differs from this rank's shard, as it is in that one's dtype."""
        shard = take_shard(unsharded, self.layout, rank).to(self.padded.device)
        is_same = shard == self.padded.to(shard.dtype)
        self.padded.copy_(torch.where(is_same, self.padded, shard.to(self.padded.dtype)))

    def extension(self, module: nn.Module, placement: ParamPlacement) -> AllGatherExtension | None:
        """Return what extends the all-gather of the parameter, which is registered on ``module`` first, or None."""
        extended = next((tensor for tensor in (self.local, self.padded) if is_extended(tensor)), None)
        if extended is None:
            return None
        # The DTensor's local tensor itself, if it needs no padding: torchao keeps its scale there.
        sent = self.local if self.local.shape == self.padded.shape else self.padded
        return AllGatherExtension(extended, sent, module, placement, self.layout.shape)

    def adopt_memory(self, current: nn.Parameter, placement: ParamPlacement) -> Tensor:
        """Return padded memory for ``current``, a DTensor as this one, and let its local tensor lie in it."""
        local = local_of(current)
        padded = placement.pinned(self._with_padding(local.detach()))
        if not same_memory(local, padded):
            set_local(current, self.unpadded(padded))
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


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose elements are all one."""
    return torch.zeros(1, dtype=dtype, device=device).expand(shape)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are the same view of the same memory; of a subclass, the same object."""
    if a is b:
        return True
    is_subclass = is_extended(a) or is_wrapper(a)
    if a.device != b.device or a.dtype != b.dtype or a.shape != b.shape or is_subclass:
        return False
    return a.numel() == 0 or (a.device.type != "meta" and a.data_ptr() == b.data_ptr())
