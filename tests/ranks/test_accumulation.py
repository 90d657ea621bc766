"""Gradient accumulation: with and without sync, in which dtype, and whatever comes between."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import saved_tensors_hooks

from fsdp_compiled import MixedPrecisionPolicy, fully_shard
from fsdp_compiled.hooks.state import states_below
from tests.support.collectives import counted
from tests.support.graphs import record
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    MODES,
    WITH_REGIONS,
    Tied,
    assert_close,
    batches,
    compiled,
    full_grads,
    my_part,
    shard,
    square_loss,
)
from tests.support.variants import thorough

each_with_regions = pytest.mark.parametrize("mode", WITH_REGIONS)
each_mode = pytest.mark.parametrize("mode", MODES)
eager_and_full = pytest.mark.parametrize("mode", ["eager", "full"])


@row("accumulation")
@each_with_regions
@on_ranks(2)
def test_accumulation_without_sync(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    first, second, third = batches(3, 8, 10)
    for micro in (first, second, third):
        square_loss(alone, micro).backward()
    with counted() as counts:
        for micro in (first, second, third):
            model.set_requires_gradient_sync(micro is third)
            square_loss(call, my_part(micro)).backward()
            if micro is not third:
                assert all(p.grad is None for p in model.parameters())
    assert_close(full_grads(model), full_grads(alone))
    assert not any(state.unit.config.reduces_in_hooks for state in states_below([model]))
    # and nothing is left over for the next step
    model.zero_grad()
    alone.zero_grad()
    square_loss(alone, first).backward()
    with counted() as of_one:
        square_loss(call, my_part(first)).backward()
    assert_close(full_grads(model), full_grads(alone))
    assert counts["reduce_scatter"] == of_one["reduce_scatter"]  # the sums went along


@row("accumulation")
@each_mode
@on_ranks(2)
def test_accumulation_with_a_reduction_each_time(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    for micro in batches(3, 8, 10):
        square_loss(alone, micro).backward()
        square_loss(call, my_part(micro)).backward()
    assert_close(full_grads(model), full_grads(alone))


@row("accumulation")
@each_with_regions
@on_ranks(2)
def test_accumulation_when_forwards_come_before_backwards(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    data = batches(5, 8, 10)
    losses = [square_loss(alone, x) for x in data]
    sum(losses).backward()

    def forward(index, sync):
        model.set_requires_gradient_sync(sync)
        return square_loss(call, my_part(data[index]))

    first = forward(0, sync=False)
    second = forward(1, sync=True)
    model.set_requires_gradient_sync(False)
    first.backward()
    model.set_requires_gradient_sync(True)
    second.backward()
    forward(2, sync=False).backward()
    fourth = forward(3, sync=False)
    fifth = forward(4, sync=True)
    model.set_requires_gradient_sync(False)
    fourth.backward()
    model.set_requires_gradient_sync(True)
    fifth.backward()
    assert_close(full_grads(model), full_grads(alone))


@row("accumulation", "mixed precision")
@each_with_regions
@on_ranks(2)
def test_accumulation_in_fp32_of_bf16_gradients(mode):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = MLP()
    call = shard(model, mode, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    first, second = batches(2, 8, 10)
    square_loss(call, my_part(first)).backward()
    accumulated = {p.gradients.unsharded.grad.dtype for s in states_below([model]) for p in s.params}
    assert accumulated == {torch.float32}
    model.set_requires_gradient_sync(True)
    square_loss(call, my_part(second)).backward()
    alone = MLP()
    (square_loss(alone, first) + square_loss(alone, second)).backward()
    assert_close(full_grads(model), full_grads(alone), rtol=5e-2)


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
    for step in range(3):
        with counted() as counts:
            for index, x in enumerate(batches(3, 8, 10)):
                square_loss(alone, x).backward()
                loss = square_loss(call, my_part(x))
                model.set_requires_gradient_sync(index == 2)
                loss.backward()
        # Each unit reduces once in a step; the first graph, before it is known, for its own micro-batch, too.
        assert counts["reduce_scatter"] == len(states_below([model])) or (mode != "eager" and step == 0)
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


@each_mode
@on_ranks(2)
def test_sync_set_in_inference_mode(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    for index, x in enumerate(batches(2, 8, 10)):
        with torch.inference_mode():
            model.set_requires_gradient_sync(index == 1)
        square_loss(alone, x).backward()
        square_loss(call, my_part(x)).backward()
    assert_close(full_grads(model), full_grads(alone))


@row("accumulation", "mixed precision")
@each_mode
@on_ranks(2)
def test_a_stored_gradient_survives_a_conversion(mode):
    alone, model = MLP().double(), MLP()
    call = shard(model, mode)
    first, second = batches(2, 8, 10)
    model.set_requires_gradient_sync(False)
    square_loss(call, my_part(first)).backward()
    model.double()
    model.set_requires_gradient_sync(True)
    square_loss(call, my_part(second).double()).backward()
    (square_loss(alone, first.double()) + square_loss(alone, second.double())).backward()
    assert_close(full_grads(model), full_grads(alone))


@on_ranks(2)
def test_a_conversion_after_sync_was_set_late():
    """The gradients that take its place are found, too."""
    model, alone, (x,) = MLP(), MLP().double(), batches(1, 8, 10)
    call = shard(model, "full")
    for sync in (False, True):
        loss = square_loss(call, my_part(x))
        model.set_requires_gradient_sync(sync)
        loss.backward()
    model.zero_grad()
    model.double()
    square_loss(call, my_part(x).double()).backward()
    square_loss(alone, x.double()).backward()
    assert_close(full_grads(model), full_grads(alone))


@each_with_regions
@pytest.mark.parametrize("sync", [False, True])
@thorough(when=lambda mode, sync: sync and mode in ("regional", "regions"))
@on_ranks(2)
def test_gradients_of_the_input_alone_leave_sums_as_they_are(mode, sync):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    first, second, other = batches(3, 8, 10)
    model.set_requires_gradient_sync(False)
    square_loss(call, my_part(first)).backward()
    model.set_requires_gradient_sync(sync)
    x = my_part(other).requires_grad_()
    with functorch_config.patch(donated_buffer=False):  # else a graph runs backward once
        loss = square_loss(call, x)
        torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    model.set_requires_gradient_sync(True)
    square_loss(call, my_part(second)).backward()
    sum(square_loss(alone, each) for each in (first, other, second)).backward()
    assert_close(full_grads(model), full_grads(alone))


@pytest.mark.parametrize(("together", "hidden"), [(True, 14), (True, 18), (False, 14)])
@thorough(when=lambda hidden: hidden == 18)
@on_ranks(2)
def test_sums_of_two_models_whose_parameters_have_the_same_names(together, hidden):
    """A graph of both must not give one model's sums to the other; graphs of each take their own."""
    models, alone, first, second = [MLP(), MLP(hidden=hidden)], [MLP(), MLP(hidden=hidden)], *batches(2, 8, 10)
    for model in models:
        shard(model, "eager")
    one, other = ((lambda x, model=model: square_loss(model, x)) for model in models)
    calls = [lambda x: one(x) + other(2 * x)] if together else [one, lambda x: other(2 * x)]
    calls = [compiled(call, inductor=together and hidden == 14) for call in calls]
    models[0].set_requires_gradient_sync(False)
    for batch in (first, second):
        with counted() as counts:
            for call in calls:
                call(my_part(batch)).backward()
        for model, factor in zip(alone, (1, 2), strict=True):
            square_loss(model, factor * batch).backward()
        models[0].set_requires_gradient_sync(True)
    for model, expected in zip(models, alone, strict=True):
        assert_close(full_grads(model), full_grads(expected))
    with counted() as of_one:
        for call in calls:
            call(my_part(first)).backward()
    by_hooks = len(states_below([models[0]])) if together else 0
    assert counts["reduce_scatter"] == of_one["reduce_scatter"] + by_hooks


class _Twice(nn.Module):
    """Reads a parameter twice, with one gradient for both, which compilers take for one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bias, self.weight = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return x @ self.weight + self.bias + self.bias


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("copies_saved", [False, True])
@on_ranks(2)
def test_each_sum_is_taken_once(backend, copies_saved):
    model, alone = _Twice(), _Twice()
    call = torch.compile(fully_shard(model), backend=backend, fullgraph=True)
    for number, batch in enumerate(batches(4, 8, 6)):
        model.set_requires_gradient_sync(number == 2)  # what the last one leaves is reduced outside of graphs
        # as hooks that move activations to the CPU do
        with saved_tensors_hooks(torch.clone, lambda tensor: tensor) if copies_saved else nullcontext():
            output = call(my_part(batch))
        output.square().mean().backward()
        alone(batch).square().mean().backward()
    model.synchronize_gradients()
    assert_close(full_grads(model), full_grads(alone))


@on_ranks(2)
def test_gradients_without_sync_are_not_in_memory_together():
    """A graph adds each to its sum and returns one element for it."""
    model = MLP()
    shard(model, "eager")
    call, recorder = record(model)
    model.set_requires_gradient_sync(False)
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    (output,) = recorder.only("backward").find_nodes(op="output")
    assert {node.meta["val"].numel() for node in output.all_input_nodes} == {1}
    assert all(param.gradients.unsharded.grad is not None for s in states_below([model]) for param in s.params)


class Skipping(nn.Sequential):
    skips = False

    def forward(self, x):
        return x if self.skips else x + super().forward(x)


@pytest.mark.parametrize("number", range(3))
@on_ranks(2)
def test_a_unit_that_one_rank_skips_in_the_last_micro_batch(number):
    def stack():
        torch.manual_seed(0)
        return MLP(layers=0), [Skipping(nn.Linear(10, width), nn.Linear(width, 10)) for width in (7, 11, 13)]

    (model, blocks), (alone, blocks_alone) = stack(), stack()
    model.blocks, alone.blocks = nn.ModuleList(blocks), nn.ModuleList(blocks_alone)
    shard(model, "eager")
    for sync, micro in zip((False, True), batches(2, 8, 10), strict=True):
        model.set_requires_gradient_sync(sync)
        blocks[number].skips = sync and dist.get_rank() == 0
        model(my_part(micro)).square().mean().backward()
        for rank, part in enumerate(micro.chunk(2)):
            blocks_alone[number].skips = sync and rank == 0
            (alone(part).square().mean() / 2).backward()
    assert_close(full_grads(model), full_grads(alone))
