"""Replaces PyTorch's ``fully_shard`` by ours in every module that has imported it by that name, and puts it back.

Libraries import it at the top of a module or when they shard a model. Nothing else needs a replacement: our modules
are instances of PyTorch's ``FSDPModule``, its policies are taken as they are, and its
``register_fsdp_forward_method``, ``share_comm_ctx`` and ``fully_shard.state`` work on our modules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from threading import Lock
from types import ModuleType
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from .. import api

_theirs = torch_fsdp.fully_shard
_here: ContextVar[bool] = ContextVar("as_torch_fsdp", default=False)  # whether the caller is within a block


class _Switch:
    """Stands for PyTorch's function in all modules that have it as long as someone uses it."""

    def __init__(self) -> None:
        self._lock = Lock()  # around what changes the users and the modules
        self.blocks = 0  # of as_torch_fsdp that have begun and not ended
        self.is_for_all = False  # between enable() and disable()
        update_wrapper(self, _theirs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Shard a module by our function where the switch is on for the caller, and by PyTorch's elsewhere."""
        shard: Any = api.fully_shard if self.is_for_all or _here.get() else _theirs
        return shard(*args, **kwargs)

    def __reduce__(self) -> str:
        """Copy and pickle by name, as the function does."""
        return _theirs.__name__

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Let the block change who uses it, then put it into those modules or take it out."""
        with self._lock:
            yield
            old, new = (_theirs, self) if self.blocks or self.is_for_all else (self, _theirs)
            for module in [each for each in list(sys.modules.values()) if issubclass(type(each), ModuleType)]:
                names = object.__getattribute__(module, "__dict__")  # does not load one that waits for its first use
                if names.get("fully_shard") is old:  # not what someone else put there
                    names["fully_shard"] = new


_switch = _Switch()


def enable() -> None:
    """Let ``torch.distributed.fsdp.fully_shard`` be ours in all threads, until :func:`disable`.

    Use :func:`as_torch_fsdp` where a block of code can be given. A second call does nothing.
    """
    with _switch.changed():
        _switch.is_for_all = True


def disable() -> None:
    """End what :func:`enable` began, if it did. Blocks of :func:`as_torch_fsdp` under way are not affected."""
    with _switch.changed():
        _switch.is_for_all = False


@contextmanager
def as_torch_fsdp() -> Iterator[None]:
    """Let ``torch.distributed.fsdp.fully_shard`` be ours within the block, or the decorated function.

    For libraries that call it for you: ``Trainer`` and ``Accelerator`` with FSDP version 2, TRL, Lightning,
    torchtitan, torchtune, OLMo-core, verl, and ``from_pretrained`` with a ``distributed_config``. It counts for this
    thread alone; :func:`enable` is for all. Blocks may be nested. Modules that were sharded inside stay ours outside.
    Code that imported the function under another name before the block keeps PyTorch's; what was imported inside is
    PyTorch's again outside.
    """
    with _switch.changed():
        _switch.blocks += 1
    before = _here.get()
    _here.set(True)
    try:
        yield
    finally:
        _here.set(before)
        with _switch.changed():
            _switch.blocks -= 1
