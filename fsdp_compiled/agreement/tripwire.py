"""Compares what the ranks of a group have run while training continues: no training thread waits for another rank.

The sequence of what a group runs is divided into windows. What comes in a window for the second time ends it and
begins the next, so that ranks that run the same end the same windows, one or a few in a training step. At the end of
each, a thread adds a digest of all that ran so far to a key of the group's store. The last rank to add sees by the
sum whether all are equal. If not, it stores a record of what it ran; the others poll for records, and store theirs.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakSet, ref

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..errors import RankMismatchError
from ..sharding.contract import Contract
from . import mismatch, peers

_KEY = "fsdp_compiled/windows"
_LAST = "fsdp_compiled/last"
_PAUSE_S = 0.002  # between two reports, at least
_PAUSE_PER_RANK_S = 1e-4  # or so much per rank of the group, which limits the load of the store's host
_POLL_S = 0.032  # from a report to a poll for records, if no window ends meanwhile; polls wake up a core that trains
_IDLE_S = 1.0  # between two polls while nothing runs, at most
_ASKED_FOR = 64  # ranks, after a failure: all would be too many for the store's host
_KEPT_SUMS = 256  # in the store
_KEPT_ENTRIES = 1024  # that a rank remembers
_ONE_RANK = 1 << 44  # what a rank adds to a sum, with 28 bits of its digest; the sum of those stays below it


_DefaultGroup = ReferenceType[dist.ProcessGroup] | None  # not its id, which a later group may have


def _default_group() -> _DefaultGroup:
    group = dist.group.WORLD
    return None if group is None else ref(group)


class Entry(NamedTuple):
    """What a rank ran, on one group, and what it noted since the entry before."""

    key: str  # equal for equal entries
    contract: Contract
    noted: str
    number: int  # on this group, from 1
    world: _DefaultGroup  # the default group then


class _Reporter:
    """A thread that reports the windows of all groups of a process."""

    def __init__(self) -> None:
        self.last: Entry | None = None  # on any group
        self.differing: list[Tripwire] = []
        self._told: Entry | None = None
        self._next_s = 0.0  # when the next report may start
        self._wires: WeakSet[Tripwire] = WeakSet()  # only the thread reads and changes it
        self.queue: SimpleQueue[tuple[Tripwire, list[Entry]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fsdp_compiled windows", daemon=True)
        self._thread.start()
        # Else the thread might die inside the store, which ends the process. What is registered last is called first.
        atexit.register(self._thread.join, peers.SETTLE_S)
        atexit.register(self.queue.put, None)

    def _run(self) -> None:
        pause: float | None = _IDLE_S
        while pause is not None:
            pause = self._follow(pause)

    def _follow(self, pause: float) -> float | None:
        """Wait for windows, report them and poll for records; return how long to wait for the next windows."""
        windows: dict[Tripwire, list[list[Entry]]] = {}
        with suppress(Empty):
            item = self.queue.get(timeout=pause)
            time.sleep(max(0.0, self._next_s - time.monotonic()))
            while item is not None:
                windows.setdefault(item[0], []).append(item[1])
                item = self.queue.get_nowait()
            return None
        self._wires.update(windows)
        for wire in list(self._wires):
            # Of a destroyed group: its store may take seconds to fail, while those of others wait.
            if wire.world != _default_group() or not wire.follow(windows.get(wire, ())):
                self._wires.discard(wire)
        if windows:
            shortest = max(_PAUSE_S, *(_PAUSE_PER_RANK_S * len(wire.ranks) for wire in windows))
            self._next_s = time.monotonic() + shortest
            return _POLL_S
        if pause == _IDLE_S and self.last is not self._told:
            self.tell()
        return min(2 * pause, _IDLE_S)

    def tell(self) -> None:
        """Let others know what ran last here, should a collective not end."""
        self._told = last = self.last
        if last is not None and last.world == _default_group():
            peers.publish(_LAST, f"{mismatch.described(last.contract)}, number {last.number} on its group")


@cache
def _reporter(process: int) -> _Reporter:
    """Return the reporter of a process: a forked child has none of its parent's threads, and says nothing for it."""
    return _Reporter()


@dataclass(eq=False)
class Tripwire:
    """What this rank has run on one group. :meth:`add` and :meth:`check` belong to the training thread."""

    store: Store
    rank: int  # of this process in the group
    ranks: tuple[int, ...]  # of the group, by their numbers in the default group
    notes: dict[str, str] = field(default_factory=dict)  # by kind, of the next entry
    world: _DefaultGroup = None  # the default group when something was added last
    differs: bool = False  # a window does; the text follows as soon as the others' records are there
    reporter: _Reporter = field(default_factory=lambda: _reporter(os.getpid()))
    _count: int = 0  # of all entries
    _window: dict[str, Entry] = field(default_factory=dict)  # that has not ended
    _number: int = 0  # of the last window that has
    _ran: deque[Entry] = field(default_factory=lambda: deque(maxlen=_KEPT_ENTRIES))  # in windows that have
    _digest: Any = field(default_factory=sha256)  # of all entries in windows that have
    _text: str = "ranks have run different collectives"
    _settled: threading.Event = field(default_factory=threading.Event)

    def add(self, contract: Contract) -> None:
        """Add what runs next, with what was noted before it."""
        noted = "".join(self.notes.values())
        self.notes.clear()
        self._count += 1
        entry = Entry(contract.digest + noted, contract, noted, self._count, _default_group())
        if entry.key in self._window:
            self.reporter.queue.put((self, [*self._window.values(), entry]))
            self._window = {}
        self._window[entry.key] = entry
        self.reporter.last, self.world = entry, entry.world

    def check(self) -> None:
        """Raise RankMismatchError if another rank has run something else."""
        if self.differs:
            self._settled.wait(2 * peers.SETTLE_S)
            self.reporter.differing.clear()  # it is known: only what runs on this group raises again
            error = RankMismatchError(self._text)
            peers.report_failure(error)  # here, since an error in backward passes none of our frames
            raise error

    # ---- in the reporting thread ----

    def follow(self, windows: Sequence[list[Entry]]) -> bool:
        """Report windows that have ended and ask whether ranks differ; return False if the store does not answer."""
        stride = 1 << (len(windows) - 1).bit_length()  # of many at once it compares one, which others compare too
        with suppress(RuntimeError):  # the store's host has ended
            for window in () if self.differs else windows:
                self._number += 1
                if self._ran:
                    self._ran.pop()  # it is the first of this window too
                self._ran.extend(window)
                self._digest.update("".join(entry.key for entry in window).encode())
                if self._number % stride == 0:
                    added = _ONE_RANK + int(self._digest.hexdigest()[:7], 16)
                    total = self.store.add(f"{_KEY}/{self._number}", added)
                    if total // _ONE_RANK == len(self.ranks) and total != added * len(self.ranks):
                        self._settle()
                if self.rank == 0:
                    self.store.delete_key(f"{_KEY}/{self._number - _KEPT_SUMS}")
            if not self.differs and self.store.check([f"{_KEY}/records"]):
                self._settle()
            return True
        return False

    def _settle(self) -> None:
        """Tell the others what this rank has run; keep what all say of it."""
        self.reporter.differing.append(self)
        self.differs = True
        packed = {entry.key: (entry.contract.pack(), entry.noted) for entry in self._ran}
        record = {"base": self._ran[0].number - 1, "keys": [entry.key for entry in self._ran], "entries": packed}
        self.store.set(f"{_KEY}/record/{self.rank}", json.dumps(record))
        if self.store.add(f"{_KEY}/records", 1) < len(self.ranks):
            with suppress(dist.DistStoreError):  # others have not come: tell of those that have
                self.store.wait([f"{_KEY}/verdict"], timedelta(seconds=peers.SETTLE_S))
        if not self.store.check([f"{_KEY}/verdict"]):
            texts = {rank: peers.value(self.store, f"{_KEY}/record/{place}") for place, rank in enumerate(self.ranks)}
            records = {rank: json.loads(text) for rank, text in texts.items() if text}
            self.store.compare_set(f"{_KEY}/verdict", "", mismatch.parted(records))
        self._text = self.store.get(f"{_KEY}/verdict").decode()
        self._settled.set()


def check() -> None:
    """Raise RankMismatchError if ranks of a group have run something else, and no one has raised that yet."""
    differing = _reporter(os.getpid()).differing
    for wire in list(differing):
        if wire.world == _default_group():
            wire.check()
        else:
            differing.remove(wire)  # of a destroyed group: those of this one may run the same


def last_runs(ranks: Sequence[int] | None = None) -> str:
    """Return what the first of ``ranks``, by default of all, have run last; "" if none has said it."""
    with suppress(RuntimeError):  # the store's host has ended
        if (here := peers.current()) is not None:
            _reporter(os.getpid()).tell()
            ranks = range(here.world) if ranks is None else ranks
            texts = {rank: peers.value(here.store, f"{_LAST}/{rank}") for rank in ranks[:_ASKED_FOR]}
            return mismatch.last_runs(texts)
    return ""
