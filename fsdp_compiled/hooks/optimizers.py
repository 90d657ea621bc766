"""Finds optimizers that hold parameters which the model no longer trains; their steps would silently do nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from ..param.param import FSDPParam


def check_optimizers(params: Iterable[FSDPParam]) -> None:
    """Raise RuntimeError if an optimizer holds a parameter as it was before ``fully_shard``, or unsharded.

    It searches all objects, so call it once, before the first step. It searches none where nobody can hold such a
    parameter.
    """
    # Kept while it searches, so that an id means one tensor.
    stale: dict[int, tuple[str, str, Tensor]] = {}
    for param in params:
        for what, tensor in (("before fully_shard", param.original()), ("unsharded", param.unsharded_param)):
            if tensor is not None:
                stale[id(tensor)] = (param.name, what, tensor)
    if not stale:
        return
    for found in gc.get_objects():
        if issubclass(type(found), Optimizer):  # isinstance would ask proxies for their class
            _check(found, stale)


def _check(optimizer: Optimizer, stale: dict[int, tuple[str, str, Tensor]]) -> None:
    for group in getattr(optimizer, "param_groups", ()):
        for tensor in group["params"]:
            if id(tensor) in stale:
                name, what, _ = stale[id(tensor)]
                raise RuntimeError(
                    f"{name}: expected {type(optimizer).__name__} to hold the sharded parameter, got it as it was "
                    f"{what}, which no step would train; make the optimizer after fully_shard, of a model that is "
                    "not unsharded"
                )
