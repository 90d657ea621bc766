"""Tensor subclasses that define no all-gather, such as torchao's quantised weights: what they consist of is gathered.

Such a weight is sharded by its own slicing. Its shard is given the two methods of an all-gather extension: each inner
tensor travels as it is, and the unsharded weight is made of the results. It knows single tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # checked on torch 2.11.0, 2.13.0 and 2.15.0

from ..sharding.layout import ShardLayout
from .extension import POST, PRE, is_extended


@dataclass(frozen=True, eq=False)
class InnerTensors:
    """How one unsharded weight of a wrapper subclass is made of its inner tensors."""

    cls: type
    sharded: tuple[str, ...]  # inner tensors that are cut along dimension 0 where the weight is
    replicated: dict[str, Tensor]  # the others, the same on every rank
    context: Any  # of the unsharded weight, for ``__tensor_unflatten__``
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def extend(self, shard: Tensor) -> Tensor:
        """Let ``shard`` have the two methods of :mod:`.extension`, and return it."""

        def split(shard: Tensor, mesh: object) -> tuple[tuple[Tensor, ...], None]:
            return tuple([getattr(shard, name) for name in self.sharded]), None

        def join(
            shard: Tensor, outputs: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
        ) -> tuple[Tensor, Sequence[Tensor]] | None:
            if out is not None:
                return None  # it consists of the very outputs
            inner = {**self.replicated, **dict(zip(self.sharded, outputs, strict=True))}
            made = self.cls.__tensor_unflatten__(inner, self.context, self.shape, self.stride)  # type: ignore[attr-defined]
            return made, outputs

        setattr(shard, PRE, MethodType(split, shard))
        setattr(shard, POST, MethodType(join, shard))
        return shard


def inner_tensors(name: str, unsharded: Tensor, layout: ShardLayout) -> InnerTensors | None:
    """Return how to gather a wrapper subclass without an all-gather of its own; None for any other tensor.

    ``unsharded`` is the original parameter's tensor, under other parallelism this rank's part. NotImplementedError if
    it cannot be sharded by ``layout``.
    """
    if not is_traceable_wrapper_subclass(unsharded) or is_extended(unsharded):
        return None
    cls = type(unsharded)
    if layout.dim != 0 or not layout.is_even:
        _refuse(name, cls, f"only Shard(0) of equal parts, got Shard({layout.dim}) of {layout.shape}", layout)
    try:
        part = unsharded.narrow(0, 0, layout.chunk).clone(memory_format=torch.contiguous_format).contiguous()
    except (NotImplementedError, RuntimeError, ValueError, AssertionError) as error:
        _refuse(
            name, cls, f"a class that can be sliced and copied, got: {str(error).strip().splitlines()[0]}", layout
        )
    names, context = unsharded.__tensor_flatten__()
    sharded, replicated = [], {}
    for inner in names:
        whole, cut = getattr(unsharded, inner), getattr(part, inner)
        if cut.shape == whole.shape and layout.world > 1:
            replicated[inner] = whole
        elif (cut.shape[0] * layout.world, *cut.shape[1:]) == tuple(whole.shape):
            sharded.append(inner)
        else:
            sizes = f"{tuple(whole.shape)} of which a shard has {tuple(cut.shape)}"
            _refuse(name, cls, f"inner tensors that are cut along dimension 0, got {inner} of shape {sizes}", layout)
    return InnerTensors(cls, tuple(sharded), replicated, context, tuple(unsharded.shape), unsharded.stride())


def _refuse(name: str, cls: type, expected: str, layout: ShardLayout) -> None:
    raise NotImplementedError(
        f"{name}: {cls.__name__} defines no all-gather, and sharding its inner tensors over {layout.world} ranks "
        f"expects {expected}; leave it whole on every rank with fully_shard(..., ignored_params={{...}})"
    )
