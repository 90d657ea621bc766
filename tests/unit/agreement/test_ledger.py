"""Ranks that agree: what they say when they differ, what they ask for, and what a graph carries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline

from fsdp_compiled import set_rank_agreement
from fsdp_compiled.agreement import ledger, mismatch, peers, tripwire
from fsdp_compiled.errors import RankFailureError, RankMismatchError
from fsdp_compiled.sharding.contract import Contract, ContractLine
from tests.support.until import until

FIRST = ContractLine("world", "all-gather", "sent as float32", ("a.weight float32[8, 8]", "a.bias float32[8]"))
SECOND = replace(FIRST, params=("b.weight float32[8, 8]", "b.bias float32[8]"))
SHORT = replace(FIRST, params=("a.weight float32[8, 8]",))
REDUCTION = replace(FIRST, kind="reduce-scatter", how="sent as float32 (sum, divided by 1 before and 2 after)")
BASIS = ("schedule: SchedulePolicy()", "cluster: CPU, 1 ranks on a node")


# ---- what they say ----


def _difference(ours, theirs, sides=([0], [1]), versions=("1", "1")):
    return mismatch.difference(sides, versions, (ours.encode(), theirs.encode()))


def _graph(*collectives, **changed):
    basis = dict(fact.split(": ", 1) for fact in BASIS) | changed
    return Contract(collectives, tuple(f"{name}: {value}" for name, value in basis.items()))


def test_another_layer():
    assert_expected_inline(
        _difference(Contract((FIRST,)), Contract((SECOND,)), sides=([0, 2, 3], [1])),
        """ranks were about to start different collectives: ranks 0, 2, 3: all-gather of a.weight float32[8, 8] and 1 more, sent as float32; rank 1: all-gather of b.weight float32[8, 8] and 1 more, sent as float32. Ranks took different paths through the program: look where they branch by rank or by data""",  # noqa: E501
    )


def test_another_kind_another_dtype_and_fewer_parameters():
    said = _difference(Contract((FIRST,)), Contract((REDUCTION,)))
    assert "rank 0: all-gather of a.weight" in said and "rank 1: reduce-scatter of a.weight" in said
    said = _difference(Contract((FIRST,)), Contract((replace(FIRST, how="sent as bfloat16"),)))
    assert "rank 0: all-gather of a.weight float32[8, 8] and 1 more, sent as float32; rank 1: " in said
    assert "and 1 more, sent as bfloat16" in said
    said = _difference(Contract((FIRST,)), Contract((SHORT,)))
    expected = "rank 0: all-gather of 2 parameters, the last a.bias float32[8]; rank 1: all-gather of 1 parameter"
    assert expected in said


def test_a_graph_with_more_collectives():
    said = _difference(_graph(FIRST, SECOND), _graph(FIRST))
    both = "rank 0: all-gather of b.weight float32[8, 8] and 1 more, sent as float32; rank 1: none"
    assert f"different collectives: {both} (collective 2 of a graph). " in said
    assert said.endswith("Ranks compiled different code: look where the model branches by rank or by data")


def test_the_first_parameter_that_differs_is_named():
    first, second = (replace(FIRST, params=("a", "b", each)) for each in ("c", "d"))
    assert "rank 0: all-gather of c, sent as float32; rank 1: all-gather of d," in _difference(
        _graph(first), _graph(second)
    )


@pytest.mark.parametrize(
    ("fact", "other", "advice"),
    [
        ("schedule", "SchedulePolicy(prefetch=2)", "they compile with different SchedulePolicy objects: give the same one on every rank (rank 0: SchedulePolicy(); rank 1: SchedulePolicy(prefetch=2))"),  # noqa: E501
        ("cluster", "CPU, 2 ranks on a node", "they estimate for different machines: give all ranks the same SchedulePolicy(cluster=...) (rank 0: CPU, 1 ranks on a node; rank 1: CPU, 2 ranks on a node)"),  # noqa: E501
    ],
)  # fmt: skip
def test_why_schedules_differ(fact, other, advice):
    assert _difference(_graph(FIRST), _graph(SECOND, **{fact: other})).endswith(f"Likely {advice}")


def test_one_compiles_and_the_other_does_not():
    advice = "runs a compiled graph where others do not; compile on every rank or on none"
    assert _difference(_graph(FIRST, SECOND), Contract((FIRST,))).endswith(f"rank 0 {advice}")
    assert _difference(Contract((FIRST,)), _graph(FIRST, SECOND)).endswith(f"rank 1 {advice}")


def test_other_versions_come_before_other_collectives():
    assert_expected_inline(
        _difference(Contract((FIRST,)), Contract((SECOND,)), versions=("fsdp_compiled 1, torch 2", "torch 3")),
        """ranks run other versions: rank 0: fsdp_compiled 1, torch 2; rank 1: torch 3; install one on all""",
    )
    posts = ('{"collectives":[],"basis":[]}', '{"a field of another version":1}')
    assert mismatch.difference(([0], [1]), ("1", "2"), posts).startswith("ranks run other versions: ")


def test_the_same_collective_after_others():
    assert_expected_inline(
        _difference(Contract((FIRST,)), Contract((FIRST,))),
        """rank 0 and rank 1 came to all-gather of a.weight float32[8, 8] and 1 more, sent as float32 after different collectives; an error or a branch that only some ranks took came before""",  # noqa: E501
    )


# ---- ledgers: threads stand for ranks ----


class _CountingStore(dist.Store):
    """Counts what is asked of a store."""

    def __init__(self, store):
        super().__init__()
        self.inner, self.count = store, Counter()

    def __getattribute__(self, name):
        own = {"inner", "count", "__class__", "__init__"}
        if name in own:
            return super().__getattribute__(name)
        self.count[name] += 1
        return getattr(self.inner, name)


def _ledgers(world, deadline_s=20.0):
    """One ledger for each of ``world`` ranks, over one store."""
    store = _CountingStore(dist.HashStore())
    return [ledger.Ledger(store, rank, tuple(range(world)), timedelta(seconds=deadline_s)) for rank in range(world)]


def _enter(ledgers, *contracts):
    """Let each rank enter its contract at once; return what each raised, or None."""

    def one(ledger, contract):
        try:
            ledger.enter(contract)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ledgers)) as pool:
        return list(pool.map(one, ledgers, contracts * len(ledgers) if len(contracts) == 1 else contracts))


A, B, C = (Contract((each,)) for each in (FIRST, SECOND, REDUCTION))


def test_one_exchange_for_each_new_transition_and_none_for_known_ones():
    ledgers = _ledgers(2)
    for contract in (A, B, C, A, B, C, A, B):
        assert _enter(ledgers, contract) == [None, None]
    assert [ledger.exchanged for ledger in ledgers] == [4, 4]  # A, A to B, B to C, C to A
    count = ledgers[0].store.count
    before = count["set"], count["get"]
    for contract in (C, A, B, C):
        assert _enter(ledgers, contract) == [None, None]
    assert (count["set"], count["get"]) == before


def test_the_store_keeps_two_exchanges():
    ledgers = _ledgers(3)  # nothing comes twice, so that no window ends
    for number in range(20):
        assert _enter(ledgers, Contract((replace(FIRST, params=(str(number),)),))) == [None] * 3
    assert ledgers[0].store.inner.num_keys() <= 2 * (2 * 3 + 2)


def test_all_ranks_say_the_same_of_one_that_differs():
    ledgers = _ledgers(4)
    assert _enter(ledgers, A) == [None] * 4
    errors = _enter(ledgers, B, B, C, B)
    assert {type(error) for error in errors} == {RankMismatchError}
    (said,) = set(map(str, errors))
    assert "ranks 0, 1, 3: all-gather of b.weight" in said and "rank 2: reduce-scatter of a.weight" in said
    assert _enter(ledgers, B) == [None] * 4  # they may go on from where they were


def test_the_same_after_different_collectives():
    ledgers = _ledgers(2)
    ledgers[1].previous = "another"
    assert all("after different collectives" in str(error) for error in _enter(ledgers, A))


def test_a_rank_that_does_not_come(monkeypatch):
    monkeypatch.setattr(ledger, "_ATTENTION_S", 0.05)
    monkeypatch.setattr(tripwire, "last_runs", lambda ranks: mismatch.last_runs(dict.fromkeys(ranks, "that")))
    first, second = _ledgers(2)
    assert _enter((first, second), A) == [None, None]
    first.timeout = timedelta(seconds=0.3)
    with pytest.raises(RankMismatchError) as caught:
        first.enter(B)
    assert_expected_inline(
        str(caught.value),
        """rank 1 neither came to all-gather of b.weight float32[8, 8] and 1 more, sent as float32 nor compiled in 0.27 s. What ran last: rank 1: that. Look there for another path through the program or an error, or allow more time by set_rank_agreement(deadline=)""",  # noqa: E501
    )
    with pytest.raises(RankMismatchError, match="rank 1 neither came"):
        second.enter(C)  # it comes late, and must not go on alone
    first.timeout = timedelta(seconds=20)
    assert _enter((first, second), C) == [None, None]


def test_what_ran_last():
    assert mismatch.last_runs({3: "", 5: ""}) == ""
    assert (
        mismatch.last_runs({3: "this", 5: "", 6: "that", 7: "this"})
        == "What ran last: ranks 3, 7: this; rank 5: nothing that others know of; rank 6: that"
    )


def test_time_does_not_count_while_the_other_compiles(monkeypatch):
    monkeypatch.setattr(ledger, "_ATTENTION_S", 0.05)
    beats = iter(range(1, 9))  # the first is new when it is asked for, however late
    monkeypatch.setattr(peers, "beats", lambda rank: next(beats, 8))
    first, second = _ledgers(2, deadline_s=0.3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.enter, A)
        assert waiting.exception(timeout=20).args[0].startswith("rank 1 neither came")
        assert next(beats, None) is None  # all beats were seen before time was up
        assert second.exchanged == 0


def test_a_rank_that_has_failed(monkeypatch):
    monkeypatch.setattr(ledger, "_ATTENTION_S", 0.05)
    monkeypatch.setattr(peers, "failure", lambda awaited: f"rank {awaited[0]} raised ValueError: no")
    first, second = _ledgers(2)
    message = "^rank 1 raised ValueError: no; others waited for it before all-gather of a.weight"
    with pytest.raises(RankFailureError, match=message):
        first.enter(A)
    with pytest.raises(RankFailureError, match=message):
        second.enter(A)


def test_a_rank_that_is_interrupted_as_it_waits_spoils_the_exchange(monkeypatch):
    def interrupt(awaited):
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger, "_ATTENTION_S", 0.05)
    first, second = _ledgers(2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(peers, "failure", interrupt)
        first.enter(A)
    with pytest.raises(RankFailureError, match="^rank 0 raised KeyboardInterrupt and left$"):
        second.enter(A)
    assert _enter((first, second), A) == [None, None]


def test_the_last_rank_is_interrupted_before_it_decides(monkeypatch):
    monkeypatch.setattr(ledger, "_ATTENTION_S", 0.05)
    first, second = _ledgers(2)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.enter, A)
        assert until(lambda: first.store.check([f"{ledger._KEY}/0/digest/0", f"{ledger._KEY}/0/arrived"]))
        patch.setattr(second, "_verdict", lambda prefix: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            second.enter(A)
        waiting.result(timeout=20)


def test_what_a_rank_posts_is_read_back_as_it_was():
    post = _graph(FIRST, SECOND)
    assert Contract.decode(post.encode()) == post


# ---- arguments ----


@pytest.fixture
def setting():
    before = ledger.setting()
    yield
    set_rank_agreement(before.enabled, deadline=before.deadline)


@pytest.mark.usefixtures("setting")
def test_arguments():
    with pytest.raises(TypeError, match="^enabled: expected a bool, got 1 of int$"):
        set_rank_agreement(1)
    with pytest.raises(TypeError, match="^deadline: expected a timedelta or None, got 5 of int$"):
        set_rank_agreement(deadline=5)
    with pytest.raises(ValueError, match="^deadline: expected a positive time, got 0:00:00$"):
        set_rank_agreement(deadline=timedelta(0))
    assert ledger.setting() == ledger.ComparisonSetting(True, None)
    set_rank_agreement(False, deadline=timedelta(seconds=3))
    assert ledger.setting() == ledger.ComparisonSetting(False, timedelta(seconds=3))
    set_rank_agreement()
    assert ledger.setting() == ledger.ComparisonSetting()


@pytest.mark.usefixtures("setting")
def test_the_deadline_goes_before_the_groups_timeout(monkeypatch):
    set_rank_agreement(deadline=timedelta(seconds=0.1))
    first, _ = _ledgers(2, deadline_s=600)
    with pytest.raises(RankMismatchError, match="in 0.1 s"):
        first.enter(A)


@pytest.mark.usefixtures("setting", "fake_group")
def test_turned_off_it_does_not_look_for_a_group():
    other = Contract((replace(FIRST, group="there is none"),))
    with pytest.raises(Exception, match="there is none"):
        ledger.agree(other)
    set_rank_agreement(False)
    ledger.agree(other)


# ---- processes ----


def test_a_process_that_has_ended():
    ours = peers._process()
    if not ours:
        pytest.skip("the system does not tell of processes")
    machine, number, start = ours.rsplit(" ", 2)
    assert not peers._has_ended(ours)
    assert peers._has_ended(f"{machine} {number} {int(start) + 1}")  # another process has its number now
    assert peers._has_ended(f"{machine} {2**22 + 1} {start}")
    with subprocess.Popen(["sleep", "60"]) as killed:
        state = peers._state(killed.pid)
        assert not peers._has_ended(f"{machine} {killed.pid} {state[1]}")
        killed.kill()
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        assert peers._has_ended(f"{machine} {killed.pid} {state[1]}")  # though its parent has not asked for it
    assert not peers._has_ended(f"another {machine.split()[1]} {2**22 + 1} {start}")  # of another machine


# ---- what a process has told as a rank of a default group ----


@pytest.fixture
def store(fake_group, monkeypatch):
    monkeypatch.setattr(peers, "store_of", lambda group, stores={}: stores.setdefault(group, dist.HashStore()))
    peers.register_callbacks()
    return peers.current().store


def test_a_report_stands_until_it_is_withdrawn(store):
    for number in (1, 2):
        peers.report_failure(ValueError("no"))
        peers.report_failure(ValueError("no again"))
        assert store.get(f"fsdp_compiled/failures/{number}") == b"rank 0 raised ValueError: no again"
        assert peers.failure(()) == ""  # of others
        peers.register_callbacks()  # as the next forward does
        assert store.get(f"fsdp_compiled/failures/{number}") == b""
    store.set("fsdp_compiled/failures/1", "rank 1 raised ValueError: no")
    assert peers.failure(()) == "rank 1 raised ValueError: no"


def test_a_forked_child_tells_nothing_and_withdraws_nothing(store, monkeypatch):
    peers.report_failure(ValueError("no"))
    keys = store.num_keys()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 0)
        assert peers.current() is None and peers.failure() == ""
        peers.register_callbacks()
        peers.report_failure(ValueError("of a child"))
        peers.publish("fsdp_compiled/last", "something")
    assert store.get("fsdp_compiled/failures/1") == b"rank 0 raised ValueError: no"
    assert store.num_keys() == keys


def test_a_default_group_that_is_created_anew_starts_with_nothing(store):
    peers.report_failure(ValueError("no"))
    first = peers.current()
    world = dist.get_world_size()
    dist.destroy_process_group()
    assert peers.current() is None and peers.failure() == ""
    dist.init_process_group("fake", rank=0, world_size=world)
    assert peers.current() is None
    peers.register_callbacks()
    assert peers.current() is not first and not peers.current().report and peers.current().store is not store


def test_a_rank_that_compiles_says_so_until_it_ends(store, monkeypatch):
    monkeypatch.setattr(peers, "_BEAT_S", 0.01)
    peers._begin_beats()
    compiling = peers.current().compiling
    peers._begin_beats()  # of a compilation within
    assert peers.current().compiling is compiling
    assert until(lambda: peers.beats(0))  # a store's wait does not see what is added
    peers._end_beats()
    assert compiling.is_set() and peers.current().compiling is None and peers.beats(0) > 0


_EXITING = """
import atexit, threading, time
left = lambda: [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
atexit.register(lambda: print(left()))  # what is registered first is called last
import torch.distributed as dist
from fsdp_compiled.agreement import peers

class Slow(dist.HashStore):
    def add(self, key, count):
        time.sleep(1.0)
        return super().add(key, count)

dist.init_process_group("fake", rank=0, world_size=2)
peers._peers[dist.group.WORLD] = peers.Peers(Slow(), 0, 2, peers.os.getpid())
peers._BEAT_S = 0.0
peers._begin_beats()
time.sleep(0.1)
assert left() == ["fsdp_compiled/compiling"]
"""


def test_a_rank_that_ends_while_it_compiles_leaves_no_thread_in_the_store():
    ended = subprocess.run([sys.executable, "-c", _EXITING], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


# ---- the graph's contract ----


def test_what_a_contract_was_decided_from_is_not_compared():
    assert _graph(FIRST).digest == _graph(FIRST, schedule="another").digest == Contract((FIRST,)).digest
    assert len({Contract(each).digest for each in ((FIRST,), (SECOND,), (FIRST, SECOND), (SECOND, FIRST))}) == 4
    assert Contract.unpack(_graph(FIRST).pack()) == _graph(FIRST)


def test_each_group_agrees_on_its_own_collectives():
    other = replace(FIRST, group="replicas", kind="all-reduce")
    parts = _graph(FIRST, other, SECOND).by_group
    assert {name: part.collectives for name, part in parts.items()} == {
        "world": (FIRST, SECOND),
        "replicas": (other,),
    }
    assert {part.basis for part in parts.values()} == {BASIS}
