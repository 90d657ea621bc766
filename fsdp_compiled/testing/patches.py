"""Putting a test's own function where the library calls a collective, or hooks an operation of a unit.

Each context manager takes the function to call instead and gives the original. It affects this process only; where
ranks are threads each rank enters it and sees its own function alone, and all wait for each other on entry and exit.
Compiled graphs call the same collectives; of the operations of a unit they run only the reshard at a step's end and
the reduction of gradients accumulated without sync.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import backend
from ..hooks import backward, group
from ..hooks.state import FSDPState
from .threads import ranks_are_threads

Place = tuple[Any, str]  # object, attribute
_setting = threading.Lock()  # of a place, among ranks that are threads


@contextmanager
def patch_all_gather(new_all_gather_into_tensor: Callable[..., Any]) -> Iterator[Any]:
    """Replace ``fsdp_compiled.collectives.backend.all_gather``, by which hooks and graphs all-gather.

    Meanwhile parameters that are gathered each into place in one launch are all-gathered by a call each.

    Args:
        new_all_gather_into_tensor: ``(output, input, group) -> Work``: input ``[n]`` of any dtype, perhaps a part of
            output ``[group size * n]``.
    """
    with (
        replaced([(backend, "all_gather_coalesced")], _all_gather_one_by_one),
        replaced([(backend, "all_gather")], new_all_gather_into_tensor) as original,
    ):
        yield original


def _all_gather_one_by_one(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    works = [backend.all_gather(out, each, group) for out, each in zip(outputs, inputs, strict=True)]
    for work in works:
        work.wait()
    return works[-1]


def patch_reduce_scatter(new_reduce_scatter_tensor: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace ``fsdp_compiled.collectives.backend.reduce_scatter``, by which hooks and graphs reduce over shards.

    Args:
        new_reduce_scatter_tensor: ``(output, input, group, op) -> Work``: output ``[n]`` and input
            ``[group size * n]`` in the reduce dtype, op a ``ReduceOp``.
    """
    return replaced([(backend, "reduce_scatter")], new_reduce_scatter_tensor)


def patch_all_reduce(new_all_reduce: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace ``fsdp_compiled.collectives.backend.all_reduce``, by which hooks and graphs reduce over replicas.

    Args:
        new_all_reduce: ``(tensor, group, op) -> Work``, which reduces tensor ``[n]`` in place.
    """
    return replaced([(backend, "all_reduce")], new_all_reduce)


def patch_foreach_all_gather(new_foreach_all_gather: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace the launch of a param group's all-gather in hooks.

    Args:
        new_foreach_all_gather: takes and returns what ``fsdp_compiled.collectives.launch_all_gather`` does: shards,
            their bucket, and a function that allocates the outputs; returns the work under way.
    """
    return replaced([(group, "launch_all_gather")], new_foreach_all_gather)


def patch_foreach_reduce(new_foreach_reduce: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace the launch of a param group's reduction in hooks.

    Args:
        new_foreach_reduce: takes and returns what ``fsdp_compiled.collectives.launch_reduction`` does: unsharded
            gradients, their bucket, and partial gradients to add; returns the work under way.
    """
    return replaced([(group, "launch_reduction")], new_foreach_reduce)


def patch_unshard(new_unshard: Callable[..., None]) -> AbstractContextManager[Any]:
    """Replace the unshard of a unit in its hooks. Prefetches and ``FSDPModule.unshard`` do not come here.

    Args:
        new_unshard: ``(state) -> None`` with the unit's FSDPState. It is called for unsharded units too, where the
            original does nothing.
    """
    return replaced([(FSDPState, "unshard")], new_unshard)


def patch_reshard(new_reshard: Callable[..., None]) -> AbstractContextManager[Any]:
    """Replace the reshard of a unit, by hooks and by users.

    Args:
        new_reshard: ``(state) -> None`` with the unit's FSDPState. It is called for sharded units too, where the
            original does nothing.
    """
    return replaced([(FSDPState, "reshard")], new_reshard)


def patch_post_backward(new_post_backward: Callable[..., None]) -> AbstractContextManager[Any]:
    """Replace what a unit does once it has its gradients: reshard and start the reduction.

    Args:
        new_post_backward: ``(state) -> None`` with the unit's FSDPState.
    """
    return replaced([(FSDPState, "post_backward")], new_post_backward)


def patch_register_post_backward_hook_backward(new_backward: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace the backward of the autograd function that leads to ``post_backward``.

    Args:
        new_backward: ``(ctx, *grads) -> (None, *grads)``, with the gradients of a unit's inputs.
    """
    return replaced([(backward.PostBackward, "backward")], new_backward, as_attribute=staticmethod)


@contextmanager
def replaced(
    places: Sequence[Place], new: Callable[..., Any], as_attribute: Callable[[Any], Any] = lambda call: call
) -> Iterator[Any]:
    """Put ``new`` in all ``places`` and give what was in the first.

    Args:
        places: that hold the same function.
        new: called by this rank instead.
        as_attribute: makes what is stored from what is called.
    """
    before = [inspect.getattr_static(owner, name) for owner, name in places]
    original = getattr(*places[0])
    _meet()  # every rank has read what was there
    with _setting:
        for owner, name in places:
            setattr(owner, name, as_attribute(_for_this_rank(new, getattr(owner, name))))
    try:
        yield original
        _meet()  # no rank is inside any more
    finally:
        for (owner, name), attribute in zip(places, before, strict=True):
            setattr(owner, name, attribute)


def _meet() -> None:
    if ranks_are_threads():
        dist.barrier()


def _for_this_rank(new: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``new``, or where ranks are threads a function that is ``new`` for this one alone."""
    if not ranks_are_threads():
        return new
    mine = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == mine else others)(*args, **kwargs)

    return call
