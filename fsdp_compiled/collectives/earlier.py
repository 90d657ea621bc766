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

from ..agreement.peers import backward_task
from ..errors import FSDPError
from ..sharding.spec import ReductionBucket
from . import backend

# Where a gradient not reduced yet has been or will be added up, in most processes nowhere; weak, as units own them.
_expected: WeakSet[Any] = WeakSet()
_SUMS = "_fsdp_sums"  # of a leaf: a weak reference to its sums; of a node: the backward, and those that it leads to


class Sums(Protocol):
    """What earlier backwards have left of the gradient of one parameter."""

    @property
    def name(self) -> str: ...
    def with_sum(self, grad: Tensor) -> Tensor: ...
    def take_partial(self) -> Tensor | None: ...
    def keep(self, grad: Tensor) -> None: ...


def tell_sums(leaf: Tensor, sums: Sums) -> None:
    """Let reductions in graphs find the sums of the parameter that they read through ``leaf``."""
    setattr(leaf, _SUMS, ref(sums))


def expect_sums(place: object) -> None:
    """Let reductions in graphs look for sums from now on, for as long as ``place`` is there."""
    _expected.add(place)


def with_sums(grads: Sequence[Tensor], bucket: ReductionBucket) -> Sequence[Tensor]:
    """Return unsharded gradients with the sums of those that no backward has reduced, which are forgotten."""
    if not (sums := _to_take()):
        return grads
    pairs = zip(bucket.params, grads, strict=True)
    return [sums[param.name].with_sum(grad) if param.name in sums else grad for param, grad in pairs]


def keep(grad: Tensor, leaf: Tensor | None, name: str) -> None:
    """Add an unsharded gradient to the sum of a parameter, given the leaf that stands for it among equal names."""
    if (found := _in_backward()) is None:
        return
    sums = found.get(name) or getattr(leaf, _SUMS, lambda: None)()
    if sums is None:
        raise FSDPError(
            f"{name}: it is unknown where its gradients are summed up: another parameter of the graph has that name, "
            "and hooks on saved tensors have copied what tells them apart; compile the models one by one"
        )
    sums.keep(grad)


def partial_sums(bucket: ReductionBucket) -> list[Tensor | None]:
    """Return, and forget, for each parameter the sum of gradients that are reduced over the shards only."""
    sums = _to_take()
    return [sums[param.name].take_partial() if param.name in sums else None for param in bucket.params]


def _to_take() -> Mapping[str, Sums]:
    """Return the sums that reductions of the running backward take along."""
    return (_in_backward() if _expected else None) or {}


def _in_backward() -> Mapping[str, Sums] | None:
    """Return the sums that the running backward may take, found once for each of its nodes; None if it drops all.

    One that was given ``inputs``, as by ``torch.autograd.grad``, drops the gradients of parameters.
    """
    if (node := backend.autograd_node()) is None:
        return {}
    if getattr(node, _SUMS, (None,))[0] != backward_task():
        setattr(node, _SUMS, (backward_task(), _by_name(node)))
    return getattr(node, _SUMS)[1]  # type: ignore[no-any-return]


def _by_name(node: Any) -> Mapping[str, Sums] | None:
    """Return those that a node leads to, but for equal names; None if the backward does not go there."""
    leaves = [each for each, _ in node.next_functions if hasattr(getattr(each, "variable", None), _SUMS)]
    if leaves and not backend.will_run(leaves[0]):
        return None
    found = {sums for each in leaves if (sums := getattr(each.variable, _SUMS)()) is not None}
    often = Counter(sums.name for sums in found)
    return WeakValueDictionary({sums.name: sums for sums in found if often[sums.name] == 1})
