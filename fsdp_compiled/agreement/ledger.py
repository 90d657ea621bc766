"""Ranks agree on what they are about to start before they start it, through the store of the process group.

Each new pair of what runs successively on a group, graphs or single collectives of hooks, is compared once by all
ranks of that group: each posts a digest, the last to arrive compares and posts the verdict. A collective would do for
that only if ranks agreed already. The steady state looks one pair up, and a thread compares afterwards what ran (see
:mod:`tripwire`).
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from ..errors import RankFailureError, RankMismatchError
from ..expect import expect, unexpected
from ..passes.inductor import source_hash
from ..sharding.contract import Contract
from ..sharding.dtensor import process_group
from . import mismatch, peers, tripwire

_KEY = "fsdp_compiled/agreement"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.1  # between two polls of the store
_ATTENTION_S = 1.0  # how often a rank that waits asks whether others compile or have failed
_ASKED_FOR = 8  # of the ranks waited for, at a time: all of them would be too many for the store's host
AFTER_A_STEP = ", after an optimizer's step"  # a note
_AGREED, _DIFFER, _FAILED = "agreed", "differ", "failed"  # verdicts; the last two with a text


@dataclass(frozen=True)
class ComparisonSetting:
    """Whether ranks agree, and how long one waits for another that neither comes nor compiles."""

    enabled: bool = True
    deadline: timedelta | None = None  # None: a little less than the process group's timeout


# By torch.distributed itself, which outlives each process group.
_settings: WeakKeyDictionary[ModuleType, ComparisonSetting] = WeakKeyDictionary()


def setting() -> ComparisonSetting:
    return _settings.get(dist, ComparisonSetting())


def set_rank_agreement(enabled: bool = True, *, deadline: timedelta | None = None) -> None:
    """Let ranks agree on collectives before they start them, which they do by default, or not.

    Whatever runs for the first time is compared through the process group's store: every collective of an uncompiled
    model, and all collectives of a compiled graph together. Ranks that differ raise :class:`RankMismatchError`, which
    names the first difference, before anything is started. What has followed before is started at once and
    compared meanwhile: ranks that differ raise by the end of the following step. Call it alike on all ranks.

    Args:
        enabled: False never compares.
        deadline: how long a rank waits for one that does not come; while that one compiles, time does not count.
            None: nine tenths of the process group's timeout, so that others still learn of it.

    Raises:
        TypeError: not a bool, or not a timedelta.
        ValueError: ``deadline`` is not positive.
    """
    expect("enabled", enabled, bool, "a bool")
    expect("deadline", deadline, timedelta | None, "a timedelta or None")
    if deadline is not None and deadline <= timedelta(0):
        raise unexpected("deadline", "a positive time", str(deadline))
    _settings[dist] = ComparisonSetting(enabled, deadline)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def register_callbacks() -> None:
    """Register this process's failure callbacks; called when a model's forward begins."""
    if setting().enabled:
        peers.register_callbacks()


def agree(contract: Contract, anew: bool = False) -> None:
    """Return once all ranks of the contract's groups are known to be about to start the same.

    ``anew`` compares also what has followed the previous one before: where ranks that differ could not end well.

    Raises:
        RankMismatchError: ranks differ, or one did not come before the deadline.
        RankFailureError: a rank that did not come has failed.
    """
    if not setting().enabled:
        return
    peers.watch_backward(tripwire.check)
    for name, part in contract.by_group.items():
        if (ledger := _ledger(process_group(name))) is not None:
            ledger.enter(part, anew)


def note(mesh: DeviceMesh, kind: str, what: str) -> None:
    """Note what comes before the next collective of a mesh's groups: alike on all ranks that run the same."""
    for ledger in map(_ledgers.get, mesh.get_all_groups() if setting().enabled else ()):
        if ledger is not None:
            ledger.wire.notes[kind] = what


def number_in(mesh: DeviceMesh) -> int:
    """Return how often this was called for the mesh's last group: the same on all ranks that run the same."""
    return next(_numbers.setdefault(mesh.get_all_groups()[-1], count(1)))


@dataclass(eq=False)
class Ledger:
    """What the ranks of one process group have agreed on."""

    store: Store
    rank: int  # of this process in the group
    ranks: tuple[int, ...]  # of the group, by their numbers in the default group
    timeout: timedelta
    agreed: set[tuple[str, str]] = field(default_factory=set)  # digests of what may follow what
    previous: str = ""  # the digest of what ran last
    exchanged: int = 0

    def __post_init__(self) -> None:
        self.wire = tripwire.Tripwire(self.store, self.rank, self.ranks)

    def enter(self, contract: Contract, anew: bool = False) -> None:
        """Note that ``contract`` runs next; ask the other ranks if it has not followed the previous one before."""
        self.wire.check()
        if anew or (self.previous, contract.digest) not in self.agreed:
            self._ask(contract)
            self.agreed.add((self.previous, contract.digest))
        self.previous = contract.digest
        self.wire.add(contract)

    def _ask(self, contract: Contract) -> None:
        peers.withdraw_report()
        prefix, old = (f"{_KEY}/{self.exchanged - age}" for age in (0, 2))
        self.exchanged += 1
        self.store.set(f"{prefix}/post/{self.rank}", contract.encode())
        self.store.set(f"{prefix}/digest/{self.rank}", f"{contract.digest} {self.previous} {versions()}")
        if self.store.add(f"{prefix}/arrived", 1) == len(self.ranks):
            self._decide(prefix, *self._verdict(prefix))
        else:
            self._wait(prefix, contract)
        kind, _, text = self.store.get(f"{prefix}/verdict").decode().partition(" ")
        if kind != _AGREED:
            error = RankMismatchError(text) if kind == _DIFFER else RankFailureError(text)
            peers.report_failure(error)  # here, since an error in backward passes none of our frames
            raise error
        shared = ("arrived", "verdict") if self.rank == 0 else ()
        for name in (f"post/{self.rank}", f"digest/{self.rank}", *shared):
            self.store.delete_key(f"{old}/{name}")  # all ranks have come to a later one, so that nobody reads it

    def _decide(self, prefix: str, kind: str, text: str = "") -> None:
        self.store.compare_set(f"{prefix}/verdict", "", f"{kind} {text}")  # the first one counts, on all ranks

    def _verdict(self, prefix: str) -> tuple[str, str]:
        """Compare what all ranks have posted; tell whether they agree, or in what they do not."""
        digests = _values(self.store, [f"{prefix}/digest/{rank}" for rank in range(len(self.ranks))])
        odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if odd is None:
            return _AGREED, ""
        sides = [[self.ranks[r] for r, digest in enumerate(digests) if digest == digests[one]] for one in (0, odd)]
        posts = _values(self.store, [f"{prefix}/post/{rank}" for rank in (0, odd)])
        found = [digests[rank].split(" ", 2)[2] for rank in (0, odd)]
        return _DIFFER, mismatch.difference(sides, found, posts)

    def _wait(self, prefix: str, contract: Contract) -> None:
        """Return when there is a verdict; leave one for the others if interrupted."""
        allowed_s = (setting().deadline or self.timeout * 0.9).total_seconds()
        absent, beats, pause_s = list(range(len(self.ranks))), 0, _SHORTEST_PAUSE_S
        alive = asked = time.monotonic()
        try:
            # Store.wait would print a warning at every timeout, and hold off signal handlers until then.
            while not self.store.check([f"{prefix}/verdict"]):
                time.sleep(pause_s)
                pause_s, now = min(pause_s * 1.3, _LONGEST_PAUSE_S), time.monotonic()
                if now - asked < min(_ATTENTION_S, allowed_s):
                    continue
                before, first, asked = beats, absent[:_ASKED_FOR], now
                absent[:_ASKED_FOR] = [rank for rank in first if not self.store.check([f"{prefix}/digest/{rank}"])]
                beats = sum(peers.beats(self.ranks[rank]) for rank in absent[:_ASKED_FOR])
                alive = now if beats != before else alive  # one of them compiles
                self._judge(prefix, contract, [self.ranks[rank] for rank in absent], now - alive, allowed_s)
        except BaseException as error:
            with suppress(RuntimeError):  # the store's host may have ended
                self._decide(prefix, _FAILED, f"rank {self.ranks[self.rank]} raised {type(error).__name__} and left")
            raise

    def _judge(self, prefix: str, contract: Contract, absent: list[int], silent_s: float, allowed_s: float) -> None:
        """Decide if all ranks have come, if an absent one has failed, or if all absent ones are silent too long."""
        first = absent[:_ASKED_FOR]
        if not absent:
            self._decide(prefix, *self._verdict(prefix))  # the last one to come has not: it was interrupted
        elif failure := peers.failure(first):
            self._decide(prefix, _FAILED, f"{failure}; others waited for it before {mismatch.described(contract)}")
        elif silent_s > allowed_s:
            self._decide(prefix, _DIFFER, mismatch.absent(absent, contract, allowed_s, tripwire.last_runs(first)))


# By group, which owns its ledger; None stands for a group of this process alone.
_ledgers: WeakKeyDictionary[dist.ProcessGroup, Ledger | None] = WeakKeyDictionary()
_numbers: WeakKeyDictionary[dist.ProcessGroup, count[int]] = WeakKeyDictionary()  # by group, which owns its count


def _ledger(group: dist.ProcessGroup) -> Ledger | None:
    """Return the ledger of a group; None if no other process is in it."""
    if group not in _ledgers:
        store = peers.store_of(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        _ledgers[group] = None if store is None else Ledger(store, group.rank(), ranks, peers.timeout_of(group))
    return _ledgers[group]


def _values(store: Store, keys: list[str]) -> list[str]:
    extended = store.has_extended_api()  # type: ignore[attr-defined]
    return [value.decode() for value in (store.multi_get(keys) if extended else map(store.get, keys))]


@cache
def versions() -> str:
    """Return what must be the same on every rank whatever it runs: the library, by its source, and torch."""
    return f"fsdp_compiled {source_hash(Path(__file__).parents[1])[:12]}, torch {torch.__version__}"
