"""An exception in forward, in a graph or in backward: the next step is as if it had not been."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from fsdp_compiled import register_fsdp_forward_method, unsharded
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    batches,
    compiled,
    full_grads,
    my_part,
    shard,
    square_loss,
)


class Failing(MLP):
    fail = False

    def forward(self, x):
        x = super().forward(x)
        if self.fail:
            raise ValueError("stop")
        return x


def _same_step(model, call, alone):
    x = batches(1, 8, 10)[0]
    for m in (model, alone):
        m.zero_grad()
    square_loss(alone, x).backward()
    square_loss(call, my_part(x)).backward()
    assert_close(full_grads(model), full_grads(alone))


@row("methods", mode="eager")
@pytest.mark.parametrize("then", ["eager", "full"])
@on_ranks(2)
def test_an_exception_in_forward_leaves_nothing_behind(then):
    alone, model = Failing(), Failing()
    shard(model, "eager")
    model.fail = True
    with pytest.raises(ValueError, match="stop"):
        model(torch.ones(4, 10))
    model.fail = False
    with torch.no_grad():  # the parameters change before the next step
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            mine.mul_(0.5)
            other.mul_(0.5)
    _same_step(model, compiled(model, fullgraph=False) if then == "full" else model, alone)


@torch.library.custom_op("fsdp_compiled_tests::stop_if_nan", mutates_args=())
def stop_if_nan(x: torch.Tensor) -> torch.Tensor:
    if x.isnan().any():
        raise ValueError("stop")
    return x.clone()


stop_if_nan.register_fake(torch.empty_like)
stop_if_nan.register_autograd(lambda ctx, grad: stop_if_nan(grad))


class Checked(MLP):
    def forward(self, x):
        return stop_if_nan(super().forward(x))


@row("methods", mode="full")
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_an_exception_inside_a_graph_reaches_the_caller_and_leaves_nothing_behind(where):
    alone, model = Checked(), Checked()
    call = shard(model, "full")
    _same_step(model, call, alone)
    x = my_part(batches(1, 8, 10)[0])
    with pytest.raises(ValueError, match="^stop$"):
        if where == "forward":
            call(x * torch.nan)
        else:
            (call(x) * torch.nan).sum().backward()
    _same_step(model, call, alone)


@row("methods", mode="eager")
@pytest.mark.parametrize("ask", [True, False])
@on_ranks(2)
def test_an_exception_in_backward_leaves_nothing_behind(ask):
    alone, model = MLP(), MLP()
    shard(model, "eager")

    def fail(grad):
        raise ValueError("stop")

    if ask:
        square_loss(model, my_part(batches(1, 8, 10)[0])).backward()
    hook = model.blocks[0].register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
    with pytest.raises(ValueError, match="stop"):
        square_loss(model, my_part(batches(1, 8, 10)[0])).backward()
    hook.remove()
    if ask:
        model.reset_iter_state()
        drops = TorchVersion(torch.__version__) >= "2.15"  # as its FSDP2 does
        assert {param.grad is None for param in model.parameters()} == {drops}
        with pytest.raises(RuntimeError, match=r"reset_iter_state: expected the outermost unit, got MLP.*blocks\.0"):
            model.blocks[0].reset_iter_state()
        model.zero_grad()
    _same_step(model, model, alone)


@on_ranks(2)
def test_a_backward_through_an_earlier_graph_after_one_that_failed():
    alone, model = MLP(), MLP()
    shard(model, "eager")
    first, second = batches(2, 8, 10)

    def fail(grad):
        raise ValueError("stop")

    hook = model.blocks[0].register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
    failing = square_loss(model, my_part(first))
    hook.remove()
    loss = square_loss(model, my_part(second))
    with pytest.raises(ValueError, match="stop"):
        failing.backward()
    loss.backward()
    square_loss(alone, second).backward()
    assert_close(full_grads(model), full_grads(alone))
    _same_step(model, model, alone)


@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_a_forward_without_a_backward_and_then_an_optimizer_step(mode):
    """The outermost unit stays unsharded after forward, and a backward reshards it."""
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    x = batches(1, 8, 10)[0]
    for each, forward, part in ((alone, alone, x), (model, call, my_part(x))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        square_loss(forward, part).backward()
        forward(part)  # its loss is not finite, say
        optimizer.step()
    _same_step(model, call, alone)


class WithMethod(Failing):
    def encode(self, x):
        return self(x)


@pytest.mark.parametrize("of_block", [True, False])
@on_ranks(2)
def test_an_exception_in_a_registered_forward_method(of_block):
    alone, model = MLP(), WithMethod()
    shard(model, "eager")
    unit = model.blocks[0] if of_block else model
    register_fsdp_forward_method(unit, "forward" if of_block else "encode")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|must match"):
        unit.forward(torch.ones(4, 9)) if of_block else unit.encode(torch.ones(4, 9))
    with torch.no_grad():
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            mine.mul_(0.5)
            other.mul_(0.5)
    with unsharded(model):
        torch.testing.assert_close(model(torch.ones(4, 10)), alone(torch.ones(4, 10)))
    _same_step(model, model, alone)
