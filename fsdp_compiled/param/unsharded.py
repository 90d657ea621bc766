"""The unsharded parameter of eager mode: one tensor object for good, whose memory comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ..sharding.layout import ShardLayout
from ..sharding.placement import OuterParallelism, local_of
from .extension import AllGatherExtension


class Unsharded(Protocol):
    """What a parameter asks of its unsharded tensor."""

    param: nn.Parameter

    def allocate(self, layouts: Sequence[ShardLayout]) -> Sequence[Tensor]:
        """Give the all-gather outputs memory.

        Returns:
            Flat and padded, of the layouts' ``world * shard_numel`` elements each. Writing to them does not count
            as a modification, because it restores the values that autograd saved.
        """

    def complete(self) -> None:
        """Make the parameter of outputs that have been filled."""

    def free(self) -> None:
        """Take the memory away, and keep autograd's aliases."""


class UnshardedParam:
    """A plain parameter, or a DTensor of one, over storage that is resized between all of it and nothing.

    Autograd saves aliases of the parameter in forward; since the storage stays the same object, filling it again
    before backward gives them their values back.

    Args:
        layout: of the sharded parameter.
        dtype: of compute.
        device: of compute.
        outer: other parallelism, of which the gathered tensor is the local part.
    """

    def __init__(
        self, layout: ShardLayout, dtype: torch.dtype, device: torch.device, outer: OuterParallelism | None
    ) -> None:
        self._flat = torch.empty(layout.world * layout.shard_numel, dtype=dtype, device=device)  # 1D, padded
        self._nbytes = self._flat.untyped_storage().nbytes()
        local = self._flat[: layout.numel].view(layout.shape)
        self.param = nn.Parameter(outer.leaf(local) if outer else local, requires_grad=False)

    def allocate(self, layouts: Sequence[ShardLayout]) -> Sequence[Tensor]:
        """Give the parameter memory; see :class:`Unsharded`. Over a smaller group there is less padding."""
        _resize(self._flat, self._nbytes)
        (layout,) = layouts
        return [self._flat.data[: layout.world * layout.shard_numel]]

    def complete(self) -> None:
        """Do nothing: the parameter is a view of the output."""

    def free(self) -> None:
        """Take the memory away, and keep autograd's aliases."""
        self._flat.untyped_storage().resize_(0)


class ExtendedUnsharded:
    """A parameter that a tensor subclass makes of its all-gather outputs.

    Args:
        extension: of the parameter.
        layouts: of the outputs.
        dtypes: of the outputs.
        device: of compute.
        outer: other parallelism, of which what the subclass makes is the local part.
    """

    param: nn.Parameter

    def __init__(
        self,
        extension: AllGatherExtension,
        layouts: Sequence[ShardLayout],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        outer: OuterParallelism | None,
    ) -> None:
        self._extension = extension
        self._outer = outer
        self._shapes = [layout.shape for layout in layouts]
        self._outputs = [
            torch.empty(layout.world * layout.shard_numel, dtype=dtype, device=device)
            for layout, dtype in zip(layouts, dtypes, strict=True)
        ]
        self._inner: tuple[Tensor, ...] = ()  # what holds the parameter's memory, beside the outputs
        self._nbytes: dict[Tensor, int] = {}
        self._made = False

    def allocate(self, layouts: Sequence[ShardLayout]) -> Sequence[Tensor]:
        """Give the outputs memory; see :class:`Unsharded`."""
        for tensor in (*self._outputs, *self._inner):
            _resize(tensor, self._nbytes.setdefault(tensor, tensor.untyped_storage().nbytes()))
        return [output.data for output in self._outputs]

    def complete(self) -> None:
        """Make the parameter at first, and fill it afterwards."""
        outputs = [output.view(shape) for output, shape in zip(self._outputs, self._shapes, strict=True)]
        if not self._made:
            unsharded, self._inner = self._extension.finish(outputs)
            self.param = nn.Parameter(self._outer.leaf(unsharded) if self._outer else unsharded, requires_grad=False)
            self._nbytes |= {tensor: tensor.untyped_storage().nbytes() for tensor in self._inner}
            self._made = True
            return
        local = local_of(self.param)
        with torch.autograd._unsafe_preserve_version_counter(local):  # type: ignore[attr-defined]
            self._extension.finish(outputs, out=local)

    def free(self) -> None:
        """Take the memory away, and keep autograd's aliases."""
        for tensor in (*self._outputs, *self._inner):
            tensor.untyped_storage().resize_(0)


def _resize(tensor: Tensor, nbytes: int) -> None:
    storage = tensor.untyped_storage()
    if storage.nbytes() != nbytes:  # else resize_ would move it
        storage.resize_(nbytes)
