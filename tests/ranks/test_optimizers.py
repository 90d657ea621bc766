"""PyTorch's optimizers, clipping, scalers and schedulers around sharded training, against one process."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compiled import fully_shard, step_on_shards
from tests.support.parity import row
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.training import (
    MLP,
    MODES,
    assert_close,
    batches,
    compiled,
    each_with_regions,
    full,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
)
from tests.support.variants import thorough

each_mode = pytest.mark.parametrize("mode", MODES)
eager_and_full = pytest.mark.parametrize("mode", ["eager", "full"])
DATA = (4, 8, 9)  # steps, rows, columns
OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1, foreach=False),
    "sgd-foreach": partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adamw-foreach": partial(optim.AdamW, lr=0.01, eps=1e-3, foreach=True),
    "adamw-fused": partial(optim.AdamW, lr=0.01, eps=1e-3, fused=True),
}


def odd():
    """On 2 ranks every parameter is uneven; on 4 some shards are empty."""
    return MLP(width=9, hidden=5)


def _norm(norm):
    return full(norm).item()


def _backward(alone, call, x):
    square_loss(alone, x).backward()
    square_loss(call, my_part(x)).backward()


@row("optimizers and evaluation")
@each_mode
@on_ranks(2)
def test_clipping_by_the_norm_over_all_ranks(mode):
    alone, model = odd(), odd()
    call = shard(model, mode)
    optimizers = [optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    clips = [
        {"max_norm": 0.01, "foreach": True},
        {"max_norm": 0.01, "foreach": False},
        {"max_norm": 0.01, "norm_type": math.inf},
        {"max_norm": 1e9, "norm_type": 1.0, "error_if_nonfinite": True},
    ]
    for x, clip in zip(batches(*DATA), clips, strict=True):
        _backward(alone, call, x)
        norms = [_norm(nn.utils.clip_grad_norm_(m.parameters(), **clip)) for m in (model, alone)]
        same_on_ranks(norms[0])
        assert norms[0] == pytest.approx(norms[1], rel=1e-5) and (norms[1] > clip["max_norm"]) == (
            clip["max_norm"] < 1
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(full_params(model), full_params(alone))

    _backward(alone, call, batches(*DATA)[0])
    if dist.get_rank() == 1:  # one element on one rank
        model.scale.grad.to_local()[0] = math.inf
    for foreach in (True, False):
        with pytest.raises(RuntimeError, match="total norm .* is non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True, foreach=foreach)


@row("optimizers and evaluation")
@eager_and_full
@on_ranks(4)
def test_clipping_where_shards_are_empty_or_replicated(mode):
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for mesh in (None, replicated):
        alone, model = odd(), odd()
        call = shard(model, mode, mesh=mesh)
        _backward(alone, call, batches(*DATA)[0])
        for norm_type in (2.0, 1.0):  # linalg.vector_norm refuses inf for the empty shards
            norms = [_norm(nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type)) for m in (model, alone)]
            same_on_ranks(norms[0])
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@row("optimizers and evaluation")
@eager_and_full
@on_ranks(2)
def test_optimizers_step_dtensors_as_one_process_steps_tensors(mode):
    alone, model = odd(), odd()
    call = shard(model, mode)
    for make in OPTIMIZERS.values():
        optimizers = [make(m.parameters()) for m in (alone, model)]
        for x in batches(*DATA):
            _backward(alone, call, x)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_close(full_params(model), full_params(alone), rtol=1e-4)
        states = optimizers[1].state.values()
        assert all(isinstance(value, DTensor) for state in states for value in state.values() if value.dim())


@row("optimizers and evaluation")
@eager_and_full
@thorough(when=lambda mode: mode == "eager")
@on_ranks(2)
def test_compiled_optimizers(mode):
    alone, model = odd(), odd()
    call = shard(model, mode)
    make = OPTIMIZERS["adamw-foreach"]
    optimizers = [make(m.parameters()) for m in (alone, model)]
    counter = CompileCounterWithBackend("inductor")
    step = torch.compile(optimizers[1].step, backend=counter)
    for x in batches(*DATA):
        _backward(alone, call, x)
        optimizers[0].step()
        step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_close(full_params(model), full_params(alone), rtol=1e-4)
    assert counter.frame_count == 1  # and not one per step


SCHEDULERS = {
    "lambda": lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    "one cycle": lambda optimizer: optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=4),
}


@row("optimizers and evaluation")
@eager_and_full
@on_ranks(2)
def test_learning_rate_schedulers(mode):
    alone, model = odd(), odd()
    call = shard(model, mode)
    for make in SCHEDULERS.values():
        optimizers = [optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, model)]
        schedulers = [make(optimizer) for optimizer in optimizers]
        seen = []
        for x in batches(*DATA):
            _backward(alone, call, x)
            seen.append(tuple(optimizers[1].param_groups[0][key] for key in ("lr", "momentum")))
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        assert len(set(seen)) == 4
        assert_close(full_params(model), full_params(alone), rtol=1e-4)


@row("optimizers and evaluation")
@eager_and_full
@on_ranks(2)
def test_a_gradient_scaler_skips_overflows_on_all_ranks(mode):
    alone, model = odd(), odd()
    call = shard(model, mode)
    optimizers = [optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, model)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in optimizers]
    scales = []
    for index, x in enumerate(batches(*DATA)):
        losses = [square_loss(alone, x), square_loss(call, my_part(x))]
        before = full_params(model)
        for m, loss, optimizer, scaler in zip((alone, model), losses, optimizers, scalers, strict=True):
            scaler.scale(loss).backward()
            if index == 1:  # in memory of rank 0 alone
                grad = m.scale.grad
                if m is alone or dist.get_rank() == 0:
                    (grad.to_local() if isinstance(grad, DTensor) else grad)[0] = math.inf
            scaler.unscale_(optimizer)
            if index != 1:
                nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert (index == 1) == all(torch.equal(value, before[name]) for name, value in full_params(model).items())
        assert_close(full_params(model), full_params(alone), rtol=1e-4)
        scales.append(scalers[1].get_scale())
    same_on_ranks(scales)
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]


@on_ranks(2)
def test_a_gradient_scaler_skips_on_all_ranks_if_scalars_are_last():
    class Gained(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.gain = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return super().forward(x) * self.gain

    model = fully_shard(Gained())
    optimizer = optim.SGD([*model.parameters()], lr=0.1)
    assert optimizer.param_groups[0]["params"][-1].dim() == 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if dist.get_rank() == 0:
        model.weight.grad.to_local().fill_(math.inf)
    before = full_params(model)
    scaler.step(optimizer)
    scaler.update()
    assert_close(full_params(model), before, rtol=0.0)
    assert scaler.get_scale() == 1.0


@row("optimizers and evaluation")
@eager_and_full
@on_ranks(2)
def test_generation_between_steps(mode):
    pytest.importorskip("transformers")
    from tests.support import huggingface

    alone, model = huggingface.build("llama").train(), huggingface.build("llama", sharded=True).train()
    call = compiled(model) if mode == "full" else model
    optimizers = [optim.SGD(m.parameters(), lr=0.5) for m in (alone, model)]
    told = []

    def assert_tells_the_same(prompt):
        told.append(alone.generate(prompt, max_new_tokens=6, do_sample=False))
        length = 4 + 2 * dist.get_rank()  # synced_gpus: who ends early keeps taking part in the others' gathers
        got = model.generate(my_part(prompt), max_new_tokens=length, do_sample=False, synced_gpus=True)
        torch.testing.assert_close(got, my_part(told[-1])[:, : prompt.shape[1] + length])

    prompt = huggingface.token_batches(1)[0, :, :4]
    for tokens in huggingface.token_batches(2):
        assert_tells_the_same(prompt)
        huggingface.loss(alone, tokens).backward()
        huggingface.loss(call, my_part(tokens)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_tells_the_same(prompt)
    assert_close(full_params(model), full_params(alone), rtol=1e-4)
    assert not torch.equal(told[0], told[1]) and not torch.equal(told[1], told[2])


@on_ranks(2)
def test_what_is_kept_unsharded_is_stale_after_a_step_of_operators_on_lists():
    """torch does not count what they write to DTensors. On a GPU they are the default."""
    for make in (OPTIMIZERS["sgd-foreach"], OPTIMIZERS["adamw-fused"]):
        for wrap in (step_on_shards, lambda optimizer: optimizer):
            alone, model = odd(), odd()
            shard(model, "eager", reshard_after_forward=False)
            model.set_reshard_after_backward(False)
            optimizers = [make(alone.parameters()), wrap(make(model.parameters()))]
            for x in batches(*DATA):
                losses = [square_loss(alone, x), square_loss(model, my_part(x))]
                for loss, optimizer in zip(losses, optimizers, strict=True):
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            model.state_dict()  # reshards
            assert_close(full_params(model), full_params(alone), rtol=1e-4)


@each_with_regions
@on_ranks(4)
def test_a_step_between_forward_and_backward_raises_if_backward_needs_what_it_writes_to(mode):
    """As in one process. Backward would mix old and new values, in silence."""
    alone, model = odd(), odd()
    call, data = shard(model, mode), batches(*DATA)
    sgd = OPTIMIZERS["sgd"]
    model.to(torch.get_default_device())  # which puts an alias in the place of each shard

    def step(make, kind):
        for each in (alone, model):
            params = [param for name, param in each.named_parameters() if name.endswith(kind)]
            (make if each is model else sgd)(params).step()

    for make in (sgd, partial(optim.SGD, lr=0.1, foreach=True), lambda params: step_on_shards(sgd(params))):
        _backward(alone, call, data[0])
        losses = square_loss(alone, data[1]), square_loss(call, my_part(data[1]))
        step(make, "3.bias")  # which no backward needs
        for loss in losses:
            loss.backward()
        assert_close(full_grads(model), full_grads(alone))
        losses = square_loss(alone, data[2]), square_loss(call, my_part(data[2]))
        step(make, "3.weight")
        for each, loss in zip((alone, model), losses, strict=True):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            each.zero_grad()
        assert_close(full_params(model), full_params(alone))


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], partial(optim.SGD, lr=0.1, foreach=True)], ids=["loop", "lists"])
@each_with_regions
@on_ranks(2)
def test_a_closure_may_run_the_backward_of_a_forward_before_the_step(mode, make):
    """Even with gradients left of the step before, which it drops."""
    alone, model = odd(), odd()
    call, optimizers = shard(model, mode), [make(each.parameters()) for each in (alone, model)]
    model.set_reshard_after_backward(False)
    for batch in batches(*DATA):
        losses = square_loss(alone, batch), square_loss(call, my_part(batch))
        for optimizer, loss in zip(optimizers, losses, strict=True):

            def closure(optimizer=optimizer, loss=loss):
                optimizer.zero_grad()
                loss.backward()
                return loss

            optimizer.step(closure)
    model.state_dict()  # reshards
    assert_close(full_params(model), full_params(alone), rtol=1e-4)
