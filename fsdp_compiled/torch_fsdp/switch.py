"""PyTorch's name ``fully_shard``, made to mean ours: the only name in PyTorch's modules that this library replaces.

Libraries such as accelerate import ``torch.distributed.fsdp.fully_shard`` when they shard a model. Nothing else needs
a replacement: our modules are instances of PyTorch's ``FSDPModule``, its policies are taken as they are, and its
``register_fsdp_forward_method``, ``share_comm_ctx`` and ``fully_shard.state`` work on our modules. What is put in
place of the name knows who uses it; it must not know how a module is sharded. What
sharding a model puts into torch is listed in ``installed.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from threading import Lock
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from .. import api

# Where libraries look the function up, or import it from, when they shard a model; the last has imported it before.
# Checked on torch 2.11.0, 2.13.0 and 2.15.0, and transformers 5.23.0.
_PLACES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp", "transformers.distributed.fsdp")

_theirs = torch_fsdp.fully_shard
_lock = Lock()  # around what changes a replacement
_here: ContextVar[bool] = ContextVar("as_torch_fsdp", default=False)  # whether the caller is within a block


class _Replacement:
    """Stands for PyTorch's function in its modules as long as someone uses it; it is made for the first who does."""

    def __init__(self) -> None:
        self.blocks = 0  # of as_torch_fsdp that have begun and not ended
        self.is_for_all = False  # between enable() and disable()
        update_wrapper(self, _theirs)
        _replace(_theirs, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Shard a module by our function where the switch is on for the caller, and by PyTorch's elsewhere."""
        placed = _placed() or self  # a library may have kept this one since a block that has ended
        shard: Any = api.fully_shard if placed.is_for_all or _here.get() else _theirs
        return shard(*args, **kwargs)

    def end_if_unused(self) -> None:
        """Put PyTorch's function back after the last user."""
        if not self.blocks and not self.is_for_all:
            _replace(self, _theirs)


def _placed() -> _Replacement | None:
    found = (getattr(sys.modules.get(place), "fully_shard", None) for place in _PLACES)
    return next((each for each in found if isinstance(each, _Replacement)), None)


def _replace(old: object, new: object) -> None:
    for place in _PLACES:
        module: Any = sys.modules.get(place)
        if module is not None and getattr(module, "fully_shard", None) is old:  # not what someone else put there
            module.fully_shard = new


def enable() -> None:
    """Let ``torch.distributed.fsdp.fully_shard`` be ours in all threads, until :func:`disable`.

    Use :func:`as_torch_fsdp` where a block of code can be given. A second call does nothing.
    """
    with _lock:
        (_placed() or _Replacement()).is_for_all = True


def disable() -> None:
    """End what :func:`enable` began, if it did. Blocks of :func:`as_torch_fsdp` under way are not affected."""
    with _lock:
        if placed := _placed():
            placed.is_for_all = False
            placed.end_if_unused()


@contextmanager
def as_torch_fsdp() -> Iterator[None]:
    """Let ``torch.distributed.fsdp.fully_shard`` be ours within the block, or the decorated function.

    For libraries that call it for you: ``Trainer`` and ``Accelerator`` with FSDP version 2, TRL, Lightning, and
    ``from_pretrained`` with a ``distributed_config``. It counts for this thread alone; :func:`enable` is for all.
    Blocks may be nested. Modules that were sharded inside stay ours outside. Other code that imported the name before
    the block keeps the function that it has; a function that was imported inside is PyTorch's again outside.
    """
    with _lock:
        placed = _placed() or _Replacement()
        placed.blocks += 1
    before = _here.get()
    _here.set(True)
    try:
        yield
    finally:
        _here.set(before)
        with _lock:
            placed.blocks -= 1
            placed.end_if_unused()
