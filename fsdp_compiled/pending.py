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
        dtype: in which they are summed.
        device: of the gradients.
        on_arrival: called when a compiled backward has added one; it is not kept alive.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, on_arrival: Callable[[], None]
    ) -> None:
        self.leaf = nn.Parameter(torch.zeros(1, dtype=dtype, device=device).expand(tuple(shape)))
        self._on_arrival = weakref.WeakMethod(on_arrival)
        on_gradient(self.leaf, self._arrive)

    def _arrive(self, leaf: Tensor) -> None:
        on_arrival = self._on_arrival()
        if on_arrival is not None:
            on_arrival()

    @property
    def grad(self) -> Tensor | None:
        """The sum, or None."""
        return self.leaf.grad

    def add(self, grad: Tensor) -> None:
        """Add a gradient."""
        grad = grad.to(self.leaf.dtype)
        self.leaf.grad = grad if self.leaf.grad is None else self.leaf.grad.add_(grad)

    def take(self) -> Tensor | None:
        """Return the sum and forget it."""
        grad, self.leaf.grad = self.leaf.grad, None
        return grad
