"""An exception at any point of a step: the model trains on, or an error says that ``reset_iter_state`` mends it."""

from __future__ import annotations

import random
import signal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fsdp_compiled.collectives import Pending
from fsdp_compiled.errors import RankFailureError
from tests.faults.interrupts import RaiseAt
from tests.faults.steps import Model, trainer
from tests.faults.test_no_fault import Checkpointed
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.variants import thorough

TRIES = 60


def _plain_step(model, call, x):
    loss = call(x).square().mean()
    loss.backward()
    return loss


def _ahead_of_use(model, call, x):
    """Units are all-gathered by hand."""
    handle = model.blocks[0].unshard(async_op=True)
    model.blocks[1].unshard()
    handle.wait()
    model.blocks[1].reshard()
    model.blocks[1].unshard(async_op=True)
    return _plain_step(model, call, x)


def _accumulating(model, call, x):
    """A micro-batch without sync comes first; what an exception leaves of it is dropped by hand."""
    model.reset_iter_state()
    model.set_requires_gradient_sync(False)
    _plain_step(model, call, x)
    model.set_requires_gradient_sync(True)
    return _plain_step(model, call, x)


def _block_alone(model, call, x):
    """A unit is called without the outermost one."""
    model.blocks[0](x).square().mean().backward()
    model.zero_grad()
    return _plain_step(model, call, x)


def _finalizing(model, call, x):
    """The end of reduction is asked for by hand; what an exception leaves before it is dropped by hand."""
    model.reset_iter_state()
    model.set_manual_backward_finalization(True)
    loss = _plain_step(model, call, x)
    model.finalize_backward(async_op=True).wait()
    return loss


STEPS = {
    "eager": _plain_step,
    "full": _plain_step,
    "regions": _plain_step,
    "recomputed": _plain_step,
    "ahead of use": _ahead_of_use,
    "accumulating": _accumulating,
    "block alone": _block_alone,
    "finalizing": _finalizing,
}

MODE_OF = {"full": "full", "regions": "regions"}  # the other steps run hooks alone


def _results(params, step):
    """Losses and gradients of two steps with an update between them, which is undone."""
    before = [param._local_tensor.clone() for param in params]
    found = []
    for _ in range(2):
        for param in params:
            param.grad = None
        found.append(step().item())
        found += [param.grad._local_tensor for param in params]
        for param in params:
            param._local_tensor.sub_(param.grad._local_tensor)
    for param, local in zip(params, before, strict=True):
        param._local_tensor.copy_(local)
        param.grad = None
    return found


def _equal(got, want):
    return all(torch.equal(torch.as_tensor(g), torch.as_tensor(w)) for g, w in zip(got, want, strict=True))


def _assert_trains_on(model, params, step, want, where):
    assert torch.is_grad_enabled(), where
    try:
        got = _results(params, step)
    except RuntimeError as caught:
        assert "reset_iter_state()" in str(caught), (where, str(caught))
        model.reset_iter_state()
        got = _results(params, step)
    assert _equal(got, want), where


def _hunt(kind, error=KeyboardInterrupt, lines=True, tries=TRIES):
    """Raise at points that are drawn alike on all ranks; none may leave a model that trains otherwise than before."""
    training = _training(kind)
    model, params, x = training.model, list(training.model.parameters()), training.batch()

    def step():
        return STEPS[kind](model, training.call, x)

    _results(params, step)
    want = _results(params, step)
    with RaiseAt(0, lines=lines) as counted:
        step()
    reached = 0
    for number in random.Random(kind).sample(range(1, counted.count), tries):
        with pytest.raises(error), RaiseAt(number, error, lines) as at:
            step()
            raise error  # of a point that this step does not reach
        reached += bool(at.where)
        _assert_trains_on(model, params, step, want, at.where)
    assert reached > 0.9 * tries


def _training(kind):
    model = Checkpointed() if kind == "recomputed" else Model()
    return trainer(kind if kind in ("full", "regions") else "eager", model)


class HandlersOwn(BaseException):
    """What a signal handler may raise."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=row("interrupts", mode=MODE_OF.get(kind, "eager"))) for kind in STEPS]
)
@thorough(when=lambda kind: kind in ("ahead of use", "accumulating"))
@on_ranks(2, timeout_s=30)
def test_an_exception_at_any_line(kind):
    _hunt(kind)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, HandlersOwn])
@pytest.mark.parametrize("kind", ["eager", "full"])
@thorough(when=lambda error: error is HandlersOwn)
@on_ranks(2, timeout_s=30)
def test_an_exception_wherever_signal_handlers_run(kind, error):
    _hunt(kind, error, lines=False)


@on_ranks(1)
def test_signals():
    training = _training("eager")
    model, params, x = training.model, list(training.model.parameters()), training.batch()

    def step():
        return _plain_step(model, model, x)

    def handle(*_):
        raise HandlersOwn

    want, raised, draw = _results(params, step), 0, random.Random(0)
    before = signal.signal(signal.SIGALRM, handle)
    for number in range(2 * TRIES):
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 3e-3))
            for _ in range(100):
                step()
        except HandlersOwn:
            raised += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        _assert_trains_on(model, params, step, want, number)
    signal.signal(signal.SIGALRM, before)
    assert raised > TRIES


@on_ranks(2, timeout_s=30)
def test_an_exception_in_the_first_step():
    want = None
    for number in (None, *range(40, 4000, 150)):
        training = _training("eager")
        model, params, x = training.model, list(training.model.parameters()), training.batch()

        def step():
            return _plain_step(model, model, x)  # noqa: B023

        if number is not None:
            with pytest.raises(KeyboardInterrupt), RaiseAt(number) as at:
                step()
                raise KeyboardInterrupt  # of a point that this step does not reach
        got = _results(params, step)
        want = want or got
        assert _equal(got, want), at.where


@on_ranks(2, timeout_s=30)
def test_memory_that_a_lost_all_gather_may_write_to_is_left_to_it():
    training = trainer("eager")
    model, params, x = training.model, list(training.model.parameters()), training.batch()
    want = _results(params, lambda: _plain_step(model, model, x))
    (group,) = model.blocks[1]._get_fsdp_state().groups
    kept = model(x).square().mean()  # its graph has saved the memory
    group.launch_unshard()
    for param in group.params:
        param.allocate([param.spec])  # as for an all-gather that needs no unpacking
    storages = [param.unsharded.param.untyped_storage() for param in group.params]
    with pytest.raises(KeyboardInterrupt), patch.object(Pending, "wait", side_effect=KeyboardInterrupt):
        group.wait_unshard()
    model.reset_iter_state()
    assert all(storage.nbytes() for storage in storages)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    assert _equal(_results(params, lambda: _plain_step(model, model, x)), want)


@on_ranks(2, timeout_s=7)
def test_one_rank_alone_is_interrupted():
    training = trainer("eager")
    for number in range(2):
        training.step(number)
    if dist.get_rank() == 1:
        with pytest.raises(KeyboardInterrupt), RaiseAt(500):  # in forward
            training.step()
        dist.group.WORLD.get_group_store().wait(["the other has ended"])
        return
    with pytest.raises(RankFailureError, match="^rank 1 raised KeyboardInterrupt"):
        training.step()
    dist.group.WORLD.get_group_store().set("the other has ended", "")
