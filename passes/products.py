"""Keeps matrix products whole in graphs of ours where Inductor would write a mul, or a mul and a sum.

Inductor does so where a dimension is 1, thus for a batch of one row; and what is no product AOTAutograd's partitioner
may compute again in backward. A rank with one row would then read other parameters there than the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from .torch_internals import TracingContext, decomposition

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
_ours: WeakSet[TracingContext] = WeakSet()  # compilations that have met an operator of ours


def found_ours() -> None:
    """Keep products whole in the compilation that is going on, if there is one."""
    tracing = TracingContext.try_get()
    if tracing is not None:
        _ours.add(tracing)


def keep_whole() -> None:
    """Let Inductor ask before it decomposes a product; a second call changes nothing."""
    for table in _tables():
        for product in _PRODUCTS:
            if not isinstance(decompose := table[product], _UnlessOurs):
                table[product] = _UnlessOurs(decompose)


def decompose() -> None:
    """Let Inductor decompose all products again."""
    for table in _tables():
        for product in _PRODUCTS:
            if isinstance(unless_ours := table[product], _UnlessOurs):
                table[product] = unless_ours.decompose


def _tables() -> Iterator[dict[Any, Callable[..., Any]]]:
    yield from (decomposition.decompositions, decomposition.fast_random_decomps())


@dataclass(frozen=True)
class _UnlessOurs:
    decompose: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if TracingContext.try_get() in _ours else self.decompose(*args, **kwargs)
