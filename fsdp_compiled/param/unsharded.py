"""The unsharded parameter of eager mode: one tensor object for good, whose memory comes and goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..sharding.dtensor import OuterParallelism, local_of
from ..sharding.spec import CommSpec
from .extension import AllGatherExtension


class Unsharded:
    """A parameter over storages that are resized between all of their memory and nothing.

    Autograd saves aliases of the parameter in forward; since the storages stay the same objects, filling them again
    before backward gives the aliases their values back.
    """

    param: nn.Parameter

    def __init__(self, specs: Sequence[CommSpec], device: torch.device, outer: OuterParallelism | None) -> None:
        self._outer = outer  # other parallelism, of which what is all-gathered is the local part
        self._outputs = [
            torch.empty(spec.layout.padded_numel, dtype=spec.all_gather.dtype, device=device)  # 1D, padded
            for spec in specs
        ]
        self._nbytes: dict[Tensor, int] = {}  # of every tensor that holds memory
        self._hold(self._outputs)

    def allocate(self, specs: Sequence[CommSpec]) -> Sequence[Tensor]:
        """Give the all-gather outputs memory.

        Returns:
            Flat and padded, less than all of the memory over a smaller group. Writing to them does not count as a
            modification, because it restores the values that autograd saved.
        """
        for tensor, nbytes in self._nbytes.items():
            storage = tensor.untyped_storage()
            if storage.nbytes() != nbytes:  # else resize_ would move it
                storage.resize_(nbytes)
        sizes = [spec.layout.padded_numel for spec in specs]
        return [output.data[:size] for output, size in zip(self._outputs, sizes, strict=True)]

    def complete(self) -> None:
        """Make the parameter of outputs that have been filled, unless it is a view of them."""

    def free(self) -> None:
        """Take the memory away, and keep autograd's aliases."""
        for tensor in self._nbytes:
            tensor.untyped_storage().resize_(0)

    def _hold(self, tensors: Iterable[Tensor]) -> None:
        self._nbytes |= {tensor: tensor.untyped_storage().nbytes() for tensor in tensors}

    def _parameter(self, local: Tensor) -> nn.Parameter:
        return nn.Parameter(self._outer.leaf(local) if self._outer else local, requires_grad=False)


class UnshardedParam(Unsharded):
    """A plain parameter, or a DTensor of one, that is a view of its one all-gather output."""

    def __init__(self, spec: CommSpec, device: torch.device, outer: OuterParallelism | None) -> None:
        super().__init__([spec], device, outer)
        (self._flat,) = self._outputs
        self.param = self._parameter(self._flat[: spec.layout.numel].view(spec.layout.shape))


class ExtendedUnsharded(Unsharded):
    """A parameter that a tensor subclass, by its ``extension``, makes of the all-gather outputs."""

    def __init__(
        self,
        extension: AllGatherExtension,
        specs: Sequence[CommSpec],
        device: torch.device,
        outer: OuterParallelism | None,
    ) -> None:
        super().__init__(specs, device, outer)
        self._extension = extension
        self._shapes = [spec.layout.shape for spec in specs]
        self._made: Tensor | None = None  # what the extension returned, maybe with padding

    def complete(self) -> None:
        """Make the parameter at first, and fill it afterwards."""
        outputs = [output.view(shape) for output, shape in zip(self._outputs, self._shapes, strict=True)]
        if self._made is None:
            made, inner = self._extension.finish(outputs)
            self.param = self._parameter(self._extension.without_padding(made))
            self._hold(inner)
            self._made = made
            return
        # A subclass may keep more than memory, such as a scale, on the very object that compute reads.
        out = self._made if type(self._made) is Tensor else local_of(self.param)
        with torch.autograd._unsafe_preserve_version_counter(out):  # type: ignore[attr-defined]
            self._extension.refill(outputs, out)
