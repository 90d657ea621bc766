"""Ending the reduction of gradients by hand, once for several backwards."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compiled import fully_shard
from fsdp_compiled.hooks import group
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    batches,
    full_grads,
    my_part,
    shard,
    square_loss,
)

eager_and_full = pytest.mark.parametrize("mode", ["eager", "full"])


def _sum_alone(micros):
    alone = MLP()
    for micro in micros:
        square_loss(alone, micro).backward()
    return full_grads(alone)


@row("accumulation")
@pytest.mark.parametrize("sync", [True, False])
@eager_and_full
@on_ranks(2)
def test_several_backwards_end_in_one_finalization(mode, sync):
    model, micros = MLP(), batches(3, 8, 10)
    call = shard(model, mode)
    model.set_manual_backward_finalization(True)
    for step in range(2):
        model.set_requires_gradient_sync(sync)
        losses = [square_loss(call, my_part(micro)) for micro in micros[:2]]
        for loss in reversed(losses):  # forward, forward, backward, backward
            loss.backward()
        square_loss(call, my_part(micros[2])).backward()
        if not sync:
            assert all(param.grad is None for param in model.parameters())
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=step == 1)
        if step == 1:
            handle.wait()
            handle.wait()
        assert_close(full_grads(model), _sum_alone(micros))
        model.zero_grad()
    model.set_manual_backward_finalization(False)
    square_loss(call, my_part(micros[0])).backward()
    assert_close(full_grads(model), _sum_alone(micros[:1]))


@row("accumulation", mode="eager")
@on_ranks(2)
def test_the_gradients_of_the_last_unit_wait_for_the_finalization():
    model = MLP()
    shard(model, "eager")
    model.set_manual_backward_finalization(True)
    square_loss(model, my_part(batches(1, 8, 10)[0])).backward()
    assert model.scale.grad is None
    model.finalize_backward()
    assert_close(full_grads(model), _sum_alone(batches(1, 8, 10)))


@row("accumulation", mode="eager")
@on_ranks(2)
def test_finalizing_at_the_wrong_time_is_refused():
    model, x = MLP(), my_part(batches(1, 8, 10)[0])
    shard(model, "eager")
    block = "got MLP.blocks.0; call it on MLP$"
    with pytest.raises(RuntimeError, match=f"set_manual_backward_finalization: expected the outermost unit.*{block}"):
        model.blocks[0].set_manual_backward_finalization(True)
    with pytest.raises(
        RuntimeError, match=r"finalize_backward: call set_manual_backward_finalization\(True\) before"
    ):
        model.finalize_backward()
    with pytest.raises(TypeError, match="enabled: expected True or False, got 1 of int"):
        model.set_manual_backward_finalization(1)
    model.set_manual_backward_finalization(True)
    model.finalize_backward()  # nothing to do
    loss = square_loss(model, x)
    loss.backward()
    handle = model.finalize_backward(async_op=True)
    with pytest.raises(RuntimeError, match="finalize_backward: wait for the handle of the last finalization first"):
        model.finalize_backward()
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="expected a reduction under way, got one that a reset has dropped"):
        handle.wait()
    model.zero_grad()
    square_loss(model, x).backward()
    model.finalize_backward()
    assert_close(full_grads(model), _sum_alone(batches(1, 8, 10)))


class _FinalizesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, model, x):
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        for call in (ctx.model.finalize_backward, lambda: ctx.model.set_manual_backward_finalization(False)):
            with pytest.raises(RuntimeError, match="expected no backward under way"):
                call()
        return None, grad


@row("accumulation", mode="eager")
@on_ranks(2)
def test_finalizing_within_a_backward_is_refused():
    model = fully_shard(nn.Linear(4, 4))
    model.set_manual_backward_finalization(True)
    _FinalizesInBackward.apply(model, model(torch.ones(2, 4))).sum().backward()
    model.finalize_backward()
    assert model.weight.grad is not None


@row("methods")
@eager_and_full
@on_ranks(2)
def test_unsharded_memory_that_is_kept(mode):
    model, data = MLP(), batches(3, 8, 10)
    call = shard(model, mode)
    model.set_keep_unsharded_storage(True)
    places = []
    for x in data:
        square_loss(call, my_part(x)).backward()
        model.unshard()
        places.append(model.scale.data_ptr())
        model.reshard()
        assert model._fsdp_params["scale"].unsharded.param.untyped_storage().nbytes() == 40
    assert len(set(places)) == 1
    assert_close(full_grads(model), _sum_alone(data))
    model.set_keep_unsharded_storage(False)
    model.unshard()
    model.reshard()
    assert model._fsdp_params["scale"].unsharded.param.untyped_storage().nbytes() == 0


@on_ranks(2)
def test_finalization_reshards_what_backwards_left_unsharded():
    model, (data,) = MLP(), batches(1, 8, 10)
    call = shard(model, "eager")
    model.set_manual_backward_finalization(True)
    model.set_reshard_after_backward(False)
    square_loss(call, my_part(data)).backward()
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    model.set_reshard_after_backward(True)
    model.finalize_backward()
    assert_close(full_grads(model), _sum_alone([data]))
    assert all(isinstance(param, DTensor) for param in model.parameters())


@eager_and_full
@on_ranks(2)
def test_what_a_pipelines_groups_have_finished_its_callback_does_not_finish_again(mode):
    """As torch's pipelining ends a step until 2.13; with zeros for what is unused each end would reduce all."""
    model = MLP()
    call, state = shard(model, mode), model._get_fsdp_state()
    model.set_reduce_scatter_unused_params(True)
    with mock.patch.object(group, "launch_reduction", wraps=group.launch_reduction) as reductions:
        for by_groups in (True, False):
            reductions.reset_mock()
            model.set_is_last_backward(False)
            model.set_requires_gradient_sync(False)
            for batch in batches(2, 4, 10):
                square_loss(call, my_part(batch)).backward()
            model.set_is_last_backward(True)
            model.set_requires_gradient_sync(True)
            assert not reductions.called
            for each in state._state_ctx.all_states if by_groups else ():
                each._fsdp_param_group.post_backward()
            state._root_post_backward_final_callback()
            assert reductions.call_count == len(state._state_ctx.all_states)
