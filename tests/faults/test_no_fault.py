"""Ranks that do the same, however varied: no mismatch is found, and the store rests once all is known."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import set_rank_agreement
from fsdp_compiled.agreement import ledger, peers
from fsdp_compiled.sharding.contract import Contract, ContractLine
from tests.faults.steps import (
    MODES,
    Model,
    Trainer,
    assert_all_refuse,
    compiled,
    trainer,
)
from tests.support.ranks import on_ranks


class CountingStore:
    """Counts what is asked of a store."""

    count: Counter[str] = Counter()

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name):
        CountingStore.count[name] += 1
        return getattr(self._store, name)


def _counted(group, store_of=peers.store_of):
    store = store_of(group)
    return None if store is None else CountingStore(store)


class Checkpointed(Model):
    """Every layer is computed again in backward."""

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False).tanh()
        return x


WINDOWS = 14  # in _varied, at most


def _exchanged():
    return sum(ledger.exchanged for ledger in ledger._ledgers.values() if ledger is not None)


def _varied(training, other):
    """Evaluate, train, accumulate without sync, and train another model in between."""
    with torch.no_grad():
        training.call(training.batch())
    training.step(0)
    training.model.set_requires_gradient_sync(False)
    training.call(training.batch(1)).sum().backward()
    training.model.set_requires_gradient_sync(True)
    training.step(1)
    other.step(2)
    training.step(3)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_the_store_rests_once_all_is_known(mode):
    with patch.object(peers, "store_of", _counted):
        training, other = trainer(mode), trainer(mode, Checkpointed(2))
        for _ in range(2):
            _varied(training, other)
        before = _exchanged()
        assert before > 0
        CountingStore.count.clear()
        for _ in range(2):
            _varied(training, other)
        assert CountingStore.count.keys() <= {"add", "check", "delete_key"}, CountingStore.count  # of the thread
        assert CountingStore.count.total() <= WINDOWS * 2 * 6, CountingStore.count
        assert _exchanged() == before
        torch.compiler.reset()
        training.call = compiled(training.model) if mode == "full" else training.model
        _varied(training, other)
        assert _exchanged() == before  # compiled anew it is the same


@on_ranks(2)
def test_a_model_that_runs_in_every_way():
    eager = trainer("eager")
    ways = [eager, Trainer(eager.model, compiled(eager.model)), Trainer(eager.model, compiled(eager.model))]
    for _ in range(2):
        for training in ways:
            training.step()
    known = _exchanged()
    for training in ways:
        training.step()
    assert _exchanged() == known


@on_ranks(2)
def test_a_model_that_is_computed_again_as_a_whole():
    training = trainer("eager")
    plain = trainer("eager")
    training.call = lambda x: checkpoint(training.model, x, use_reentrant=False)
    for number in range(3):
        assert training.step(number) == plain.step(number)
        assert not peers.current().report and not peers.failure()


@on_ranks(2)
def test_a_function_that_calls_the_model():
    training = trainer("eager")
    training.call = compiled(lambda x: training.model(x) + 1)
    assert [training.step(number) for number in range(2)]


def _compiles_long(graph, inputs):
    time.sleep(2 * ledger._ATTENTION_S)
    return graph


def _raise(grad):
    raise ZeroDivisionError


@on_ranks(2)
def test_a_rank_that_compiles_after_an_error_is_waited_for():
    """As where a function that holds the next step is compiled: no forward has begun meanwhile."""
    training = trainer("eager")
    training.model.blocks[2].weight.register_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        training.step()
    assert peers.current().report
    if dist.get_rank() == 0:
        torch.compile(torch.sin, backend=_compiles_long, fullgraph=True)(torch.ones(2))
    ledger.agree(Contract((ContractLine(dist.group.WORLD.group_name, "all-gather", "float32", ("weight",)),)))


@on_ranks(2, timeout_s=30)
def test_another_process_group_in_the_same_process():
    for mode in ("eager", "full"):
        trainer(mode).step()
    store, rank = dist.group.WORLD.get_group_store(), dist.get_rank()
    while not isinstance(store, dist.FileStore):
        store = store.underlying_store
    # Next to it, and as long: where a file is removed, a thread that compares waits for it and compares nothing else.
    method = f"file://{store.path}-again"
    dist.destroy_process_group()
    torch.compiler.reset()
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    for mode in ("eager", "full"):
        training = trainer(mode)
        training.step()
        assert peers.current() is not None
    training = trainer("eager")
    training.model.order = [1, 0, 2] if rank else [0, 2, 1]
    assert_all_refuse(training.step, "different collectives")


@on_ranks(2)
def test_turned_off_nothing_is_asked():
    CountingStore.count.clear()
    set_rank_agreement(False)
    try:
        with patch.object(peers, "store_of", _counted):
            for mode in MODES:
                trainer(mode).step()
        assert CountingStore.count == Counter()
    finally:
        set_rank_agreement()
