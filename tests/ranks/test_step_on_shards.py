"""Optimizers that step on shards against the same ones that step on DTensors."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compiled.optim import step_on_shards
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    batches,
    full,
    full_params,
    my_part,
    shard,
    square_loss,
)

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "adam": partial(optim.Adam, lr=0.01, weight_decay=0.1),
    "adamax": partial(optim.Adamax, lr=0.01),
    "adamw": partial(optim.AdamW, lr=0.01),
    "adamw-amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True, maximize=True),
    "adamw-foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "adamw-fused": partial(optim.AdamW, lr=0.01, fused=True),
    "asgd": partial(optim.ASGD, lr=0.1, t0=1),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd-momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
}
# DTensors do not support what these do.
NOT_FOR_DTENSORS: dict[str, Callable[..., optim.Optimizer]] = {
    "adagrad-fused": partial(optim.Adagrad, lr=0.1, fused=True),
    "rprop": partial(optim.Rprop, lr=0.01),
    "sgd-fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
}
adamw = OPTIMIZERS["adamw"]


class Odd(MLP):
    """On 2 ranks: 5 and 4 rows, 3 and 2 rows, 1 row and none; one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__(width=9, hidden=5)
        self.gain = nn.Parameter(torch.full((1, 9), 1.5))
        self.shift = nn.Parameter(torch.ones(9), requires_grad=False)

    def forward(self, x):
        return super().forward(x * self.gain) + self.shift


def _odd(fully: Callable[..., Any] | None = None, **kwargs: Any) -> nn.Module:
    model = Odd()
    if fully is None:
        shard(model, "eager", **kwargs)
    else:
        for block in model.blocks:
            fully(block)
        fully(model)
    return model


def _backward(model, batch):
    loss = square_loss(model, my_part(batch))
    loss.backward()
    return loss


def _train(model, optimizer, data=None, after_backward=lambda: None):
    for batch in batches(3, 8, 9) if data is None else data:
        optimizer.zero_grad()
        _backward(model, batch)
        after_backward()
        optimizer.step()


def _assert_same_value(got, want):
    assert type(got) is type(want)
    if isinstance(want, DTensor):
        assert (got.placements, got.shape, got.dtype, got.stride()) == (
            want.placements,
            want.shape,
            want.dtype,
            want.stride(),
        )
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(full(got), full(want), rtol=0, atol=0)
    else:
        assert got == want


def _assert_same(model, optimizer, other, other_optimizer):
    for (name, got), want in zip(full_params(model).items(), full_params(other).values(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=name)
    got, want = optimizer.state_dict(), other_optimizer.state_dict()
    assert got["param_groups"] == want["param_groups"]
    assert list(got["state"]) == list(want["state"])
    for values, expected in zip(got["state"].values(), want["state"].values(), strict=True):
        assert list(values) == list(expected)
        for key, value in expected.items():
            _assert_same_value(values[key], value)


@row("optimizers and evaluation", mode="eager")
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_steps_and_states_are_those_of_dtensors(name):
    model, other = _odd(), _odd()
    assert model.gain.to_local().shape[0] == 1 - dist.get_rank()
    optimizer = step_on_shards(OPTIMIZERS[name](model.parameters()))
    other_optimizer = OPTIMIZERS[name](other.parameters())
    before = full_params(model)
    _train(model, optimizer)
    _train(other, other_optimizer)
    _assert_same(model, optimizer, other, other_optimizer)
    after = full_params(model)
    assert [name for name in after if torch.equal(before[name], after[name])] == ["shift"]


@row("optimizers and evaluation", mode="eager")
@pytest.mark.parametrize("name", NOT_FOR_DTENSORS)
@on_ranks(2)
def test_optimizers_that_dtensors_do_not_support(name):
    model, other = _odd(), _odd()
    locals_ = [nn.Parameter(param._local_tensor.clone()) for param in other.parameters()]
    optimizer = step_on_shards(NOT_FOR_DTENSORS[name](model.parameters()))
    other_optimizer = NOT_FOR_DTENSORS[name](locals_)
    for batch in batches(3, 8, 9):
        _train(model, optimizer, [batch])
        for param, local in zip(model.parameters(), locals_, strict=True):
            local.grad = None if param.grad is None else param.grad._local_tensor
        other_optimizer.step()
    for param, local in zip(model.parameters(), locals_, strict=True):
        torch.testing.assert_close(param._local_tensor, local.data, rtol=0, atol=0)
        for key, value in other_optimizer.state[local].items():
            shown = optimizer.state[param][key]
            assert isinstance(shown, DTensor) == (value.dim() > 0)
            torch.testing.assert_close(shown.to_local() if value.dim() else shown, value, rtol=0, atol=0)


@on_ranks(2)
def test_parameters_of_torch_fsdp():
    model, other = _odd(torch_fsdp.fully_shard), _odd(torch_fsdp.fully_shard)
    optimizer, other_optimizer = step_on_shards(adamw(model.parameters())), adamw(other.parameters())
    _train(model, optimizer)
    _train(other, other_optimizer)
    _assert_same(model, optimizer, other, other_optimizer)


@row("optimizers and evaluation", mode="eager")
@on_ranks(4)
def test_replicas_step_alike():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, other = _odd(mesh=mesh), _odd(mesh=mesh)
    optimizer, other_optimizer = step_on_shards(adamw(model.parameters())), adamw(other.parameters())
    _train(model, optimizer)
    _train(other, other_optimizer)
    _assert_same(model, optimizer, other, other_optimizer)


@row("optimizers and evaluation", mode="full")
@on_ranks(2)
def test_a_compiled_model():
    model, other = _odd(), _odd()
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer, other_optimizer = step_on_shards(adamw(model.parameters())), adamw(other.parameters())
    for batch in batches(3, 8, 9):
        optimizer.zero_grad()
        _backward(call, batch)
        for param, like in zip(model.parameters(), other.parameters(), strict=True):
            like.grad = None if param.grad is None else param.grad.clone()
        optimizer.step()
        other_optimizer.step()
    _assert_same(model, optimizer, other, other_optimizer)


@row("state dict", "optimizers and evaluation", mode="eager")
@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "adagrad", "sgd-momentum"])
@on_ranks(2)
def test_state_dicts_go_both_ways(name):
    first, second = batches(6, 8, 9).chunk(2)
    trained = _odd()
    optimizer = step_on_shards(OPTIMIZERS[name](trained.parameters()))
    _train(trained, optimizer, first)
    resumed = []
    for wrap in (step_on_shards, lambda unchanged: unchanged):
        model = _odd()
        model.load_state_dict(trained.state_dict())
        resumed.append((model, wrap(OPTIMIZERS[name](model.parameters()))))
        resumed[-1][1].load_state_dict(deepcopy(optimizer.state_dict()))
    _train(trained, optimizer, second)
    for pair in resumed:
        _train(*pair, second)
        _assert_same(*pair, trained, optimizer)
    optimizer.load_state_dict(deepcopy(resumed[1][1].state_dict()))  # made by a step on DTensors
    for pair in ((trained, optimizer), resumed[1]):
        _train(*pair, first)
    _assert_same(trained, optimizer, *resumed[1])


@row("state dict", mode="eager")
@on_ranks(2)
def test_distributed_checkpoint_state_dicts():
    model, other = _odd(), _odd()
    optimizer, other_optimizer = step_on_shards(adamw(model.parameters())), adamw(other.parameters())
    for pair in ((model, optimizer), (other, other_optimizer)):
        pair[1].load_state_dict(pair[1].state_dict())
        get_optimizer_state_dict(*pair)  # it steps once to make the state
        _train(*pair)
    got, want = get_optimizer_state_dict(model, optimizer), get_optimizer_state_dict(other, other_optimizer)
    assert got["state"].keys() == want["state"].keys() >= {"blocks.0.0.weight"}
    for name, values in want["state"].items():
        for key, value in values.items():
            _assert_same_value(got["state"][name][key], value)
    fresh = _odd()
    fresh.load_state_dict(model.state_dict())
    fresh_optimizer = step_on_shards(adamw(fresh.parameters()))
    set_optimizer_state_dict(fresh, fresh_optimizer, got)
    for pair in ((fresh, fresh_optimizer), (other, other_optimizer)):
        _train(*pair)
    _assert_same(fresh, fresh_optimizer, other, other_optimizer)


@row("optimizers and evaluation", mode="eager")
@pytest.mark.parametrize("first", ["scheduler", "shards"])
@on_ranks(2)
def test_learning_rate_schedulers(first):
    model, other = _odd(), _odd()
    optimizer, other_optimizer = adamw(model.parameters()), adamw(other.parameters())
    if first == "shards":
        step_on_shards(optimizer)
    schedulers = [optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, other_optimizer)]
    schedulers.append(optim.lr_scheduler.StepLR(step_on_shards(optimizer), 100))
    for batch in batches(3, 8, 9):
        _train(model, optimizer, [batch])
        _train(other, other_optimizer, [batch])
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.01 / 8
    _assert_same(model, optimizer, other, other_optimizer)


@row("optimizers and evaluation", mode="eager")
@on_ranks(2)
def test_gradients_are_clipped_by_their_whole_norm():
    norms, pairs = [], []
    for wrap in (step_on_shards, lambda unchanged: unchanged):
        model = _odd()
        optimizer = wrap(adamw(model.parameters()))

        def clip(optimizer, args, kwargs):
            norms.append(full(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)))

        optimizer.register_step_pre_hook(clip)
        _train(model, optimizer)
        pairs.append((model, optimizer))
    assert norms[:3] == norms[3:]
    _assert_same(*pairs[0], *pairs[1])


@row("optimizers and evaluation", mode="eager")
@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
@on_ranks(2)
def test_gradient_scaler_skips_overflows(name):
    pairs = []
    for wrap in (step_on_shards, lambda unchanged: unchanged):
        model = _odd()
        optimizer, scaler = wrap(OPTIMIZERS[name](model.parameters())), torch.amp.GradScaler("cpu", init_scale=4.0)
        for index, batch in enumerate(batches(3, 8, 9)):
            optimizer.zero_grad()
            scaler.scale(square_loss(model, my_part(batch))).backward()
            if index == 1 and dist.get_rank() == 0:
                model.gain.grad.to_local().fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
        assert not hasattr(optimizer, "found_inf")
        pairs.append((model, optimizer))
    _assert_same(*pairs[0], *pairs[1])
    assert optimizer.state[model.gain]["step"].item() == 2


@row("optimizers and evaluation", mode="eager")
@on_ranks(2)
def test_closures_see_dtensors_and_may_run_often():
    class Twice(optim.SGD):
        def step(self, closure):
            with torch.enable_grad():
                closure()
            super().step()
            return super().step(closure)

    pairs, losses = [], []
    for wrap in (partial(step_on_shards, elementwise=True), lambda unchanged: unchanged):
        model = _odd()
        optimizer = wrap(Twice(model.parameters(), lr=0.1, momentum=0.9))

        def closure(model=model, optimizer=optimizer):
            assert all(isinstance(param, DTensor) for param in optimizer.state)
            momenta = [full(values["momentum_buffer"]).sum() for values in optimizer.state.values()]
            optimizer.zero_grad()
            loss = _backward(model, batches(1, 8, 9)[0])
            losses.append((loss.item(), momenta))
            return loss

        assert optimizer.step(closure).item() == losses[-1][0]
        optimizer.step(closure=closure)
        pairs.append((model, optimizer))
    assert losses[:4] == losses[4:]
    _assert_same(*pairs[0], *pairs[1])


@row("optimizers and evaluation", mode="eager")
@on_ranks(2)
def test_parameters_added_later():
    pairs = []
    for wrap in (step_on_shards, lambda unchanged: unchanged):
        model = _odd()
        optimizer = wrap(adamw([{"params": model.blocks.parameters()}, {"params": [model.scale], "lr": 0.1}]))
        _train(model, optimizer)
        model.shift.requires_grad_(True)
        optimizer.add_param_group({"params": [model.shift, model.gain], "weight_decay": 0.0})
        _train(model, optimizer)
        pairs.append((model, optimizer))
    _assert_same(*pairs[0], *pairs[1])


@row("optimizers and evaluation", mode="eager")
@on_ranks(2)
def test_storage_replaced_between_steps():
    pairs = []
    for wrap in (step_on_shards, lambda unchanged: unchanged):
        model = _odd()
        optimizer = wrap(optim.SGD(model.parameters(), lr=0.1))
        _train(model, optimizer)
        model.to(torch.float64)
        _train(model, optimizer, batches(3, 8, 9).double())
        loaded = {name: value.clone() for name, value in _odd().double().state_dict().items()}
        model.load_state_dict(loaded, assign=True)
        optimizer = wrap(adamw(model.parameters()))
        _train(model, optimizer, batches(3, 8, 9).double())
        for param, values in optimizer.state.items():
            optimizer.state[param] = {key: value.clone() for key, value in values.items()}
            values["exp_avg"].zero_()  # no longer the optimizer's
            assert param.dtype is torch.float64
        _train(model, optimizer, batches(3, 8, 9).double())
        pairs.append((model, optimizer))
    _assert_same(*pairs[0], *pairs[1])
