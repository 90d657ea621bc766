"""The gradients of one parameter: what becomes of a reduced one, and the sums of those not reduced yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..collectives.earlier import expect_sums, tell_sums
from ..expect import unexpected
from ..sharding.dtensor import dtensor_like, local_of
from ..sharding.spec import CommSpec
from .placement import ParamPlacement
from .storage import ShardStorage, without_memory
from .unit import Unit, UnitConfig

T = TypeVar("T")


def tell(leaf: nn.Parameter, owner: T, call: Callable[[T], None]) -> None:
    """Call ``call(owner)`` whenever a backward has left a gradient in ``leaf``, for as long as the owner lives."""
    # Python's collector does not look through such hooks: one that refers to the model would keep it for good.
    found = weakref.ref(owner)

    def run(leaf: Tensor) -> None:
        if (owner := found()) is not None:
            call(owner)

    leaf.register_post_accumulate_grad_hook(torch.compiler.disable(run))


def tell_unit(leaf: nn.Parameter, unit: Unit) -> None:
    """Let ``unit`` know whenever a compiled backward has left a gradient in ``leaf``."""
    tell(leaf, unit, methodcaller("on_compiled_gradient"))


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
            expect_sums(self)
        return self.leaf

    @property
    def grad(self) -> Tensor | None:
        return None if self.leaf is None else self.leaf.grad

    def add(self, grad: Tensor, copy: bool = False) -> None:
        """Add a gradient; ``copy`` if its memory is needed for something else afterwards."""
        leaf = self.prepare(grad.device)
        leaf.grad = grad.to(self._dtype, copy=copy) if leaf.grad is None else leaf.grad.add_(grad.to(self._dtype))

    def take(self) -> Tensor | None:
        """Return the sum and forget it."""
        grad = self.grad
        if self.leaf is not None:
            self.leaf.grad = None
        return grad

    def take_with(self, grad: Tensor) -> Tensor:
        """Return the sum with one more gradient, and forget it."""
        taken = self.take()
        return grad if taken is None else taken.add_(grad.to(taken.dtype))


class Gradients:
    """The gradients of a sharded parameter and of the leaf by which graphs read it, in ``storage`` both.

    Compiled backwards leave reduced gradients in the leaf, and tell ``unit``. Their reductions take sums from here:
    see :class:`Sums`.
    """

    def __init__(self, leaf: nn.Parameter, storage: ShardStorage, placement: ParamPlacement, unit: Unit) -> None:
        self._sharded, self._storage, self._device = storage.sharded, storage, placement.device
        dtypes = placement.dtypes(leaf.dtype)
        self.unsharded = AccumulatedGrad(storage.layout.shape, dtypes.reduction, unit)  # while sync is off
        self.partial = AccumulatedGrad(storage.layout.shard_shape, dtypes.reduction, unit)  # reduced over shards only
        # The leaf that takes what a graph makes instead of the parameter's, see reads.py: unsharded, or a shard.
        self.unsharded_leaf: nn.Parameter | None = None
        self.shard_leaf: nn.Parameter | None = None
        self._unit = unit
        self._keeping: nn.Parameter | None = None  # what unsharded_leaf is while sync is off, kept from then on
        # The leaf that takes complete gradients: autograd would cast those of ``leaf`` to its own dtype.
        self.leaf, self._is_of_another_dtype = leaf, dtypes.gradient != leaf.dtype
        self.is_differentiable = leaf.requires_grad
        if self._is_of_another_dtype:
            self.leaf = AccumulatedGrad(storage.layout.shard_shape, dtypes.gradient, unit).prepare(leaf.device)
        elif self.is_differentiable:
            tell_unit(leaf, unit)
        tell_sums(leaf, self)
        self.name = ""  # full name
        self.spec_text = ""  # by which graphs reduce them, over the shards only if need be

    def with_sum(self, grad: Tensor) -> Tensor:
        """Return an unsharded gradient with the sum of those before it, which is forgotten."""
        return grad if self._is_frozen else self.unsharded.take_with(grad)

    def keep(self, grad: Tensor) -> None:
        """Add an unsharded gradient of a graph, which uses its memory again."""
        if not self._is_frozen:
            self.unsharded.add(grad, copy=True)

    def take_partial(self) -> Tensor | None:
        """Return, and forget, the sum over the shards only."""
        return None if self._is_frozen else self.partial.take()

    @property
    def _is_frozen(self) -> bool:
        """Whether it was frozen after forward: as in one process, what a graph computes for it is dropped."""
        return not self._sharded.requires_grad

    def follow(self, spec: CommSpec, text: str, config: UnitConfig) -> None:
        """Make the leaves that ``config`` asks for; ``text`` is that of ``spec``."""
        self.name = spec.param.name
        reduces = config.reduce_grads and not config.reduces_in_hooks
        unsharded = self.is_differentiable and not reduces
        stops_early = not config.all_reduce_grads and spec.reduction.replicas.world > 1
        is_partial = self.is_differentiable and reduces and stops_early
        own = self.leaf if self._is_of_another_dtype and not unsharded else None
        self.unsharded_leaf = self._keeping_leaf() if unsharded else None
        self.shard_leaf = self.partial.prepare(self._device) if is_partial else own
        self.spec_text = spec.text_over_shards_only if is_partial else text

    def _keeping_leaf(self) -> nn.Parameter:
        """Return the leaf that stands for the sum of unsharded gradients."""
        if self._keeping is None:
            self._keeping = nn.Parameter(torch.zeros(1, device=self._device))
            tell_unit(self._keeping, self._unit)
            tell_sums(self._keeping, self)
        return self._keeping

    def accumulate(self, padded: Tensor | None = None) -> None:
        """Add a reduced, padded gradient, and what a compiled backward has left in the leaf, to the parameter's.

        The hooks that users put on it run once in a call, for the sum; nothing happens if there is neither.
        """
        compiled, self.leaf.grad = None if self._is_frozen else self.leaf.grad, None
        if compiled is not None:
            compiled = compiled.detach() if compiled.requires_grad else compiled  # create_graph=True gives it a graph
            padded = compiled if padded is None else padded + compiled
        if padded is None:
            return
        local, sharded = self._storage.unpadded(padded).to(self.leaf.device), self._sharded
        if sharded._backward_hooks:
            local = after_user_hooks(sharded, self.name, dtensor_like(sharded, local))
        if sharded.grad is None:
            self._set(dtensor_like(sharded, local))
        else:
            local_of(sharded.grad).add_(local)
        for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(sharded)

    def _set(self, grad: DTensor) -> None:
        try:
            self._sharded.grad = grad
        except RuntimeError as error:
            if self._sharded.grad_dtype in (None, grad.dtype):
                raise
            do = "set grad_dtype before the first forward"
            expected = f"grad_dtype to stay {grad.dtype}"
            raise unexpected(self.name, expected, self._sharded.grad_dtype, do, RuntimeError) from error

    def accumulate_zeros(self) -> None:
        """Give a trainable parameter that has no gradient one of zeros."""
        if self._sharded.requires_grad and self._sharded.grad is None:
            shape = self._storage.layout.shard_shape
            self.accumulate(torch.zeros(shape, dtype=self.leaf.dtype, device=self.leaf.device))

    def zero(self, set_to_none: bool) -> None:
        """Forget the sharded parameter's gradient and the sums not reduced yet, or fill them with zeros."""
        for holder in (self._sharded, self.unsharded.leaf, self.partial.leaf):
            if holder is not None and holder.grad is not None:
                if set_to_none:
                    holder.grad = None
                else:
                    holder.grad.detach().zero_()

    def take_unreduced(self, earlier: Gradients) -> None:
        """Take the sums of the parameter's earlier gradients, which lose them."""
        for accumulated, sums in ((self.unsharded, earlier.unsharded), (self.partial, earlier.partial)):
            if (grad := sums.take()) is not None:
                accumulated.add(grad.to(self._device))
