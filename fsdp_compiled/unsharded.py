"""The unsharded parameter of eager mode: one tensor object for good, whose memory comes and goes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layout import ShardLayout


class UnshardedParam:
    """A plain parameter over storage that is resized between whole and nothing.

    Autograd saves aliases of the parameter in forward; since the storage stays the same object, filling it again
    before backward gives them their values back.

    Args:
        layout: of the sharded parameter.
        dtype: of compute.
        device: of the shards.
    """

    def __init__(self, layout: ShardLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(layout.world * layout.shard_numel, dtype=dtype, device=device)  # 1D, padded
        self._nbytes = self._flat.untyped_storage().nbytes()
        self.param = nn.Parameter(self._flat[: layout.numel].view(layout.shape), requires_grad=False)

    def allocate(self) -> Tensor:
        """Give the parameter memory.

        Returns:
            Flat and padded, of ``world * shard_numel`` elements. Writing to it does not count as a modification,
            because it restores the values that autograd saved.
        """
        self._flat.untyped_storage().resize_(self._nbytes)
        return self._flat.data

    def free(self) -> None:
        """Take the memory away, and keep autograd's aliases."""
        self._flat.untyped_storage().resize_(0)

    def take_grad(self) -> Tensor | None:
        """Return the gradient that autograd accumulated, and forget it."""
        grad, self.param.grad = self.param.grad, None
        return grad
