"""What ranks know of each other beside collectives, through the store: that one compiles, has failed or has ended.

It knows the default process group's store; it must not know what ranks agree on.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._C._distributed_c10d import Store
from torch._dynamo.callback import callback_handler

from ..errors import RankFailureError

_WITHOUT_PEERS = ("fake", "threaded")  # backends whose ranks are all in this process
_BEAT_S = 0.5  # how often a rank that compiles says so
_FAILURES = "fsdp_compiled/failures"
_PROCESS = "fsdp_compiled/process"

_reported: list[str] = []  # the key of the failure of this rank that still stands in the store
# By default group, the process that is this rank and that others can find; a forked child is not.
_introduced: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def store_of(group: dist.ProcessGroup | None) -> Store | None:
    """Return the store in which a group's ranks have their keys to themselves; None if no other process is in it."""
    if group is None or group.size() == 1 or dist.get_backend(group) in _WITHOUT_PEERS:
        return None
    return group.get_group_store()


def world_store() -> Store | None:
    """Return the default group's store; None if there is none, or if this process is a forked child of the rank's."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return None if group is None or _introduced.get(group, os.getpid()) != os.getpid() else store_of(group)


def publish(prefix: str, text: str) -> None:
    """Set this rank's text under ``prefix`` in the default group's store, if there is one."""
    with suppress(RuntimeError, ValueError):  # the store's host has ended
        store = world_store()
        if store is not None:
            store.set(f"{prefix}/{dist.get_rank()}", text)


def attend() -> None:
    """Keep other ranks informed from now on: while this one compiles, if it fails, and if its process ends.

    Called by ``fully_shard``, and whenever a model's forward begins, since ``torch.compiler.reset`` forgets who asked
    to know of compiling.
    """
    if _beats.begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_beats.begin)
        callback_handler.register_end_callback(_beats.end)
    if not isinstance(sys.excepthook, _ReportUncaught):
        sys.excepthook = _ReportUncaught(sys.excepthook)
    if dist.is_initialized() and dist.group.WORLD not in _introduced:
        _introduce()
    go_on()


def is_attending() -> bool:
    """Tell whether ranks of the default group keep each other informed."""
    return dist.is_initialized() and dist.group.WORLD is not None and _introduced.get(dist.group.WORLD) == os.getpid()


# ---- compiling ----


class _Beats:
    """Beats while this process compiles, on a thread of their own."""

    def __init__(self) -> None:
        self._ended: threading.Event | None = None  # set when the compilation under way ends

    def begin(self, _: Any = None) -> None:
        store = world_store()
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
    store = world_store()
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
    """Let ranks that wait for this one know why it does not come, until it goes on."""
    if not isinstance(error, (SystemExit, RankFailureError)):
        _report(f"raised {type(error).__name__}: {error}")


def _report(what: str) -> None:
    try:
        store = world_store()
        if store is None:
            return
        if not _reported:
            _reported.append(f"{_FAILURES}/{store.add(_FAILURES, 1)}")
        store.set(_reported[0], f"rank {dist.get_rank()} {what}")
    except (RuntimeError, ValueError):
        return  # the store's host has ended


def go_on() -> None:
    """Withdraw what this rank has reported: it comes after all."""
    store = world_store() if _reported else None
    while _reported:
        if store is not None:
            store.set(_reported[-1], "")
        _reported.pop()  # at last, or a report that an interrupt leaves would stay for good


class _Backward:
    """Queued as a callback of the backward under way: the engine calls it at the end, or drops it after an error."""

    task = -1  # the engine's number of the last backward that was watched
    _is_complete = False

    def __init__(self, task: int, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        _Backward.task = task

    def __call__(self) -> None:
        self._is_complete = True
        self._at_end()

    def __del__(self) -> None:
        if not self._is_complete and not sys.is_finalizing():
            _report("raised an error in backward")  # which passes none of our frames; see _ReportUncaught


def watch_backward(at_end: Callable[[], None]) -> None:
    """Report it if the backward under way, if any, ends with an error; call ``at_end`` if it ends well."""
    # Checked on torch 2.11.0, 2.13.0 and 2.15.0.
    task = torch._C._current_graph_task_id()
    if task not in (-1, _Backward.task):
        torch.autograd.Variable._execution_engine.queue_callback(_Backward(task, at_end))


def failure(awaited: Iterable[int] | None = None) -> str:
    """Return what the first other rank that failed, and did not go on, has reported; "" if none has.

    Else name one of the ``awaited`` ranks, by default of all, whose process has ended.
    """
    try:
        store = world_store()
        if store is None:
            return ""
        keys = (f"{_FAILURES}/{number + 1}" for number in range(store.add(_FAILURES, 0)))
        reports = (store.get(key).decode() for key in keys if key not in _reported)
        reported = next(filter(None, reports), "")
        awaited = range(dist.get_world_size()) if awaited is None else awaited
        return reported or next(
            (f"the process of rank {rank} has ended" for rank in awaited if _is_gone(store, rank)), ""
        )
    except (RuntimeError, ValueError):
        return ""


# ---- ending ----


def _introduce() -> None:
    """Let other ranks find this process, where the system says enough of it; nothing tells of other machines."""
    process = _process()
    if process:
        publish(_PROCESS, process)
    assert dist.group.WORLD is not None
    _introduced[dist.group.WORLD] = os.getpid()


def _is_gone(store: Store, rank: int) -> bool:
    key = f"{_PROCESS}/{rank}"
    return store.check([key]) and _has_ended(store.get(key).decode())


def _process() -> str:
    """Return the machine's boot, its namespace of processes, and this process's number and start; "" if unknown."""
    try:
        return " ".join((*_machine(), str(os.getpid()), _state(os.getpid())[1]))
    except OSError:
        return ""


def _has_ended(process: str) -> bool:
    *machine, number, start = process.split()
    try:
        if machine != _machine():
            return False
    except OSError:
        return False
    try:
        state, started = _state(int(number))
    except OSError:
        return True
    return state in "XZ" or started != start


def _machine() -> list[str]:
    return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]


def _state(number: int) -> tuple[str, str]:
    """Return a process's state, X or Z once it has ended, and when it started."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
