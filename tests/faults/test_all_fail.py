"""All ranks raise, time and again: training goes on as if nothing had been, and nothing is left."""

from __future__ import annotations

import gc
import resource
import threading

import pytest
import torch
import torch.distributed as dist

from fsdp_compiled.agreement import peers
from tests.faults import raising
from tests.faults.raising import RaisingModel, user_hook
from tests.faults.steps import trainer
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.training import assert_close, full_params

TIMES = 50
ERRORS = {
    "forward": ValueError("row 7 is empty"),
    "backward": ValueError("row 7 is empty"),
    "hook": ValueError("row 7 is empty"),
    "memory": torch.OutOfMemoryError("tried to allocate 2 GiB"),
    "interrupt": KeyboardInterrupt(),
}
PLACES = {"memory": "backward", "interrupt": "forward"}


def _rss_kib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 1024


def _fail(training, kind):
    raising.do[PLACES.get(kind, kind)] = raising.raising(ERRORS[kind])
    with pytest.raises(type(ERRORS[kind])):
        training.step()
    raising.do.clear()
    for param in training.model.parameters():
        param.grad = None


def _training(mode):
    model = RaisingModel()
    model.blocks[2].register_forward_hook(user_hook)
    return trainer(mode, model)


def _threads():
    """How many run, once those that beat while a model compiles have noticed that it does no longer."""
    for thread in threading.enumerate():
        if thread.name == "fsdp_compiled beats":
            thread.join()
    return threading.active_count()


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2, timeout_s=60)
def test_all_ranks_raise_many_times(mode, kind):
    raising.do.clear()
    clean, training = _training(mode), _training(mode)
    want = [clean.step(number) for number in range(4)]
    got = [training.step(0)]
    for number in range(TIMES):
        _fail(training, kind)
        if number == 9:
            gc.collect()
            threads, memory = _threads(), _rss_kib()
        if number == TIMES // 2:
            got.append(training.step(1))
    got += [training.step(2), training.step(3)]
    gc.collect()
    assert got == want
    assert_close(full_params(training.model), full_params(clean.model), rtol=0)
    assert _threads() == threads
    assert _rss_kib() - memory < 8 * 1024
    dist.barrier()
    same_on_ranks([peers.failure(), peers.current().report])
    assert peers.failure() == "" and not peers.current().report
