"""What ranks know of each other through the default group's store: that one compiles, has failed or has ended."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.utils.checkpoint import _StopRecomputationError  # checked on torch 2.11.0, 2.13.0 and 2.15.0

from ..errors import RankFailureError
from ..sharding.dtensor import store_of as store_of

_BEAT_S = 0.5  # how often a rank that compiles says so
_BEATS = "fsdp_compiled/compiling"  # also the name of the thread
SETTLE_S = 5.0  # how long one waits for a thread at the end of the process, and for other ranks after a mismatch
_FAILURES = "fsdp_compiled/failures"
_PROCESS = "fsdp_compiled/process"


@dataclass(eq=False)
class Peers:
    """What this process has told the other ranks of a default process group."""

    store: Store
    rank: int
    world: int
    process: int  # its number; a forked child, which has another, is not this rank
    report: str = ""  # the key of its failure, as long as that stands in the store
    compiling: threading.Event | None = None  # set when the compilation under way ends
    backward: int = -1  # the autograd engine's number of the last backward that was watched


# By default group, which owns the record: a group that is created anew starts with a new one.
_peers: WeakKeyDictionary[dist.ProcessGroup, Peers | None] = WeakKeyDictionary()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    # Checked on torch 2.11.0, 2.13.0 and 2.15.0.
    options = (getattr(group._get_backend(device), "options", None) for device in group._device_types)
    return next((each._timeout for each in options if each is not None), dist.default_pg_timeout)


def current() -> Peers | None:
    """Return the record of the default group; None in a forked child, or if its ranks do not inform each other."""
    group = dist.group.WORLD
    found = None if group is None else _peers.get(group)
    return found if found is not None and found.process == os.getpid() else None


def publish(prefix: str, text: str) -> None:
    """Set this rank's text under ``prefix`` in the default group's store, if there is one."""
    with suppress(RuntimeError):  # the store's host has ended
        if (here := current()) is not None:
            here.store.set(f"{prefix}/{here.rank}", text)


def value(store: Store, key: str) -> str:
    """Return the text under a key; "" if there is none."""
    return store.get(key).decode() if store.check([key]) else ""


def register_callbacks() -> None:
    """Tell other ranks from now on that this one fails or ends; called again whenever a model's forward begins."""
    if getattr(sys.excepthook, "func", None) is not _report_uncaught:
        sys.excepthook = partial(_report_uncaught, sys.excepthook)
    group = dist.group.WORLD
    if group is not None and group not in _peers:
        store = store_of(group)
        _peers[group] = None if store is None else Peers(store, group.rank(), group.size(), os.getpid())
        if process := _process():  # nothing tells of processes of other machines
            publish(_PROCESS, process)
    withdraw_report()


def restore_excepthook() -> None:
    """Let the interpreter print uncaught errors as before :func:`register_callbacks`, if nobody has come between."""
    if getattr(sys.excepthook, "func", None) is _report_uncaught:
        (sys.excepthook,) = sys.excepthook.args  # type: ignore[attr-defined]


def _begin_beats(_: Any = None) -> None:
    withdraw_report()
    here = current()
    if here is not None and here.compiling is None:
        here.compiling = threading.Event()
        args = here.store, f"{_BEATS}/{here.rank}", here.compiling
        threading.Thread(target=_beat, args=args, name=_BEATS, daemon=True).start()


def _beat(store: Store, key: str, ended: threading.Event) -> None:
    with suppress(RuntimeError):  # the store's host has ended
        while not ended.wait(_BEAT_S):
            store.add(key, 1)


def _end_beats(_: Any = None) -> None:
    here = current()
    if here is not None and here.compiling is not None:
        here.compiling.set()
        here.compiling = None


@atexit.register
def _join_beats() -> None:
    """Wait for what still says that this rank compiles: a thread that dies inside the store aborts the process."""
    _end_beats()
    for thread in threading.enumerate():
        if thread.name == _BEATS:
            thread.join(SETTLE_S)


callbacks = torch.compiler.disable(_begin_beats), torch.compiler.disable(_end_beats)  # as those of passes/log.py


def beats(rank: int) -> int:
    """Return how often a rank, by its number in the default group, has said that it compiles."""
    here = current()
    return 0 if here is None else here.store.add(f"{_BEATS}/{rank}", 0)


def _report_uncaught(before: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    report_failure(error)  # before the interpreter prints it
    before(kind, error, trace)


def is_failure(error: BaseException) -> bool:
    """Tell whether the step cannot go on; a checkpoint ends a recomputation that has all it needs by an error."""
    return not isinstance(error, _StopRecomputationError)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def report_failure(error: BaseException) -> None:
    """Tell ranks that wait for this one why it does not come, until it withdraws the report."""
    if not isinstance(error, (SystemExit, RankFailureError)):
        _report(f"raised {type(error).__name__}: {error}")


def _report(what: str) -> None:
    with suppress(RuntimeError):  # the store's host has ended
        if (here := current()) is not None:
            here.report = here.report or f"{_FAILURES}/{here.store.add(_FAILURES, 1)}"
            here.store.set(here.report, f"rank {here.rank} {what}")


def withdraw_report() -> None:
    """Withdraw what this rank has reported: it comes after all, or at least compiles."""
    with suppress(RuntimeError):  # the store's host has ended
        if (here := current()) is not None and here.report:
            here.store.set(here.report, "")
            here.report = ""  # at last, or a report that an interrupt leaves would stay for good


class _Backward:
    """Queued as a callback of the backward under way: the engine calls it at the end, or drops it after an error."""

    _is_complete = False

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end

    def __call__(self) -> None:
        self._is_complete = True
        self._at_end()

    def __del__(self) -> None:
        if not self._is_complete and not sys.is_finalizing():
            _report("raised an error in backward")  # which passes none of our frames; see report_failure


def backward_task() -> int:
    """Return the autograd engine's number of the backward that runs on this thread, -1 for none."""
    # Checked on torch 2.11.0, 2.13.0 and 2.15.0, as the next function.
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have the autograd engine call ``callback`` if the running backward ends well, which nothing public does.

    It holds ``callback`` until the backward ends, well or not.
    """
    torch.autograd.Variable._execution_engine.queue_callback(torch.compiler.disable(callback))


def watch_backward(at_end: Callable[[], None]) -> None:
    """Report it if the backward under way, if any, ends with an error; call ``at_end`` if it ends well."""
    here, task = current(), backward_task()
    if here is not None and task not in (-1, here.backward):
        here.backward = task
        at_end_of_backward(_Backward(at_end))


def failure(awaited: Iterable[int] | None = None) -> str:
    """Return the report of a rank that failed, or which of ``awaited``, by default of all, has ended; or ""."""
    with suppress(RuntimeError):  # the store's host has ended
        if (here := current()) is not None:
            keys = (f"{_FAILURES}/{number + 1}" for number in range(here.store.add(_FAILURES, 0)))
            reports = (here.store.get(key).decode() for key in keys if key != here.report)
            awaited = range(here.world) if awaited is None else awaited
            processes = ((rank, value(here.store, f"{_PROCESS}/{rank}")) for rank in awaited)
            ended = (f"the process of rank {rank} has ended" for rank, each in processes if _has_ended(each))
            return next(filter(None, chain(reports, ended)), "")
    return ""


def _process() -> str:
    """Return the machine's boot and namespace of processes, and this process's number and start; "" if unknown."""
    with suppress(OSError):  # the system does not tell
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_state(os.getpid())[1]}"
    return ""


def _has_ended(process: str) -> bool:
    theirs, ours = process.split(), _process().split()
    if not theirs or theirs[:2] != ours[:2]:  # of another machine
        return False
    try:
        state, started = _state(int(theirs[2]))
    except OSError:
        return True
    return state in "XZ" or started != theirs[3]


def _state(number: int) -> tuple[str, str]:
    """Return a process's state, X or Z once it has ended, and when it started."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
