"""Gradients of one parameter that accumulate over several backwards before they are reduced."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..expect import unexpected
from ..sharding.dtensor import local_of
from .unit import Unit


def tell_unit(leaf: nn.Parameter, unit: Unit) -> None:
    """Let ``unit`` know whenever a compiled backward has left a gradient in ``leaf``.

    The hook does not keep the unit alive: Python's collector does not look through hooks of this kind, so one on a
    model's leaf that refers to the model would keep the model for good.
    """
    found = weakref.ref(unit)

    def run(leaf: Tensor) -> None:
        unit = found()
        if unit is not None and not unit.has_compiled_gradients:
            unit.on_compiled_gradient()
            unit.has_compiled_gradients = True

    leaf.register_post_accumulate_grad_hook(run)


def after_user_hooks(sharded: nn.Parameter, name: str, grad: DTensor) -> Tensor:
    """Return the local gradient that the hooks of ``sharded.register_hook`` make of a sharded one.

    Autograd does not run them, because the sharded parameter takes no part in the forward. TypeError or ValueError
    if one returns neither None nor such a gradient.
    """
    for hook in list((sharded._backward_hooks or {}).values()):
        result = hook(grad)
        if result is None:
            continue
        if not isinstance(result, DTensor):
            expected = "a hook on its gradient to return None or a DTensor as it was given"
            raise unexpected(name, expected, f"a {type(result).__name__}", error=TypeError)
        if result.shape != grad.shape or result.placements != grad.placements:
            expected = f"a hook on its gradient to return shape {tuple(grad.shape)} with {grad.placements}"
            got = f"{tuple(result.shape)} with {result.placements}"
            raise unexpected(name, expected, got, "redistribute it first")
        grad = result
    return local_of(grad.detach())


class AccumulatedGrad:
    """The sum of gradients not reduced yet, kept as ``.grad`` of a leaf without memory, so that graphs can add to it.

    ``unit`` is told when a compiled backward has added one.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, unit: Unit) -> None:
        self._shape = tuple(shape)
        self._dtype = dtype  # of the sum
        self._unit = unit
        self.leaf: nn.Parameter | None = None  # made when the first gradient is expected

    def prepare(self, device: torch.device) -> nn.Parameter:
        """Return the leaf, made at the first call, on the gradients' device."""
        if self.leaf is None:
            self.leaf = nn.Parameter(torch.zeros(1, dtype=self._dtype, device=device).expand(self._shape))
            tell_unit(self.leaf, self._unit)
        return self.leaf

    @property
    def grad(self) -> Tensor | None:
        """The sum, or None."""
        return None if self.leaf is None else self.leaf.grad

    def add(self, grad: Tensor) -> None:
        """Add a gradient."""
        leaf, grad = self.prepare(grad.device), grad.to(self._dtype)
        leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)

    def take(self) -> Tensor | None:
        """Return the sum and forget it."""
        grad = self.grad
        if self.leaf is not None:
            self.leaf.grad = None
        return grad
