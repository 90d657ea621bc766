"""The gradients of one parameter: what becomes of a reduced one, and the sums of those not reduced yet."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..expect import unexpected
from ..policy import resolved
from ..sharding.dtensor import local_of
from .placement import ParamPlacement
from .sharded import ShardStorage, without_memory
from .unit import Unit, UnitConfig


def tell_unit(leaf: nn.Parameter, unit: Unit) -> None:
    """Let ``unit`` know whenever a compiled backward has left a gradient in ``leaf``."""
    # Python's collector does not look through such hooks: one that refers to the model would keep it for good.
    found = weakref.ref(unit)

    def run(leaf: Tensor) -> None:
        if (unit := found()) is not None:
            unit.on_compiled_gradient()

    leaf.register_post_accumulate_grad_hook(run)


def after_user_hooks(sharded: nn.Parameter, name: str, grad: DTensor) -> Tensor:
    """Return the local gradient that the hooks of ``sharded.register_hook`` make of a sharded one.

    Autograd does not run them: forward does not read ``sharded``. TypeError or ValueError for a wrong result.
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
    """The sum of gradients not reduced yet: ``.grad`` of a leaf without memory, to which graphs can add."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, unit: Unit) -> None:
        self._shape, self._dtype, self._unit = shape, dtype, unit
        self.leaf: nn.Parameter | None = None  # made when the first gradient is expected

    def prepare(self, device: torch.device) -> nn.Parameter:
        """Return the leaf, made at the first call, on the gradients' device."""
        if self.leaf is None:
            self.leaf = nn.Parameter(without_memory(self._shape, self._dtype, device))
            tell_unit(self.leaf, self._unit)
        return self.leaf

    @property
    def grad(self) -> Tensor | None:
        return None if self.leaf is None else self.leaf.grad

    def add(self, grad: Tensor) -> None:
        leaf, grad = self.prepare(grad.device), grad.to(self._dtype)
        leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)

    def take(self) -> Tensor | None:
        """Return the sum and forget it."""
        grad = self.grad
        if self.leaf is not None:
            self.leaf.grad = None
        return grad


class Gradients:
    """The gradients of a sharded parameter and of the leaf by which graphs read it, in ``storage`` both.

    Compiled backwards leave reduced gradients in the leaf, and tell ``unit``.
    """

    def __init__(self, leaf: nn.Parameter, storage: ShardStorage, placement: ParamPlacement, unit: Unit) -> None:
        self._sharded, self._leaf, self._storage, self._device = storage.sharded, leaf, storage, placement.device
        dtype = resolved(placement.mp_policy, leaf.dtype)[1]  # of reductions
        self.unsharded = AccumulatedGrad(storage.layout.shape, dtype, unit)  # while sync is off
        self.partial = AccumulatedGrad(storage.layout.shard_shape, dtype, unit)  # padded; reduced over shards only
        # The leaf that takes what a graph does not reduce completely, see reads.py.
        self.unsharded_leaf: nn.Parameter | None = None
        self.partial_leaf: nn.Parameter | None = None
        self._config: UnitConfig | None = None  # that they follow
        self._name = ""  # full name
        self.is_differentiable = leaf.requires_grad
        if self.is_differentiable:
            tell_unit(leaf, unit)

    def follow(self, name: str, config: UnitConfig) -> None:
        """Make the leaves that ``config`` asks for."""
        if config is not self._config:
            self._name, self._config = name, config
            unsharded = self.is_differentiable and not config.reduce_grads
            partial = self.is_differentiable and config.reduce_grads and not config.all_reduce_grads
            self.unsharded_leaf = self.unsharded.prepare(self._device) if unsharded else None
            self.partial_leaf = self.partial.prepare(self._device) if partial else None
            self.reduces = not (unsharded or partial)  # completely, in the backward that makes them

    def accumulate(self, padded: Tensor) -> None:
        """Add a reduced, padded gradient to the sharded parameter's and run the hooks that users put on it."""
        local, sharded = self._storage.unpadded(padded).to(self._leaf.device), self._sharded
        if sharded._backward_hooks:
            local = after_user_hooks(sharded, self._name, self._storage.new_dtensor(local))
        if sharded.grad is None:
            sharded.grad = self._storage.new_dtensor(local)
        else:
            local_of(sharded.grad).add_(local)
        for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(sharded)

    def accumulate_compiled(self) -> None:
        """Take the gradient that a compiled backward has left in the leaf, if any."""
        grad, self._leaf.grad = self._leaf.grad, None
        if grad is not None:
            self.accumulate(grad.detach() if grad.requires_grad else grad)  # create_graph=True gives it a graph

    def accumulate_zeros(self) -> None:
        """Give a trainable parameter that has no gradient one of zeros."""
        if self._sharded.requires_grad and self._sharded.grad is None:
            shape = self._storage.layout.shard_shape
            self.accumulate(torch.zeros(shape, dtype=self._leaf.dtype, device=self._leaf.device))

    def take_unreduced(self, earlier: Gradients) -> None:
        """Take the sums of the parameter's earlier gradients, which lose them."""
        for accumulated, sums in ((self.unsharded, earlier.unsharded), (self.partial, earlier.partial)):
            if (grad := sums.take()) is not None:
                accumulated.add(grad.to(self._device))
