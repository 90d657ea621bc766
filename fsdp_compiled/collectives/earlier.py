"""The sums of earlier backwards, which a reduction in a graph takes along, as one of eager hooks does.

A graph knows tensors and texts, which equal models share. So sums are found through the backward that runs: its node
leads to the leaves of the parameters that it has read. Where the name of a gradient is that of two of them, as in a
graph of two models, hooks reduce its sum at the end of backward. It must not know parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet, ref

from torch import Tensor

from ..sharding.spec import ReductionBucket
from . import backend

_SUMS = "_fsdp_sums"  # of a leaf: a weak reference to its sums; of a node: those that it leads to, by name


class Sums(Protocol):
    """What earlier backwards have left of the gradient of one parameter."""

    @property
    def name(self) -> str: ...
    @property
    def has_sums(self) -> bool: ...
    def with_sum(self, grad: Tensor) -> Tensor: ...
    def take_partial(self) -> Tensor | None: ...


_expected: WeakSet[Sums] = WeakSet()  # those that may be: where there are none, no backward looks at its leaves


def tell_sums(leaf: Tensor, sums: Sums) -> None:
    """Let reductions in graphs find the sums of the parameter that they read through ``leaf``."""
    setattr(leaf, _SUMS, ref(sums))


def expect_sums(sums: Sums) -> None:
    """Let them be looked for from now on."""
    _expected.add(sums)


def with_sums(grads: Sequence[Tensor], bucket: ReductionBucket) -> Sequence[Tensor]:
    """Return unsharded gradients with the sums of those that no backward has reduced, which are forgotten."""
    sums = _in_backward()
    if not sums:
        return grads
    pairs = zip(bucket.params, grads, strict=True)
    return [sums[param.name].with_sum(grad) if param.name in sums else grad for param, grad in pairs]


def partial_sums(bucket: ReductionBucket) -> list[Tensor | None]:
    """Return, and forget, for each parameter the sum of gradients that are reduced over the shards only."""
    sums = _in_backward()
    return [sums[param.name].take_partial() if param.name in sums else None for param in bucket.params]


def _in_backward() -> Mapping[str, Sums]:
    """Return the sums that the running backward may take, found once for each of its nodes."""
    node = backend.autograd_node()
    found: Mapping[str, Sums] | None = {} if node is None else getattr(node, _SUMS, None)
    if found is None:
        found = _sums_of(node)
        setattr(node, _SUMS, found)
    return found


def _sums_of(node: Any) -> Mapping[str, Sums]:
    if not _expected:
        return {}
    refs = (getattr(getattr(following, "variable", None), _SUMS, None) for following, _ in node.next_functions)
    found = {sums for each in refs if each is not None and (sums := each()) is not None}
    if not any(sums.has_sums for sums in found):
        return {}
    often = Counter(sums.name for sums in found)
    return {sums.name: sums for sums in found if often[sums.name] == 1}
