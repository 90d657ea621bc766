"""What ranks know of each other beside collectives, through the store: that one compiles, has failed or has ended.

It knows the default process group's store; it must not know what ranks agree on.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._C._distributed_c10d import Store

from ..errors import RankFailureError

_WITHOUT_PEERS = ("fake", "threaded")  # backends whose ranks are all in this process
_BEAT_S = 0.5  # how often a rank that compiles says so
_BEATS = "fsdp_compiled/compiling"
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
    """Return the default group's store; None in a forked child, or if its ranks do not keep each other informed."""
    is_known = dist.group.WORLD is not None and _introduced.get(dist.group.WORLD) == os.getpid()
    return store_of(dist.group.WORLD) if is_known else None


def publish(prefix: str, text: str) -> None:
    """Set this rank's text under ``prefix`` in the default group's store, if there is one."""
    with suppress(RuntimeError, ValueError):  # the store's host has ended
        if (store := world_store()) is not None:
            store.set(f"{prefix}/{dist.get_rank()}", text)


def value(store: Store, key: str) -> str:
    """Return the text under a key; "" if there is none."""
    return store.get(key).decode() if store.check([key]) else ""


def register_callbacks() -> None:
    """Let other ranks hear from now on that this one fails, or that its process ends.

    Called by ``fully_shard``, and whenever a model's forward begins.
    """
    if getattr(sys.excepthook, "func", None) is not _report_uncaught:
        sys.excepthook = partial(_report_uncaught, sys.excepthook)
    if dist.group.WORLD is not None and dist.group.WORLD not in _introduced:
        _introduced[dist.group.WORLD] = os.getpid()
        if process := _process():  # nothing tells of processes of other machines
            publish(_PROCESS, process)
    go_on()


def restore_excepthook() -> None:
    """Let the interpreter print uncaught errors as before :func:`register_callbacks`, if nobody has come between."""
    if getattr(sys.excepthook, "func", None) is _report_uncaught:
        (sys.excepthook,) = sys.excepthook.args  # type: ignore[attr-defined]


# ---- compiling ----

_compiling: list[threading.Event] = []  # set when the compilation under way ends


def _begin(_: Any = None) -> None:
    store = world_store()
    if store is not None and not _compiling:
        _compiling.append(threading.Event())
        args = store, f"{_BEATS}/{dist.get_rank()}", _compiling[0]
        threading.Thread(target=_beat, args=args, name="fsdp_compiled beats", daemon=True).start()


def _beat(store: Store, key: str, ended: threading.Event) -> None:
    with suppress(RuntimeError):  # the store's host has ended
        while not ended.wait(_BEAT_S):
            store.add(key, 1)


def _end(_: Any = None) -> None:
    while _compiling:
        _compiling.pop().set()


callbacks = _begin, _end  # for torch to call when a compilation begins and ends


def beats(rank: int) -> int:
    """Return how often a rank, by its number in the default group, has said that it compiles."""
    store = world_store()
    return 0 if store is None else store.add(f"{_BEATS}/{rank}", 0)


# ---- failing ----


def _report_uncaught(before: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    report_failure(error)  # before the interpreter prints it
    before(kind, error, trace)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def report_failure(error: BaseException) -> None:
    """Let ranks that wait for this one know why it does not come, until it goes on."""
    if not isinstance(error, (SystemExit, RankFailureError)):
        _report(f"raised {type(error).__name__}: {error}")


def _report(what: str) -> None:
    with suppress(RuntimeError, ValueError):  # the store's host has ended
        if (store := world_store()) is not None:
            if not _reported:
                _reported.append(f"{_FAILURES}/{store.add(_FAILURES, 1)}")
            store.set(_reported[0], f"rank {dist.get_rank()} {what}")


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
            _report("raised an error in backward")  # which passes none of our frames; see report_failure


def watch_backward(at_end: Callable[[], None]) -> None:
    """Report it if the backward under way, if any, ends with an error; call ``at_end`` if it ends well."""
    # Checked on torch 2.11.0, 2.13.0 and 2.15.0.
    task = torch._C._current_graph_task_id()
    if task not in (-1, _Backward.task):
        torch.autograd.Variable._execution_engine.queue_callback(_Backward(task, at_end))


def failure(awaited: Iterable[int] | None = None) -> str:
    """Return the report of a rank that failed, or which of ``awaited``, by default of all, has ended; or ""."""
    with suppress(RuntimeError, ValueError):  # the store's host has ended
        if (store := world_store()) is not None:
            keys = (f"{_FAILURES}/{number + 1}" for number in range(store.add(_FAILURES, 0)))
            reports = (store.get(key).decode() for key in keys if key not in _reported)
            awaited = range(dist.get_world_size()) if awaited is None else awaited
            processes = ((rank, value(store, f"{_PROCESS}/{rank}")) for rank in awaited)
            ended = (f"the process of rank {rank} has ended" for rank, each in processes if _has_ended(each))
            return next(filter(None, chain(reports, ended)), "")
    return ""


# ---- ending ----


def _process() -> str:
    """Return this process's machine, number and start; "" where the system does not tell."""
    machine = _machine()
    return " ".join((*machine, str(os.getpid()), _state(os.getpid())[1])) if machine else ""


def _has_ended(process: str) -> bool:
    *machine, number, start = process.split() or ("", "")
    if not machine or machine != _machine():
        return False
    try:
        state, started = _state(int(number))
    except OSError:
        return True
    return state in "XZ" or started != start


def _machine() -> list[str]:
    """Return the machine's boot and its namespace of processes; nothing where the system does not tell."""
    with suppress(OSError):
        return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return []


def _state(number: int) -> tuple[str, str]:
    """Return a process's state, X or Z once it has ended, and when it started."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
