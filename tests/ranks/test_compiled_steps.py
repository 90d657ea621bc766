"""``torch.compile`` of a function that holds a training step: where its graphs end, backward and hooks run."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import input_codes
from torch.utils.checkpoint import checkpoint

import fsdp_compiled
from tests.support.ranks import on_ranks
from tests.support.training import MLP, assert_close, backend, batches, full_params, my_part, shard, square_loss
from tests.support.variants import thorough


def _models(mode):
    """The sharded model, what calls it, and the one to compare with. ``uncompiled``: its hooks run."""
    torch._dynamo.reset()
    model, alone = MLP(), MLP()
    shard(model, "eager" if mode == "uncompiled" else mode)
    return model, torch.compiler.disable(model) if mode == "uncompiled" else model, alone


def _train(step, model, alone, step_alone):
    """Train both, and compare."""
    for batch in batches(3, 2, 8, 10):
        step([my_part(part) for part in batch])
        step_alone(batch)
    assert_close(full_params(model), full_params(alone))


def _compiled_of_the_library():
    """Names of the library's functions with which Dynamo has begun to compile."""
    codes = [code for each in input_codes.seen if (code := each()) is not None]
    return {code.co_name for code in codes if code.co_filename.startswith(fsdp_compiled.__path__[0])}


def _update(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()


def _steps(model, call, alone):
    """A training step of the sharded model, and what one process does instead."""
    sgd, sgd_alone = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone))

    def step(batch):
        square_loss(call, batch[0]).backward()
        _update(model, sgd)

    def step_alone(batch):
        square_loss(alone, batch[0]).backward()
        _update(alone, sgd_alone)

    return step, step_alone


@pytest.mark.parametrize("mode", ["eager", "regional", "uncompiled"])
@thorough(when=lambda mode: mode == "uncompiled")
@on_ranks(2)
def test_a_step(mode):
    model, call, alone = _models(mode)
    step, step_alone = _steps(model, call, alone)
    _train(torch.compile(step, **backend(inductor=mode == "eager")), model, alone, step_alone)
    assert _compiled_of_the_library() <= {"_fsdp_traced", "__del__"}


@pytest.mark.parametrize("mode", ["eager", "regional", "uncompiled"])
@thorough(when=lambda mode: mode != "eager")
@on_ranks(2)
def test_micro_batches_and_an_all_gather_by_hand(mode):
    model, call, alone = _models(mode)
    sgd, sgd_alone = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone))

    @torch.compile(**backend())
    def step(batch):
        for number, part in enumerate(batch):
            model.set_requires_gradient_sync(number == 1)
            model.unshard()
            square_loss(call, part).backward()
        _update(model, sgd)

    def step_alone(batch):
        for part in batch:
            square_loss(alone, part).backward()
        _update(alone, sgd_alone)

    _train(step, model, alone, step_alone)


@on_ranks(2)
def test_compiled_autograd_is_refused():
    """It runs without the engine that calls our hooks; without it, training goes on."""
    model, call, alone = _models("eager")
    step, step_alone = _steps(model, call, alone)
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(step, **backend())
        with pytest.raises(NotImplementedError, match="^torch._dynamo.config.compiled_autograd: expected False"):
            compiled(batches(1, 4, 10))
    model.reset_iter_state()
    torch._dynamo.reset()
    _train(torch.compile(step, **backend()), model, alone, step_alone)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 fails an assertion of its own there")
@pytest.mark.parametrize("mode, checkpoints", [("eager", False), ("eager", True), ("regions", False)])
@on_ranks(2)
def test_a_traced_backward_is_refused(mode, checkpoints):
    """Its graph would leave gradients where no optimizer finds them."""
    model, call, alone = _models(mode)
    loss = partial(checkpoint, square_loss, use_reentrant=False) if checkpoints else square_loss
    step, step_alone = _steps(model, call, alone)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for fullgraph in (True, False):
            compiled = torch.compile(lambda x: loss(model, x).backward(), fullgraph=fullgraph, **backend())
            with pytest.raises(RuntimeError, match="trace_autograd_ops: expected False, got True where it traces"):
                compiled(batches(1, 4, 10)[0])
    torch._dynamo.reset()
    _train(step if mode == "regions" else torch.compile(step, **backend()), model, alone, step_alone)


class AsksForGradients(nn.Module):
    """A backward within forward: of a norm that is added to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()
        self.blocks, self.out = self.inner.blocks, nn.Linear(10, 10)

    def forward(self, x):
        y = self.out(self.inner(x))
        (grad,) = torch.autograd.grad(y.square().mean(), self.out.weight, retain_graph=True)
        return y + grad.norm().detach()


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@on_ranks(2)
def test_a_backward_within_forward(mode):
    torch.manual_seed(0)
    model, alone = AsksForGradients(), AsksForGradients()
    alone.load_state_dict(model.state_dict())
    shard(model, "eager")
    call = torch.compile(model, **backend()) if mode == "compiled" else model
    (x,) = batches(1, 4, 10)  # the same on both ranks: the norm is of a rank's own gradient
    for each in (call, alone):
        square_loss(each, x).backward()
    for each in (model, alone):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_close(full_params(model), full_params(alone))
