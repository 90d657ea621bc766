"""The sums of earlier backwards, which a reduction in a graph takes along, as one of eager hooks does.

A graph knows tensors and texts, which equal models share. So sums are found through the backward that runs: its node
leads to the leaves of the parameters that it has read. Where the name of a gradient is that of two of them, as in a
graph of two models, hooks reduce its sum at the end of backward. It must not know parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary, ref

from torch import Tensor

from ..errors import FSDPError
from ..sharding.spec import ReductionBucket
from . import backend

_SUMS = "_fsdp_sums"  # of a leaf: a weak reference to its sums; of a node: those that it leads to, by name


class Sums(Protocol):
    """What earlier backwards have left of the gradient of one parameter."""

    @property
    def name(self) -> str: ...
    def with_sum(self, grad: Tensor) -> Tensor: ...
    def take_partial(self) -> Tensor | None: ...
    def keep(self, grad: Tensor) -> None: ...


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


def sums_of(leaf: Tensor | None, name: str) -> Sums:
    """Return the sums of a parameter, given the leaf that stands for them where several have that name."""
    if (own := getattr(leaf, _SUMS, None)) is not None and (sums := own()) is not None:
        return sums  # type: ignore[no-any-return]
    found = _in_backward()
    if name not in found:
        raise FSDPError(
            f"{name}: it is unknown where its gradients are summed up: another parameter of the graph has that name, "
            "and hooks on saved tensors have copied what tells them apart; compile the models one by one"
        )
    return found[name]


def partial_sums(bucket: ReductionBucket) -> list[Tensor | None]:
    """Return, and forget, for each parameter the sum of gradients that are reduced over the shards only."""
    sums = _in_backward()
    return [sums[param.name].take_partial() if param.name in sums else None for param in bucket.params]


def _in_backward() -> Mapping[str, Sums]:
    """Return the sums that the running backward may take, found once for each of its nodes."""
    node = backend.autograd_node() if _expected else None
    if node is None:
        return {}
    if not hasattr(node, _SUMS):
        setattr(node, _SUMS, _by_name(node))
    return getattr(node, _SUMS)  # type: ignore[no-any-return]


def _by_name(node: Any) -> Mapping[str, Sums]:
    """Return those that a node leads to, but for equal names."""
    refs = (getattr(getattr(following, "variable", None), _SUMS, None) for following, _ in node.next_functions)
    found = {sums for each in refs if each is not None and (sums := each()) is not None}
    often = Counter(sums.name for sums in found)
    return WeakValueDictionary({sums.name: sums for sums in found if often[sums.name] == 1})
