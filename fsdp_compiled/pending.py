"""A gradient that waits: accumulated over several backwards before it goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class PendingGrad:
    """The sum of gradients that wait, kept as ``.grad`` of a leaf without memory, so that graphs can add to it.

    Args:
        shape: of the gradients.
        dtype: in which they are summed.
        device: of the gradients.
        on_arrival: called when a compiled backward has added one.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, on_arrival: Callable[[], None]
    ) -> None:
        self.leaf = nn.Parameter(torch.zeros(1, dtype=dtype, device=device).expand(tuple(shape)))
        self.leaf.register_post_accumulate_grad_hook(lambda _: on_arrival())

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
