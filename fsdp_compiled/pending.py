"""A gradient that waits: accumulated over several backwards before it goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def on_gradient(leaf: nn.Parameter, method: Callable[[Tensor], None]) -> None:
    """Call a bound method with ``leaf`` whenever backward has left a gradient there.

    The hook does not keep the method's object alive: Python's collector does not look through hooks of this kind, so
    one on a model's leaf that refers to the model would keep the model for good.
    """
    found = weakref.WeakMethod(method)

    def run(leaf: Tensor) -> None:
        method = found()
        if method is not None:
            method(leaf)

    leaf.register_post_accumulate_grad_hook(run)


class PendingGrad:
    """The sum of gradients that wait, kept as ``.grad`` of a leaf without memory, so that graphs can add to it.

    Args:
        shape: of the gradients.
        on_arrival: called when a compiled backward has added one.
    """

    def __init__(self, shape: Sequence[int], on_arrival: Callable[[], None]) -> None:
        self._shape = tuple(shape)
        self._on_arrival = on_arrival
        self.leaf: nn.Parameter | None = None  # made when the first gradient is expected

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the leaf, on the gradients' device, in the dtype in which they are summed."""
        if self.leaf is None:
            self.leaf = nn.Parameter(torch.zeros(1, dtype=dtype, device=device).expand(self._shape))
            on_gradient(self.leaf, self._arrive)

    def _arrive(self, leaf: Tensor) -> None:
        self._on_arrival()

    @property
    def grad(self) -> Tensor | None:
        """The sum, or None."""
        return None if self.leaf is None else self.leaf.grad

    def add(self, grad: Tensor, dtype: torch.dtype) -> None:
        """Add a gradient; the first is summed in ``dtype``, unless :meth:`prepare` said otherwise."""
        self.prepare(dtype, grad.device)
        assert self.leaf is not None
        grad = grad.to(self.leaf.dtype)
        self.leaf.grad = grad if self.leaf.grad is None else self.leaf.grad.add_(grad)

    def take(self) -> Tensor | None:
        """Return the sum and forget it."""
        grad = self.grad
        if self.leaf is not None:
            self.leaf.grad = None
        return grad
