"""What ranks tell each other beside collectives, through the store: that one is compiling, that one has failed.

It knows the default process group's store; it must not know what ranks agree on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._C._distributed_c10d import Store
from torch._dynamo.callback import callback_handler

from ..errors import RankFailureError

_WITHOUT_PEERS = ("fake", "threaded")  # backends whose ranks are all in this process
_BEAT_S = 0.5  # how often a rank that compiles says so
_FAILURES = "fsdp_compiled/failures"

_reported: list[str] = []  # keys of the failures of this rank that still stand in the store


def store_of(group: dist.ProcessGroup | None) -> Store | None:
    """Return the store in which a group's ranks have their keys to themselves; None if no other process is in it."""
    if group is None or group.size() == 1 or dist.get_backend(group) in _WITHOUT_PEERS:
        return None
    return group.get_group_store()


def _world_store() -> Store | None:
    return store_of(dist.group.WORLD) if dist.is_initialized() else None


def attend() -> None:
    """Keep other ranks informed from now on: while this one compiles, and if it fails.

    Called whenever a model's forward begins, since ``torch.compiler.reset`` forgets who asked to know of compiling.
    """
    if _beats.begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_beats.begin)
        callback_handler.register_end_callback(_beats.end)
    if not isinstance(sys.excepthook, _ReportUncaught):
        sys.excepthook = _ReportUncaught(sys.excepthook)
    if _reported:
        _withdraw()


# ---- compiling ----


class _Beats:
    """Beats while this process compiles, on a thread of their own."""

    def __init__(self) -> None:
        self._ended: threading.Event | None = None  # set when the compilation under way ends

    def begin(self, _: Any = None) -> None:
        store = _world_store()
        if store is not None and self._ended is None:
            self._ended = threading.Event()
            args = store, _beat_key(dist.get_rank()), self._ended
            threading.Thread(target=_beat, args=args, name="fsdp_compiled beats", daemon=True).start()

    def end(self, _: Any = None) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.set()


def _beat_key(rank: int) -> str:
    return f"fsdp_compiled/compiling/{rank}"


def _beat(store: Store, key: str, ended: threading.Event) -> None:
    while not ended.wait(_BEAT_S):
        try:
            store.add(key, 1)
        except RuntimeError:
            return  # the store's host has ended


_beats = _Beats()


def beats(rank: int) -> int:
    """Return how often a rank, by its number in the default group, has said that it compiles."""
    store = _world_store()
    return 0 if store is None else store.add(_beat_key(rank), 0)


# ---- failing ----


class _ReportUncaught:
    """Reports an exception that ends the process, before the interpreter prints it."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        report_failure(error)
        self._before(kind, error, trace)


def report_failure(error: BaseException) -> None:
    """Let ranks that wait for this one know why it does not come, until its next forward begins."""
    if isinstance(error, (SystemExit, RankFailureError)) or _reported:
        return
    try:
        store = _world_store()
        if store is None:
            return
        key = f"{_FAILURES}/{store.add(_FAILURES, 1)}"
        store.set(key, f"rank {dist.get_rank()} raised {type(error).__name__}: {error}")
    except (RuntimeError, ValueError):
        return  # the store's host has ended
    _reported.append(key)


def _withdraw() -> None:
    store = _world_store()
    while _reported:
        key = _reported.pop()
        if store is not None:
            store.set(key, "")


def failure() -> str:
    """Return what the first rank that failed, and did not go on, has reported; "" if none has."""
    try:
        store = _world_store()
        if store is None:
            return ""
        reports = (store.get(f"{_FAILURES}/{number + 1}") for number in range(store.add(_FAILURES, 0)))
        return next((report.decode() for report in reports if report), "")
    except (RuntimeError, ValueError):
        return ""
