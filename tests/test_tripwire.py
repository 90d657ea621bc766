"""Windows of what ranks run: where they end, what is added to the store for each, and what ranks say that differ."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline

from fsdp_compiled.collectives import tripwire
from fsdp_compiled.errors import RankMismatchError
from fsdp_compiled.sharding.contract import Collective, Contract

CONTRACTS = {
    name: Contract((Collective("world", "all-gather", "sent as float32", (f"{name}.weight float32[8, 8]",)),))
    for name in "abcdefgh"
}


@pytest.fixture
def ended(monkeypatch):
    """The windows that each rank has ended and not reported; no thread reports them."""
    windows = defaultdict(list)
    monkeypatch.setattr(tripwire._reporter, "put", lambda wire, entries: windows[wire].append(entries))
    monkeypatch.setattr(tripwire._reporter, "watch", lambda wire: None)
    return windows


def _wires(world):
    store = dist.HashStore()
    return [tripwire.Tripwire(store, rank, tuple(range(world))) for rank in range(world)]


def _run(wire, text):
    for name in text:
        wire.add(CONTRACTS[name])


def _report(ended, *wires, until_all_have=True):
    """Let threads report what each rank has ended, and look until all others have."""

    def follow(wire):
        wire.follow(ended.pop(wire, []))
        while wire.pending and until_all_have:
            wire.follow(())

    with ThreadPoolExecutor(len(wires)) as pool:
        list(pool.map(follow, wires))


@pytest.mark.parametrize(
    ("ran", "windows"),
    [
        ("abcabcab", "abc abc"),  # before what comes again, and as soon as a window is known
        ("abcbabcbab", "abc ba bc ba"),
        ("aaaa", "a a a a"),
        ("abcdefgh", ""),
        ("ababcdabcd", "ab ab cdab"),
    ],
)
def test_where_windows_end(ended, ran, windows):
    (wire,) = _wires(1)
    _run(wire, ran)
    names = {contract.digest: name for name, contract in CONTRACTS.items()}
    assert " ".join("".join(names[entry.key] for entry in window) for window in ended[wire]) == windows


def test_ranks_that_run_the_same_find_no_difference_and_leave_little(ended):
    wires = _wires(4)
    for _ in range(tripwire._KEPT + 50):
        for wire in wires:
            _run(wire, "abc")
        _report(ended, *wires)
        assert not any(wire.pending or wire.differs or wire._kept for wire in wires)
    assert wires[0].store.num_keys() <= tripwire._KEPT + 1


def test_all_ranks_say_where_they_part(ended):
    wires = _wires(4)
    for wire in wires:
        _run(wire, "abcdabcd")
    _report(ended, *wires)
    for rank, wire in enumerate(wires):
        _run(wire, "abefabcd" if rank == 2 else "abcdabcd")
    _report(ended, *wires)
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


def test_equal_collectives_of_different_models(ended):
    wires = _wires(2)
    for number in range(4):
        for wire in wires:
            models = "yx" if number == 2 and wire.rank else "xy"
            for model in models:
                wire.notes["call"] = f", in forward of {model}"
                _run(wire, "a")
        _report(ended, *wires, until_all_have=number != 2)  # another window ends when something comes again
        assert all(wire.differs == (number == 3) for wire in wires)
    with pytest.raises(
        RankMismatchError, match="rank 0: all-gather of a.*, in forward of x; rank 1: .* forward of y"
    ):
        wires[1].check()


def test_a_rank_that_is_behind_skips_windows_and_still_finds_a_difference(ended):
    ahead, behind = _wires(2)
    for _ in range(8):
        _run(ahead, "ab")
        _report(ended, ahead, until_all_have=False)
        _run(behind, "ab")
    _report(ended, behind, until_all_have=False)
    for _ in range(8):
        _report(ended, ahead, until_all_have=False)
    assert not ahead.pending and not ahead.differs and not behind.differs
    _run(behind, "ac")
    for _ in range(9):
        _run(ahead, "ab")
        _report(ended, ahead, until_all_have=False)
        _run(behind, "ab")
    with ThreadPoolExecutor(1) as pool:
        reporting = pool.submit(_report, ended, behind, until_all_have=False)
        while not ahead.differs:
            _report(ended, ahead, until_all_have=False)
        reporting.result()
    assert behind.differs


def test_memory_is_bounded_while_another_rank_does_not_come(ended):
    wire, _ = _wires(2)
    for number in range(3 * tripwire._KEPT):
        _run(wire, "abc" if number % 2 else "acb")
        _report(ended, wire, until_all_have=False)
    assert len(wire._kept) <= tripwire._KEPT and len(wire.pending) <= tripwire._KEPT
    assert wire.store.num_keys() <= tripwire._KEPT + 1
    assert len(wire._known) <= tripwire._KNOWN


def test_a_store_whose_host_has_ended(ended):
    def add(key, value):
        raise RuntimeError("Broken pipe")

    (wire,) = _wires(1)
    wire.store, wire.rank = type("Store", (), {"add": staticmethod(add)})(), 1
    _run(wire, "abab")
    _report(ended, wire, until_all_have=False)
    wire.check()


@pytest.mark.parametrize("world", [1, 2, 3, 64, 1000, 2**16])
def test_a_sum_has_room_for_all_ranks(ended, world):
    added = []
    wire = tripwire.Tripwire(None, 1, tuple(range(world)))
    wire.store = type("Store", (), {"add": lambda self, key, value: added.append(value) or value})()
    for _ in range(50):
        _run(wire, "ab")
        wire.follow(ended.pop(wire, []))
    assert len(set(added)) > 40
    assert all(value * world < 2**63 for value in added)
    assert all(
        divmod(value * world, 2 ** (tripwire._BITS - world.bit_length()))[0] == world for value in added if value
    )
