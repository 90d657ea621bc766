"""Compares what the ranks of a group have run while they go on: no training thread waits for another rank.

The sequence of what a group runs is divided into windows. A window ends before something comes in it twice and, at
once, when it equals an earlier window. Both follow from the sequence alone, so ranks that run the same end the same
windows, one or two in a training step. A thread adds a digest of each window and of all before it to a key of the
group's store; when all ranks have added theirs, the sum shows each of them whether they are equal. It must not know
process groups, nor what starts a collective.
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
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import NamedTuple
from weakref import ref

import torch.distributed as dist
from torch._C._distributed_c10d import Store  # see peers.py

from ..errors import RankMismatchError
from ..sharding.contract import Contract
from . import mismatch, peers

_KEY = "fsdp_compiled/windows"
_LAST = "fsdp_compiled/last"
_PAUSE_S = 0.002  # between two reports, at least
_PAUSE_PER_RANK_S = 1e-4  # or so much per rank of the group, which limits the load of the store's host
_IDLE_S = 1.0
_SETTLE_S = 5.0  # how long a rank that has found a difference waits for the records of the others
_LOOKED_AT = 64  # ranks, after a collective has failed: all would be too many for the store's host
_KNOWN = 1024  # different windows that are recognized
_KEPT = 256  # windows that a rank remembers, and that the store keeps
_BITS = 62  # of a sum: the upper ones count ranks


class Entry(NamedTuple):
    """What a rank ran, on one group, and what it noted since the entry before."""

    key: str  # equal for equal entries
    contract: Contract
    noted: str


@dataclass(eq=False)
class Tripwire:
    """What this rank has run on one group. :meth:`add` and :meth:`check` belong to the training thread."""

    store: Store
    rank: int  # of this process in the group
    ranks: tuple[int, ...]  # of the group, by their numbers in the default group
    differs: bool = False  # a window does; the text follows as soon as the others' records are there
    is_raised: bool = False
    pending: dict[int, int] = field(default_factory=dict)  # this rank's shares of sums that others may lack in
    process: int = field(default_factory=os.getpid)  # a forked child does not report for its parent
    world: int = field(default_factory=lambda: id(dist.group.WORLD))
    notes: dict[str, str] = field(default_factory=dict)  # by kind, of the next entry
    _entries: list[Entry] = field(default_factory=list)  # of the window that has not ended
    _seen: set[str] = field(default_factory=set)  # digests of those that must not come twice
    _count: int = 0  # of all entries so far
    _state: int = 0  # equal for windows that are equal so far, in this process
    _known: set[int] = field(default_factory=set)  # states at which windows have ended
    _chain: str = ""  # the digest of the last window and all before it
    _number: int = 0  # of the last window
    _kept: deque[list[Entry]] = field(default_factory=deque)  # the last windows that may differ
    _base: int = 0  # how many entries came before them
    _text: str = "ranks have run different collectives"
    _settled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        _reporter.watch(self)

    def add(self, contract: Contract) -> None:
        """Add what runs next, with what was noted before it."""
        noted = ""
        if self.notes:
            noted = "".join(self.notes.values())
            self.notes.clear()
        key = contract.digest + noted
        if key in self._seen:
            self._end()
        self._seen.add(key)
        entry = Entry(key, contract, noted)
        self._entries.append(entry)
        self._count += 1
        _reporter.last, _reporter.count, _reporter.world = entry, self._count, self.world
        self._state = hash((self._state, key))
        if self._state in self._known:
            self._end()

    def _end(self) -> None:
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known.add(self._state)
        _reporter.put(self, self._entries)
        self._entries, self._state = [], 0
        self._seen.clear()

    def check(self) -> None:
        """Raise RankMismatchError if another rank has run something else."""
        if self.differs:
            self._settled.wait(2 * _SETTLE_S)
            self.is_raised = True
            error = RankMismatchError(self._text)
            peers.report_failure(error)  # here, since an error in backward passes none of our frames
            raise error

    # ---- in the reporting thread ----

    def follow(self, windows: Sequence[list[Entry]]) -> None:
        """Look whether others have reported an earlier window; report new ones, or of many at once one at most."""
        with suppress(RuntimeError):  # the store's host has ended
            if self.pending:
                number = next(iter(self.pending))
                self._compare(number, self.pending.pop(number), 0)
            if not self.differs:
                self._report(windows)
            return
        self.pending.clear()

    def _report(self, windows: Sequence[list[Entry]]) -> None:
        stride = 1 << (len(windows) - 1).bit_length()  # a rank that is behind skips numbers, and alike in any case
        for entries in windows:
            self._number += 1
            self._chain = sha256("".join((self._chain, *(entry.key for entry in entries))).encode()).hexdigest()
            self._kept.append(entries)
            self._forget(len(self._kept) - _KEPT)
            if self._number % stride == 0:
                bits = len(self.ranks).bit_length()
                share = int(self._chain[:15], 16) >> 2 * bits  # _BITS - 2 * bits are left
                self._compare(self._number, share, share + (1 << _BITS - bits))
            if self.rank == 0:
                self.store.delete_key(f"{_KEY}/{self._number - _KEPT}")

    def _compare(self, number: int, share: int, added: int) -> None:
        total, world = self.store.add(f"{_KEY}/{number}", added), len(self.ranks)
        count, total = divmod(total, 1 << _BITS - world.bit_length())
        if count != world:
            self.pending[number] = share
        elif total == share * world:
            self.pending = {later: share for later, share in self.pending.items() if later > number}
            self._forget(len(self._kept) - (self._number - number))
        else:
            self.differs = True
            self.pending.clear()
            self._text = self._settle()
            self._settled.set()

    def _forget(self, count: int) -> None:
        for _ in range(count):
            self._base += len(self._kept.popleft())
        self.pending.pop(self._number - _KEPT, None)

    def _settle(self) -> str:
        """Tell the others what this rank has run since they were last found equal; return what all say of it."""
        entries = [entry for window in self._kept for entry in window]
        packed = {entry.key: (entry.contract.pack(), entry.noted) for entry in entries}
        record = {"base": self._base, "keys": [entry.key for entry in entries], "entries": packed}
        self.store.set(f"{_KEY}/record/{self.rank}", json.dumps(record))
        is_last = self.store.add(f"{_KEY}/records", 1) == len(self.ranks)
        deadline = time.monotonic() + _SETTLE_S
        while not self.store.check([f"{_KEY}/verdict"]):
            if is_last or time.monotonic() > deadline:
                self.store.compare_set(f"{_KEY}/verdict", "", mismatch.parted(self._records()))
            else:
                time.sleep(_PAUSE_S)
        return self.store.get(f"{_KEY}/verdict").decode()

    def _records(self) -> dict[int, mismatch.Record]:
        texts = _present(self.store, [f"{_KEY}/record/{rank}" for rank in range(len(self.ranks))])
        return {rank: json.loads(text) for rank, text in zip(self.ranks, texts, strict=True) if text}


class _Reporter:
    """A thread that reports the windows of all groups of this process."""

    last: Entry | None = None  # what ran last on any group
    count = 0  # how much ran on that group before and with it
    world = 0  # the default group then
    _process = 0  # that the thread runs in; a forked child has none, and must not use these locks
    _wires: tuple[ref[Tripwire], ...] = ()  # replaced, not changed: both threads read it

    def watch(self, wire: Tripwire) -> None:
        """Report the windows of ``wire`` as long as it lives."""
        if self._process != os.getpid():
            self._start()
        self._wires = (*map(ref, self.alive()), ref(wire))

    def _start(self) -> None:
        self._queue: SimpleQueue[tuple[Tripwire, list[Entry]] | None] = SimpleQueue()
        self._wires, self._process, self.last = (), os.getpid(), None
        self._told: Entry | None = None
        self._thread = threading.Thread(target=self._run, name="fsdp_compiled windows", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def alive(self) -> list[Tripwire]:
        return [wire for each in self._wires if (wire := each()) is not None]

    def put(self, wire: Tripwire, entries: list[Entry]) -> None:
        if wire.process == self._process == os.getpid():
            self._queue.put((wire, entries))

    def stop(self) -> None:
        """End the thread, before the interpreter ends what it uses."""
        if self._process == os.getpid():
            self._queue.put(None)
            self._thread.join(_SETTLE_S)  # else it might die inside the store, which ends the process

    def _run(self) -> None:
        pause: float | None = _IDLE_S
        while pause is not None:
            pause = self._follow(pause)

    def _follow(self, pause: float) -> float | None:
        """Wait for windows, report them and look at earlier ones; return how long to wait for the next."""
        windows: dict[Tripwire, list[list[Entry]]] = {}
        with suppress(Empty):
            item = self._queue.get(timeout=pause)
            while item is not None:
                windows.setdefault(item[0], []).append(item[1])
                item = self._queue.get_nowait()
            return None
        wires = self.alive()
        for wire in wires:
            wire.follow(windows.get(wire, ()))
        if not windows and pause == _IDLE_S and self.last is not self._told:
            self.tell()
        shortest = max([_PAUSE_S, *(_PAUSE_PER_RANK_S * len(wire.ranks) for wire in wires)])
        if windows:
            time.sleep(shortest)
        if not any(wire.pending for wire in wires):
            return _IDLE_S
        return shortest if windows else min(2 * pause, _IDLE_S)

    def tell(self) -> None:
        """Let others know what ran last here, should a collective not end."""
        self._told = last = self.last
        if last is not None and self.world == id(dist.group.WORLD):
            peers.publish(_LAST, f"{mismatch.described(last.contract)}, number {self.count} on its group")


_reporter = _Reporter()


def check() -> None:
    """Raise RankMismatchError if ranks of a group have run something else, and no one has raised that yet."""
    for wire in _reporter.alive():
        if not wire.is_raised:
            wire.check()


def last_runs() -> str:
    """Return what the first ranks of the default group have run last, as far as they have said; "" if unknown."""
    with suppress(RuntimeError, ValueError):  # the store's host has ended
        store = peers.world_store() if _reporter.last else None
        if store is not None:
            _reporter.tell()
            ranks = range(min(dist.get_world_size(), _LOOKED_AT))
            return mismatch.last_runs(_present(store, [f"{_LAST}/{rank}" for rank in ranks]))
    return ""


def _present(store: Store, keys: list[str]) -> list[str]:
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]
