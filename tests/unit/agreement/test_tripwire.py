"""Windows of what ranks run: where they end, what is added to the store for each, and what ranks say that differ."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline

from fsdp_compiled.agreement import tripwire
from fsdp_compiled.errors import RankMismatchError
from fsdp_compiled.sharding.contract import Contract, ContractLine

CONTRACTS = {
    name: Contract((ContractLine("world", "all-gather", "sent as float32", (f"{name}.weight float32[8, 8]",)),))
    for name in "abcdefgh"
}


def _wires(world):
    """One for each rank, over one store; no thread reports what they have ended."""
    store = dist.HashStore()
    reporters = [SimpleNamespace(queue=SimpleQueue(), last=None, differing=[]) for _ in range(world)]
    return [tripwire.Tripwire(store, rank, tuple(range(world)), reporter=reporters[rank]) for rank in range(world)]


def _ended(wire):
    """Take the windows that a rank has ended and not reported."""
    return [wire.reporter.queue.get()[1] for _ in range(wire.reporter.queue.qsize())]


def _run(wire, text):
    for name in text:
        wire.add(CONTRACTS[name])


def _report(*wires):
    """Let threads report what each rank has ended, and look for records until all have."""
    reported = []

    def follow(wire):
        wire.follow(_ended(wire))
        reported.append(wire)
        while len(reported) < len(wires):
            wire.follow(())

    with ThreadPoolExecutor(len(wires)) as pool:
        list(pool.map(follow, wires))


@pytest.mark.parametrize(
    ("ran", "windows"),
    [
        ("abcabcab", "abca abca"),
        ("abcbabcbab", "abcb bab bcb bab"),
        ("aaaa", "aa aa aa"),
        ("abcdefgh", ""),
        ("ababcdabcd", "aba abcda"),
    ],
)
def test_where_windows_end(ran, windows):
    (wire,) = _wires(1)
    _run(wire, ran)
    names = {contract.digest: name for name, contract in CONTRACTS.items()}
    assert " ".join("".join(names[entry.key] for entry in window) for window in _ended(wire)) == windows


def test_ranks_that_run_the_same_find_no_difference_and_leave_little():
    wires = _wires(4)
    for _ in range(tripwire._KEPT_SUMS + 50):
        for wire in wires:
            _run(wire, "abc")
        _report(*wires)
        assert not any(wire.differs for wire in wires)
    assert wires[0].store.num_keys() <= tripwire._KEPT_SUMS + 1


def test_all_ranks_say_where_they_part():
    wires = _wires(4)
    for wire in wires:
        _run(wire, "abcdabcd")
    _report(*wires)
    for rank, wire in enumerate(wires):
        _run(wire, "abefabcd" if rank == 2 else "abcdabcd")
    for wire in wires:
        _run(wire, "a")
    _report(*wires)
    texts = set()
    for wire in wires:
        with pytest.raises(RankMismatchError) as caught:
            wire.check()
        texts.add(str(caught.value))
    (text,) = texts
    assert_expected_inline(
        text,
        """ranks have run different collectives after all-gather of b.weight float32[8, 8], sent as float32: ranks 0, 1, 3: all-gather of c.weight float32[8, 8], sent as float32; rank 2: all-gather of e.weight float32[8, 8], sent as float32. Ranks took different paths through the program: look where they branch by rank or by data. What ran since may have used wrong parameters: continue from a checkpoint""",  # noqa: E501
    )


def test_equal_collectives_of_different_models():
    wires = _wires(2)
    for number in range(4):
        for wire in wires:
            models = "yx" if number == 2 and wire.rank else "xy"
            for model in models:
                wire.notes["call"] = f", in forward of {model}"
                _run(wire, "a")
        _report(*wires)  # a window ends when something comes again
        assert all(wire.differs == (number >= 2) for wire in wires)
    with pytest.raises(
        RankMismatchError, match="rank 0: all-gather of a.*, in forward of x; rank 1: .* forward of y"
    ):
        wires[1].check()


def test_a_rank_that_is_behind_skips_sums_and_still_finds_a_difference():
    ahead, behind = _wires(2)
    for _ in range(8):
        _run(ahead, "ab")
        ahead.follow(_ended(ahead))
        _run(behind, "ab")
    behind.follow(_ended(behind))
    ahead.follow(())
    assert not ahead.differs and not behind.differs
    _run(behind, "ac")
    for _ in range(9):
        _run(ahead, "ab")
        ahead.follow(_ended(ahead))
        _run(behind, "ab")
    with ThreadPoolExecutor(1) as pool:
        reporting = pool.submit(behind.follow, _ended(behind))
        while not ahead.differs:
            ahead.follow(())
        reporting.result()
    assert behind.differs
    with pytest.raises(RankMismatchError, match="rank 0: all-gather of b.*; rank 1: all-gather of c"):
        ahead.check()


def test_memory_is_bounded_while_another_rank_does_not_come():
    wire, _ = _wires(2)
    for number in range(3 * tripwire._KEPT_ENTRIES):
        _run(wire, "abc" if number % 2 else "acb")
        wire.follow(_ended(wire))
    assert len(wire._ran) == tripwire._KEPT_ENTRIES
    assert wire.store.num_keys() <= tripwire._KEPT_SUMS + 1


def test_a_store_whose_host_has_ended():
    def add(key, value):
        raise RuntimeError("Broken pipe")

    (wire,) = _wires(1)
    wire.store, wire.rank = type("Store", (), {"add": staticmethod(add)})(), 1
    _run(wire, "abab")
    wire.follow(_ended(wire))
    wire.check()


class _Group:
    """Stands for a process group."""


def test_a_group_that_has_the_memory_of_an_earlier_one_is_another(monkeypatch):
    """Else a thread would ask the earlier one's store, which may take seconds to fail."""
    default = SimpleNamespace(WORLD=_Group())
    monkeypatch.setattr(tripwire.dist, "group", default)
    (wire,) = _wires(1)
    _run(wire, "a")
    address, default.WORLD = id(default.WORLD), None
    kept = []
    while id(group := _Group()) != address and len(kept) < 1000:
        kept.append(group)
    default.WORLD = group
    earlier = wire.world
    _run(wire, "b")
    assert wire.world != earlier


@pytest.mark.parametrize("world", [1, 2, 3, 64, 1000, 2**16])
def test_a_sum_has_room_for_all_ranks(world):
    added = []
    (wire,) = _wires(1)
    wire.ranks, wire.rank = tuple(range(world)), 1
    wire.store = SimpleNamespace(add=lambda key, value: added.append(value) or value, check=lambda keys: False)
    for _ in range(50):
        _run(wire, "ab")
        wire.follow(_ended(wire))
    assert len(set(added)) > 40
    assert all(value * world < 2**63 and value * world // tripwire._ONE_RANK == world for value in added)
