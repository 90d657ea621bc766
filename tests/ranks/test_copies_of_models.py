"""Deep copies of sharded models, which train and evaluate on their own, and averages of models."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from fsdp_compiled import FSDPModule, fully_shard, register_fsdp_forward_method, unsharded
from fsdp_compiled.hooks.state import states_below
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    assert_trains_like_one_process,
    batches,
    call_of,
    compiled,
    each_with_regions,
    eager_and_full,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
    train,
    units_inside,
)
from tests.support.variants import thorough


class Tied(MLP):
    """Blocks that share a weight, a buffer, and a first dimension that two ranks share unevenly."""

    def __init__(self) -> None:
        super().__init__(hidden=7)
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.register_buffer("offset", torch.rand(10))

    def forward(self, x):
        return super().forward(x) + self.offset


def storages(model: nn.Module) -> set[int]:
    tensors = [*model.parameters(), *model.buffers()]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return {each.untyped_storage().data_ptr() for each in local if each.numel()}


@on_ranks(2)
def test_a_copy_does_not_keep_the_original():
    model = MLP()
    shard(model, "eager")
    copied, state = copy.deepcopy(model), weakref.ref(states_below([model])[0])
    del model
    gc.collect()
    assert state() is None
    assert isinstance(copied, FSDPModule)


@row("copies")
@each_with_regions
@pytest.mark.parametrize("replicas", [1, 2])
@thorough(when=lambda mode, replicas: mode == "regional" or (mode != "eager" and replicas == 1))
@on_ranks(2)
def test_a_copy_trains_by_itself(mode, replicas):
    alone, model = Tied(), Tied()
    mesh = init_device_mesh("cpu", (replicas, 2 // replicas), mesh_dim_names=("replicate", "shard"))
    call = shard(model, mode, mesh=mesh)
    data = batches(4, 8, 10)
    train(alone, alone, data[:1], square_loss, sharded=False)
    train(model, call, data[:1], square_loss)
    square_loss(call, my_part(data[0])).backward()

    alone_too, copied = copy.deepcopy(alone), copy.deepcopy(model)

    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert not storages(copied) & storages(model)
    assert {type(p) for p in copied.parameters()} == {DTensor} and all(p.grad is None for p in copied.parameters())
    assert {p.device_mesh for p in copied.parameters()} == {p.device_mesh for p in model.parameters()}
    assert not set(states_below([copied])) & set(states_below([model]))
    assert len(units_inside(copied)) == len(units_inside(model)) and isinstance(copied, FSDPModule)
    assert copied.blocks[0][0].weight is copied.blocks[1][0].weight
    model.zero_grad()
    before = full_params(model)
    assert_trains_like_one_process(copied, call_of(copied, mode), alone_too, data[1:])
    assert_close(full_params(model), before)
    after = full_params(copied)
    assert_trains_like_one_process(model, call, alone, data[1:])
    assert_close(full_params(copied), after)


@eager_and_full
@on_ranks(2)
def test_a_copy_of_parameters_tied_after_they_were_sharded(mode):
    alone, model = MLP(hidden=7), MLP(hidden=7)
    call = shard(model, mode)
    for each in (alone, model):
        each.blocks[1][0].weight = each.blocks[0][0].weight
    data = batches(3, 8, 10)
    train(alone, alone, data[:1], square_loss, sharded=False)
    train(model, call, data[:1], square_loss)
    alone_too, copied = copy.deepcopy(alone), copy.deepcopy(model)
    before = full_params(model)
    assert copied.blocks[1][0].weight is copied.blocks[0][0].weight
    assert_trains_like_one_process(copied, call_of(copied, mode), alone_too, data[1:])
    assert_close(full_params(model), before)


class Indexed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(9, -1, -1), requires_grad=False)

    def forward(self, x):
        return super().forward(x[:, self.order])


@eager_and_full
@on_ranks(2)
def test_a_copy_of_integers(mode):
    alone, model = Indexed(), Indexed()
    shard(model, mode)
    copied = AveragedModel(model).module
    assert_trains_like_one_process(copied, call_of(copied, mode), alone)


@eager_and_full
@on_ranks(2)
def test_an_optimizer_that_is_copied_before_its_model_trains_the_copy(mode):
    alone, model = Tied(), Tied()
    call, data = shard(model, mode), batches(3, 8, 10)
    both = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (alone, model)]
    train(alone, alone, data[:1], square_loss, sharded=False, optimizer=both[0])
    train(model, call, data[:1], square_loss, optimizer=both[1])

    (alone_steps, alone_too), (steps, copied) = copy.deepcopy([(both[0], alone), (both[1], model)])

    before = full_params(model)
    train(alone_too, alone_too, data[1:], square_loss, sharded=False, optimizer=alone_steps)
    train(copied, call_of(copied, mode), data[1:], square_loss, optimizer=steps)
    assert_close(full_params(copied), full_params(alone_too))
    assert_close(full_params(model), before)
    assert not storages(copied) & storages(model)


@pytest.mark.parametrize("optimizer_first", [True, False])
@eager_and_full
@on_ranks(2)
def test_copies_have_no_gradients_and_are_frozen_as_the_original_is_unsharded(mode, optimizer_first):
    model = MLP()
    call, data = shard(model, mode), batches(1, 8, 10)[0]
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square_loss(call, my_part(data)).backward()
    for param in optimizer.param_groups[0]["params"]:
        param.grad = param.grad * 1  # torch cannot copy what autograd has made
    model.unshard()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    assert not isinstance(frozen, DTensor)

    both = (optimizer, model) if optimizer_first else (model, optimizer)
    copied = dict(zip(map(type, both), copy.deepcopy(both), strict=True))[type(model)]

    params = list(copied.parameters())
    assert [param.requires_grad for param in params] == [False] + [True] * (len(params) - 1)
    assert all(isinstance(param, DTensor) and param.grad is None for param in params)


@row("copies")
@each_with_regions
@pytest.mark.parametrize("moment", ["forward", "after forward", "backward", "unshard"])
@thorough(when=lambda mode, moment: mode in ("regional", "regions") and moment != "after forward")
@on_ranks(2)
def test_a_copy_of_a_model_in_the_middle_of_a_step(mode, moment):
    alone, model = Tied(), Tied()
    call = shard(model, mode)
    (x,) = batches(1, 8, 10)
    made = []

    def make(*_):
        if not torch.compiler.is_compiling() and not made:
            made.append(copy.deepcopy(model))

    if moment == "forward":
        if mode in ("full", "regions"):
            return  # a graph's forward calls nothing
        model.blocks[1].register_forward_pre_hook(make)
    square_loss(alone, x).backward()
    loss = square_loss(call, my_part(x))
    if moment == "after forward":
        make()
    if moment == "backward":
        loss.register_hook(make)
    loss.backward()
    if moment == "unshard":
        model.unshard()
        make()
        model.reshard()
    (copied,) = made
    assert_close(full_grads(model), full_grads(alone))
    model.blocks[1]._forward_pre_hooks.popitem()
    copied.blocks[1]._forward_pre_hooks.popitem()
    alone.zero_grad()
    assert_trains_like_one_process(copied, call_of(copied, mode), alone)


class Normed(nn.Module):
    """Batch norm, whose buffers change in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7), nn.Linear(7, 10)) for _ in "12"
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def averaging(kind: str) -> dict:
    of_kind = {
        "swa": {},
        "ema": {"avg_fn": get_ema_avg_fn(0.9)},
        "foreach": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    }
    return of_kind[kind]


@row("copies")
@each_with_regions
@pytest.mark.parametrize("kind", ["swa", "ema", "foreach"])
@thorough(when=lambda mode, kind: mode != "eager" and kind != "ema")
@on_ranks(2)
def test_an_averaged_model(mode, kind):
    alone, model = Tied(), Tied()
    call = shard(model, mode)
    averages = AveragedModel(alone, **averaging(kind)), AveragedModel(model, **averaging(kind))
    for x in batches(4, 8, 10):
        train(alone, alone, x[None], square_loss, sharded=False)
        train(model, call, x[None], square_loss)
        averages[0].update_parameters(alone)
        averages[1].update_parameters(model)
    want, got = averages
    assert_close(full_params(got), full_params(want))
    assert not storages(got) & storages(model)
    (x,) = batches(1, 8, 10, seed=9)
    with torch.no_grad():
        torch.testing.assert_close(call_of(got.module, mode)(my_part(x)), my_part(want(x)))
    loaded = AveragedModel(model)
    loaded.load_state_dict(got.state_dict())
    assert_close(full_params(loaded), full_params(want))


@pytest.mark.parametrize("kind", ["swa", "ema", "foreach"])
@on_ranks(2)
def test_an_averaged_model_with_buffers(kind):
    alone, model = Normed(), Normed()
    shard(model, "eager")
    averages = [AveragedModel(each, use_buffers=True, **averaging(kind)) for each in (alone, model)]
    for x in batches(3, 8, 10):
        for each, average in zip((alone, model), averages, strict=True):
            train(each, each, torch.stack([x.chunk(2)[0]]), square_loss, sharded=False)
            # torch's averages by groups mix parameters and buffers, and by default DTensors take no others
            with implicit_replication() if kind == "foreach" else nullcontext():
                average.update_parameters(each)
    want, got = averages
    assert_close(full_params(got), full_params(want))
    assert_close(dict(got.named_buffers()), dict(want.named_buffers()))
    loader = list(batches(3, 8, 10))
    for each in averages:
        update_bn(loader, each)
    assert_close(dict(got.named_buffers()), dict(want.named_buffers()))


@on_ranks(2)
def test_a_copy_of_one_unit():
    alone, model = MLP(), MLP()
    shard(model, "eager")
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    copied, alone_too = copy.deepcopy(model.blocks[0]), copy.deepcopy(alone.blocks[0])
    assert states_below([copied])[0].is_root and not states_below([copied])[0].forward_prefetch
    assert_trains_like_one_process(copied, compiled(copied), alone_too)
    assert_trains_like_one_process(model, model, alone)


@on_ranks(2)
def test_a_copy_keeps_what_was_set():
    model = MLP(layers=300)  # a chain of prefetches is no chain of recursions
    shard(model, "eager")
    for block, following in zip(model.blocks, model.blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    model.blocks[2].set_gradient_divide_factor(3.0)
    model.set_requires_gradient_sync(False)
    copied = copy.deepcopy(model)
    states, originals = states_below([copied]), states_below([model])
    assert [state.unit.config for state in states] == [state.unit.config for state in originals]
    assert states[1].forward_prefetch == [states[2]] and states[2].backward_prefetch == [states[1]]
    model.set_requires_gradient_sync(True)
    assert not copied.blocks[0]._fsdp_state.unit.config.reduce_grads


@on_ranks(2)
def test_a_copy_keeps_when_reductions_end():
    alone, data = MLP(), batches(1, 8, 10)[0]
    square_loss(alone, data).backward()
    model = nn.ModuleDict({"inner": MLP()})
    shard(model["inner"], "eager")
    model["inner"].set_manual_backward_finalization(True)
    copied = copy.deepcopy(model)["inner"]
    model["inner"].set_manual_backward_finalization(False)
    square_loss(copied, my_part(data)).backward()
    copied.finalize_backward()
    assert_close(full_grads(copied), full_grads(alone))
    copied.set_manual_backward_finalization(False)
    copied.set_is_last_backward(False)
    assert not copy.deepcopy(copied)._get_fsdp_state()._lazy_init().is_last_backward


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(10, 10)

    def encode(self, x):
        return self.inner(x).tanh()


@on_ranks(2)
def test_a_copy_of_a_registered_forward_method():
    alone, model = Encoder(), fully_shard(Encoder())
    register_fsdp_forward_method(model, "encode")
    copied = copy.deepcopy(model)
    before = full_params(model)
    assert_trains_like_one_process(copied, copied.encode, alone, call_alone=alone.encode)
    assert_close(full_params(model), before)


@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
@on_ranks(2)
def test_a_copy_of_a_compiled_model_is_not_compiled(how):
    alone, model = MLP(), MLP()
    call = shard(model, "full" if how == "torch.compile" else "eager")
    if how == "model.compile":
        model.compile(fullgraph=True, backend="aot_eager")
    copied = copy.deepcopy(call)
    assert type(copied) is type(model) and copied._compiled_call_impl is None
    assert_trains_like_one_process(copied, copied, copy.deepcopy(alone))
    assert_trains_like_one_process(model, call, alone)


@on_ranks(2)
def test_a_copy_within_unsharded_is_refused():
    alone, model = MLP(), MLP()
    shard(model, "eager")
    with (
        unsharded(model),
        pytest.raises(RuntimeError, match=r"copy.deepcopy: expected a model between two steps.*MLP"),
    ):
        copy.deepcopy(model)
    copied = copy.deepcopy(model)
    assert_trains_like_one_process(copied, copied, alone)
