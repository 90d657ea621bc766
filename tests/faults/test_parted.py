"""Ranks that part, each going on with what all of them know: all of them say so by the end of the following step."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_compiled.agreement import ledger, peers, tripwire
from fsdp_compiled.errors import RankFailureError, RankMismatchError
from fsdp_compiled.testing.processes import Setting
from tests.faults.steps import WIDTH, Model
from tests.support.ranks import on_ranks, pool
from tests.support.training import shard
from tests.support.until import until
from tests.support.variants import thorough

MODES = ("eager", "full", "regions")
PARTS_IN = 4  # the step in which the last rank does something else
PARTED = "Ranks took different paths through the program: look where they branch by rank or by data. What ran since"


class _Training:
    """Models of equal shapes and names, each with its optimizer."""

    def __init__(self, mode, count=1, layers=3):
        models = [Model(layers) for _ in range(count)]
        self.calls = [shard(model, mode) for model in models]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def backward(self, number):
        self.calls[number](torch.ones(2, WIDTH)).square().mean().backward()

    def evaluate(self, number):
        with torch.no_grad():
            self.calls[number](torch.ones(2, WIDTH))

    def update(self, number):
        self.optimizers[number].step()
        self.optimizers[number].zero_grad()


def _is_odd():
    return dist.get_rank() == dist.get_world_size() - 1


def _assert_same(text):
    """Compare through the store: a collective might pair with one that another rank has started alone."""
    store, ranks = dist.group.WORLD.get_group_store(), range(dist.get_world_size())
    store.set(f"said/{dist.get_rank()}", text)
    assert {store.get(f"said/{rank}").decode() for rank in ranks} == {text}


@contextmanager
def _long_steps():
    """Let each collective begin, as in training, when the thread that compares has reported the window that it ends.

    Of windows that are reported together not each is compared.
    """
    add, follow, ended, reported = tripwire.Tripwire.add, tripwire.Tripwire.follow, Counter(), Counter()

    def added(wire, contract):
        before = wire._window
        add(wire, contract)
        ended[wire] += wire._window is not before
        assert until(lambda: reported[wire] == ended[wire] or wire.differs)

    def followed(wire, windows):
        answers = follow(wire, windows)
        reported[wire] += len(windows)
        return answers

    with mock.patch.multiple(tripwire.Tripwire, add=added, follow=followed):
        yield


def _assert_all_raise_in_time(step, *texts):
    """Every rank raises the same RankMismatchError, in the step in which one parts or in the one after."""
    with _long_steps():
        for number in range(PARTS_IN):
            step(number)
        with pytest.raises(RankMismatchError) as caught:
            step(PARTS_IN)
            step(PARTS_IN + 1)
    _assert_same(str(caught.value))
    for text in (*texts, PARTED):
        assert text in str(caught.value), str(caught.value)


def _another_model_first(mode):
    training = _Training(mode, count=2)

    def step(number):
        for model in (1, 0) if _is_odd() and number == PARTS_IN else (0, 1):
            training.backward(model)
            training.update(model)

    others = "rank 0" if dist.get_world_size() == 2 else "ranks 0, 1, 2"
    first = "bias" if mode in ("full", "regions") else "weight"  # graphs order what one node reads by name
    _assert_all_raise_in_time(
        step,
        f"{others}: all-gather of blocks.0.{first}",
        ", in forward of Model (unit 4)",
        ", in forward of Model (unit 8)",
    )


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, timeout_s=30)
def test_another_model_first(mode):
    _another_model_first(mode)


@pytest.mark.parametrize("mode", MODES)
@thorough(when=lambda mode: mode == "full")
@on_ranks(4, timeout_s=30)
def test_another_model_first_on_4_ranks(mode):
    _another_model_first(mode)


def _a_call_skipped_and_made_later(mode):
    training = _Training(mode)

    def step(number):
        calls = 3
        if _is_odd():
            calls += {PARTS_IN: -1, PARTS_IN + 1: 1}.get(number, 0)
        for _ in range(calls):
            training.backward(0)
        training.update(0)

    _assert_all_raise_in_time(step, "after an optimizer's step")


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, timeout_s=30)
def test_a_call_skipped_and_made_later(mode):
    _a_call_skipped_and_made_later(mode)


@pytest.mark.parametrize("mode", MODES)
@thorough(when=lambda mode: mode == "full")
@on_ranks(4, timeout_s=30)
def test_a_call_skipped_and_made_later_on_4_ranks(mode):
    _a_call_skipped_and_made_later(mode)


# ---- a rank that does not come ----


@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2, timeout_s=5)
def test_a_collective_that_times_out_names_what_each_rank_ran_last(mode):
    training = _Training(mode)
    for _ in range(PARTS_IN):
        training.backward(0)
        training.update(0)
    store = dist.group.WORLD.get_group_store()
    if _is_odd():
        store.wait(["ended"])  # it does something else, and its training thread cannot answer
        return
    with pytest.raises(RankFailureError) as caught:
        training.backward(0)
    store.set("ended", "")
    said = str(caught.value)
    assert said.startswith("a collective failed: ") and "imed out" in said, said
    told = r"\. What ran last: rank 0: all-gather of blocks.0.*, number (\d+) on .*; rank 1: .*, number (\d+) "
    ours, theirs = map(int, re.search(told, said).groups())
    assert ours == theirs + 1, said


# ---- a process group after another ----


@_long_steps()
def _part_at_the_end(rank):
    training = _Training("eager", layers=1)  # an evaluation is one collective
    for _ in range(PARTS_IN):
        training.backward(0)
        training.update(0)
        for _ in range(3):
            training.evaluate(0)
    if rank == 0:
        training.update(0)
    training.evaluate(0)
    wire = ledger._ledgers[dist.group.WORLD].wire
    if rank == 0:  # it ends the window that differs, once the other, a window ahead, waits in the last collective
        assert until(lambda: wire.store.add(f"{tripwire._KEY}/{wire._number + 2}", 0))
    training.evaluate(0)
    assert until(lambda: wire.differs) and wire._settled.wait(10)  # all have heard of it


def _train(rank):
    training = _Training("eager", layers=1)
    for _ in range(PARTS_IN):
        training.backward(0)
        training.update(0)


def test_what_differed_in_one_process_group_is_not_raised_in_the_next():
    setting = Setting(group_timeout=timedelta(seconds=30))
    pool().run(2, _part_at_the_end, setting)
    pool().run(2, _train, setting)


# ---- a forked child ----


@on_ranks(2, timeout_s=30)
def test_a_forked_child_that_dies_says_nothing_for_its_parent():
    training = _Training("eager")
    training.backward(0)
    if _is_odd():
        child = os.fork()
        if not child:
            peers.register_callbacks()  # as a forward does
            sys.excepthook(ValueError, ValueError("of a child"), None)
            peers._report("raised an error in backward")
            os._exit(threading.active_count() > 1 or peers.current() is not None)
        assert os.waitpid(child, 0)[1] == 0
    dist.barrier()
    assert peers.failure() == ""
    for _ in range(PARTS_IN):
        training.backward(0)
        training.update(0)
    assert peers.current() is not None
