"""Situations in which sharded training goes silently wrong when it is not written for them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fsdp_compiled import fully_shard
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    MODES,
    WITH_REGIONS,
    assert_close,
    assert_trains_like_one_process,
    batches,
    compiled,
    full,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
    train,
)

each_mode = pytest.mark.parametrize("mode", MODES)
eager_and_full = pytest.mark.parametrize("mode", ["eager", "full"])


class Tied(nn.Module):
    """One weight behind two modules, and read twice by one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(10, 10)
        self.last = nn.Linear(10, 10)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(self.first(x).relu()).relu())


@row("accumulation", "tied and shared")
@eager_and_full
@on_ranks(2)
def test_accumulation_of_a_parameter_that_is_read_often(mode):
    alone, model = Tied(), fully_shard(Tied())
    call = compiled(model) if mode == "full" else model
    data = batches(4, 8, 10)
    for index, x in enumerate(data):
        square_loss(alone, x).backward()
        model.set_requires_gradient_sync(index >= 2)  # two reductions follow two stored gradients
        square_loss(call, my_part(x)).backward()
    assert_close(full_grads(model), full_grads(alone))


@row("accumulation")
@each_mode
@on_ranks(2)
def test_two_forwards_before_one_backward_after_a_stored_gradient(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    first, second, third = batches(3, 8, 10)
    model.set_requires_gradient_sync(False)
    square_loss(call, my_part(first)).backward()
    model.set_requires_gradient_sync(True)
    (square_loss(call, my_part(second)) + square_loss(call, my_part(third))).backward()
    sum(square_loss(alone, x) for x in (first, second, third)).backward()
    assert_close(full_grads(model), full_grads(alone))


@row("accumulation")
@each_mode
@on_ranks(2)
def test_sync_set_between_forward_and_backward(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    for _ in range(2):
        for index, x in enumerate(batches(3, 8, 10)):
            square_loss(alone, x).backward()
            loss = square_loss(call, my_part(x))
            model.set_requires_gradient_sync(index == 2)
            loss.backward()
        assert_close(full_grads(model), full_grads(alone))
        alone.zero_grad()
        model.zero_grad()


class Sometimes(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(10, 10))

    def forward(self, x, extra=False):
        for block in self.blocks[:2]:
            x = x * self.scale + block(x)
        return self.blocks[2](x) if extra else x


@row("accumulation", "ignored and unused")
@each_mode
@on_ranks(2)
def test_a_unit_that_only_the_stored_micro_batch_used(mode):
    alone, model = Sometimes(), Sometimes()
    call = shard(model, mode)
    x = batches(1, 8, 10)[0]
    for extra in (True, False):
        alone(x, extra=extra).square().mean().backward()
        model.set_requires_gradient_sync(not extra)
        call(my_part(x), extra=extra).square().mean().backward()
    assert_close(full_grads(model), full_grads(alone))


@dataclass
class Output:
    hidden: torch.Tensor
    step: int = 0


class Structured(MLP):
    def forward(self, x):
        hidden = Output(x * self.scale)
        for block in self.blocks:
            hidden = Output(hidden.hidden + block(hidden).hidden, hidden.step + 1)
        return hidden


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, state):
        return Output(self.linear(state.hidden).tanh(), state.step)


@row("module kinds")
@each_mode
@on_ranks(2)
def test_dataclasses_between_units(mode):
    def build():
        model = Structured()
        torch.manual_seed(2)
        model.blocks = nn.ModuleList([Block(), Block()])
        return model

    alone, model = build(), build()
    call = shard(model, mode)
    data = batches(3, 8, 10)
    want = train(alone, lambda x: alone(x).hidden, data, square_loss, sharded=False)
    got = train(model, lambda x: call(x).hidden, data, square_loss)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)
    assert_close(full_params(model), full_params(alone))


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

    hook = model.blocks[0].register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
    with pytest.raises(ValueError, match="stop"):
        square_loss(model, my_part(batches(1, 8, 10)[0])).backward()
    hook.remove()
    if ask:
        model.reset_iter_state()
        with pytest.raises(RuntimeError, match=r"reset_iter_state: expected the outermost unit, got MLP.*blocks\.0"):
            model.blocks[0].reset_iter_state()
    _same_step(model, model, alone)


@row("switching", "optimizers and evaluation", mode="full")
@on_ranks(2)
def test_what_eager_left_unsharded_does_not_grow_old_while_compiled_steps_train():
    alone, model = MLP(), MLP()
    call = shard(model, "full")
    data = batches(3, 8, 10)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    model(my_part(data[0]))  # a forward with gradients and no backward keeps the root unsharded
    model.blocks[0].unshard(async_op=True)
    for x in data:
        square_loss(alone, x).backward()
        square_loss(call, my_part(x)).backward()
        for m in (alone, model):
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(data[0]), alone(data[0]))
    assert_close(full_params(model), full_params(alone))


class Chunked(nn.Module):
    """The head runs outside forward, in chunks, as memory-saving losses do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Linear(10, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 10)

    def forward(self, x):
        return self.norm(self.body(x).relu())

    def loss(self, call, head, x):
        hidden = call(x)
        return sum(square.square().mean() for part in hidden.chunk(2) for square in [head(part)]) / 2


@row("module kinds")
@eager_and_full
@on_ranks(2)
def test_a_member_of_a_list_unit_that_runs_outside_the_model(mode):
    alone, model = Chunked(), Chunked()
    fully_shard([model.norm, model.head])
    fully_shard(model)
    with torch.no_grad():
        model.head(model(batches(1, 8, 10)[0]))
    assert not model.head._get_fsdp_state().unit.hooked
    call, head = model, model.head
    if mode == "full":
        call = compiled(model)
    for x in batches(2, 8, 10):
        alone.loss(alone, alone.head, x).backward()
        model.loss(call, head, my_part(x)).backward()
    assert_close(full_grads(model), full_grads(alone))


@row("state dict", "tied and shared")
@eager_and_full
@on_ranks(2)
def test_loading_shared_parameters_with_assign(mode):
    alone, model = Tied(), fully_shard(Tied())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert model.last.weight is model.first.weight
    call = compiled(model) if mode == "full" else model
    train(model, call, batches(2, 8, 10), square_loss)
    train(alone, alone, batches(2, 8, 10), square_loss, sharded=False)
    torch.testing.assert_close(full(model.state_dict()["last.weight"]), alone.last.weight.detach())


@row("accumulation", "mixed precision")
@each_mode
@on_ranks(2)
def test_a_stored_gradient_survives_a_conversion(mode):
    alone, model = MLP().double(), MLP()
    call = shard(model, mode, inductor=True)
    first, second = batches(2, 8, 10)
    model.set_requires_gradient_sync(False)
    square_loss(call, my_part(first)).backward()
    model.double()
    model.set_requires_gradient_sync(True)
    square_loss(call, my_part(second).double()).backward()
    (square_loss(alone, first.double()) + square_loss(alone, second.double())).backward()
    assert_close(full_grads(model), full_grads(alone))


class Empty(nn.Module):
    """Parameters without elements, beside others and as a unit of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there is nothing to initialise
            self.inputs = nn.Linear(0, 10)
            self.alone = nn.Linear(0, 10, bias=False)
        self.linear = nn.Linear(10, 10)
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return self.linear(x) + self.inputs(x[:, :0]) + self.alone(x[:, :0]) + self.none.sum()


class Empties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Empty() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("mode", WITH_REGIONS)
@pytest.mark.parametrize("sync", [True, False])
@on_ranks(2)
def test_parameters_without_elements(mode, sync):
    alone, model = Empties(), Empties()
    for block in model.blocks:
        fully_shard(block.alone)
    call = shard(model, mode)
    if not sync:
        model.set_requires_gradient_sync(False)
        for each, x in ((alone, batches(1, 8, 10)[0]), (call, my_part(batches(1, 8, 10)[0]))):
            square_loss(each, x).backward()
        model.set_requires_gradient_sync(True)
    assert_trains_like_one_process(model, call, alone)
