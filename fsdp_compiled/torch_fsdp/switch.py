"""PyTorch's name ``fully_shard``, made to mean ours within a block, or from ``enable`` to ``disable``.

Libraries such as accelerate import ``torch.distributed.fsdp.fully_shard`` when they shard a model. Nothing else needs
a replacement: our modules are instances of PyTorch's ``FSDPModule``, its policies are taken as they are, and its
``register_fsdp_forward_method``, ``share_comm_ctx`` and ``fully_shard.state`` work on our modules. What sharding a
model puts into torch is listed in ``installed.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from .. import api

# Where libraries look the function up, or import it from, when they shard a model; the last has imported it before.
# Checked on torch 2.11.0, 2.13.0 and 2.15.0, and transformers 5.23.0.
_PLACES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp", "transformers.distributed.fsdp")

_theirs = torch_fsdp.fully_shard
_lock = Lock()
_users = 0  # of the replaced name: blocks that have begun and not ended, and enable()
_everywhere = False
_here: ContextVar[bool] = ContextVar("as_torch_fsdp", default=False)


@wraps(_theirs)
def _fully_shard(*args: Any, **kwargs: Any) -> Any:
    """Shard by our function where the switch is on for the caller, and by PyTorch's elsewhere."""
    chosen: Callable[..., Any] = api.fully_shard if _everywhere or _here.get() else _theirs
    return chosen(*args, **kwargs)


def enable() -> None:
    """Let ``torch.distributed.fsdp.fully_shard`` be ours in all threads, until :func:`disable`.

    Use :func:`as_torch_fsdp` where a block of code can be given. A second call does nothing.
    """
    global _everywhere
    with _lock:
        if not _everywhere:
            _everywhere = True
            _use(+1)


def disable() -> None:
    """End what :func:`enable` began, if it did. Blocks of :func:`as_torch_fsdp` under way are not affected."""
    global _everywhere
    with _lock:
        if _everywhere:
            _everywhere = False
            _use(-1)


@contextmanager
def as_torch_fsdp() -> Iterator[None]:
    """Let ``torch.distributed.fsdp.fully_shard`` be ours within the block, or the decorated function.

    For libraries that call it for you: ``Trainer`` and ``Accelerator`` with FSDP version 2, TRL, Lightning, and
    ``from_pretrained`` with a ``distributed_config``. It counts for this thread alone; :func:`enable` is for all.
    Blocks may be nested. Modules that were sharded inside stay ours outside. Other code that imported the name before
    the block goes on with the function that it has; a function that was imported inside is PyTorch's again outside.
    """
    before = _here.get()
    with _lock:
        _use(+1)
    _here.set(True)
    try:
        yield
    finally:
        _here.set(before)
        with _lock:
            _use(-1)


def _use(change: int) -> None:
    """Count one user more or less; replace the name for the first one, and put PyTorch's back after the last."""
    global _users
    _users += change
    old, new = (_theirs, _fully_shard) if _users else (_fully_shard, _theirs)
    for place in _PLACES:
        module = sys.modules.get(place)
        if module is not None and getattr(module, "fully_shard", None) is old:  # not what someone else put there
            module.fully_shard = new  # type: ignore[attr-defined]
