"""Gradients that are not reduced yet: looked at, changed, dropped, reduced without another backward."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compiled import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp_compiled.hooks.state import states_below
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    batches,
    compiled,
    each_mode,
    each_with_regions,
    eager_and_full,
    full_grads,
    my_part,
    shard,
    square_loss,
)
from tests.support.variants import thorough


def _alone(*micros):
    alone = MLP()
    for micro in micros:
        square_loss(alone, micro).backward()
    return full_grads(alone)


def _pending(model):
    """What is pending, by name; asking for it makes no collective."""
    with CommDebugMode() as comm:
        pending = model.get_pending_gradients()
    assert comm.get_total_counts() == 0
    names = {param: name for name, param in model.named_parameters()}
    return {names[param]: sums for param, sums in pending.items()}


@row("accumulation")
@each_with_regions
@thorough(when=lambda mode: mode == "regions")
@on_ranks(2)
def test_reducing_without_another_backward(mode):
    model, micros = MLP(), list(batches(4, 8, 10))
    call = shard(model, mode)
    square_loss(call, my_part(micros[0])).backward()
    assert _pending(model) == {}
    model.set_requires_gradient_sync(False)
    for micro in micros[1:3]:
        square_loss(call, my_part(micro)).backward()
    assert_close(full_grads(model), _alone(micros[0]))
    pending = _pending(model)
    assert pending.keys() == dict(model.named_parameters()).keys()
    for name, alone in MLP().named_parameters():
        unsharded, partial = pending[name]
        assert type(unsharded) is torch.Tensor
        assert unsharded.shape == alone.shape
        assert partial is None
    model.synchronize_gradients()
    assert _pending(model) == {}
    assert_close(full_grads(model), _alone(*micros[:3]))
    model.synchronize_gradients()  # nothing to do
    square_loss(call, my_part(micros[3])).backward()  # still without sync
    assert_close(full_grads(model), _alone(*micros[:3]))
    model.synchronize_gradients()
    assert_close(full_grads(model), _alone(*micros))


@row("accumulation")
@each_with_regions
@thorough(when=lambda mode: mode == "regional")
@on_ranks(2)
def test_dropping_a_micro_batch(mode):
    model, (bad, good) = MLP(), batches(2, 8, 10)
    call = shard(model, mode)
    for set_to_none in (True, False):
        model.set_requires_gradient_sync(False)
        square_loss(call, my_part(bad)).backward()
        model.zero_grad(set_to_none)
        assert all(not unsharded.any() for unsharded, _ in _pending(model).values())
        assert (_pending(model) == {}) == set_to_none
        model.set_requires_gradient_sync(True)
        square_loss(call, my_part(good)).backward()
        assert_close(full_grads(model), _alone(good))
        model.zero_grad(set_to_none)
        assert all((p.grad is None) if set_to_none else not p.grad.to_local().any() for p in model.parameters())


@row("accumulation", "meshes")
@eager_and_full
@pytest.mark.parametrize("drop", [None, True, False])
@thorough(when=lambda mode, drop: mode == "full" and drop is not None)
@on_ranks(4)
def test_sums_over_the_shard_group_only(mode, drop):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, micros = MLP(), list(batches(4, 8, 10))
    call = shard(model, mode, mesh=mesh)
    square_loss(call, my_part(micros[0])).backward()
    model.set_requires_all_reduce(False)
    square_loss(call, my_part(micros[1])).backward()
    model.set_requires_gradient_sync(False)
    square_loss(call, my_part(micros[2])).backward()
    for param, (unsharded, partial) in model.get_pending_gradients().items():
        assert unsharded.shape == param.shape
        assert type(partial) is torch.Tensor
        assert partial.shape == param.to_local().shape
    expected = _alone(*micros[:3])
    if drop is not None:
        model.zero_grad(set_to_none=drop)
        assert (_pending(model) == {}) == drop
        expected = {name: None if drop else torch.zeros_like(grad) for name, grad in expected.items()}
    model.synchronize_gradients()
    assert _pending(model) == {}
    assert_close(full_grads(model), expected)
    model.set_requires_gradient_sync(True)
    square_loss(call, my_part(micros[3])).backward()
    assert_close(full_grads(model), _alone(*(micros if drop is None else micros[3:])))


@on_ranks(4)
def test_sums_over_the_shard_group_have_no_padding():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(1, 5, bias=False), mesh=mesh)
    weight = model.weight
    model.set_requires_all_reduce(False)
    model(torch.ones(1, 1)).sum().backward()
    _, partial = model.get_pending_gradients()[weight]
    assert partial.tolist() == torch.ones_like(weight.to_local()).tolist()
    partial.fill_(2)
    model.synchronize_gradients()
    assert weight.grad.full_tensor().flatten().tolist() == [2] * 5


@row("accumulation", mode="eager")
@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_changes_in_place_count(offload):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    extra = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    model = fully_shard(nn.Linear(2, 4, bias=False), mp_policy=policy, reshard_after_forward=False, **extra)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    weight, seen = model.weight, None
    for value in (2.0, 1.0):
        model(torch.full((1, 2), value)).sum().backward()
        unsharded, _ = model.get_pending_gradients()[weight]
        assert unsharded.dtype == torch.bfloat16
        assert seen in (None, unsharded.data_ptr())
        seen = unsharded.data_ptr()
        unsharded.square_()
        model.reshard()
    model.synchronize_gradients()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad.full_tensor(), torch.full((4, 2), 25.0))


class _Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.first(x) + self.second(x)


@row("accumulation", mode="eager")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("of_all", [True, False])
@on_ranks(2)
def test_dropping_between_forward_and_backward_of_a_list_unit(of_all, set_to_none):
    model = _Two()
    fully_shard([model.first, model.second], reshard_after_forward=False)
    fully_shard(model)
    model.set_reshard_after_backward(False)
    first, second = model.first.weight, model.second.weight
    for sync, value in ((True, 4.0), (False, 2.0)):
        model.set_requires_gradient_sync(sync)
        model(torch.full((1, 4), value)).sum().backward()
    output = model.first(torch.ones(1, 4, requires_grad=True))
    assert model.first.weight is not first  # the unsharded one is registered
    (model if of_all else model.first).zero_grad(set_to_none)
    output.sum().backward()
    model.synchronize_gradients()
    torch.testing.assert_close(first.grad.full_tensor(), torch.ones(4, 4))
    if of_all and set_to_none:
        assert second.grad is None
    else:
        torch.testing.assert_close(second.grad.full_tensor(), torch.full((4, 4), 0.0 if of_all else 6.0))


@row("accumulation", mode="eager")
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
@on_ranks(2)
def test_backwards_in_two_parts(reduce_dtype):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    alone = deepcopy(model).bfloat16()
    for param in alone.parameters():
        param.grad_dtype = reduce_dtype
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    fully_shard(list(model), reshard_after_forward=False, mp_policy=policy)
    fully_shard(model)
    params = list(model.parameters())
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    for step in range(3):
        x = torch.full((2, 4), dist.get_rank() + step + 1.0, dtype=torch.bfloat16, requires_grad=True)
        output = model(x)
        _, groups = stage_backward_input([output], [torch.ones_like(output)], [x], model.parameters())
        stage_backward_weight(model.parameters(), groups)
        alone(x.detach()).sum().backward()
        pending = model.get_pending_gradients()
        for param, other in zip(params, alone.parameters(), strict=True):
            assert torch.equal(pending[param][0], other.grad)
    model.synchronize_gradients()
    for param, other in zip(params, alone.parameters(), strict=True):
        dist.all_reduce(other.grad)
        assert torch.equal(param.grad.full_tensor(), other.grad.float() / 2)
    model.zero_grad()
    assert model.get_pending_gradients() == {}


@row("accumulation", mode="eager")
@on_ranks(2)
def test_a_reduction_under_way_does_not_outlive_zero_grad():
    model, (bad, good) = MLP(), batches(2, 8, 10)
    shard(model, "eager")
    model.set_is_last_backward(False)
    square_loss(model, my_part(bad)).backward()
    model.zero_grad()
    model.set_is_last_backward(True)
    square_loss(model, my_part(good)).backward()
    assert_close(full_grads(model), _alone(good))


@row("interrupts", mode="eager")
@on_ranks(2)
def test_what_a_failed_backward_has_left():
    model, (kept, bad, good) = MLP(), batches(3, 8, 10)
    shard(model, "eager")
    model.set_requires_gradient_sync(False)
    square_loss(model, my_part(kept)).backward()

    def fail(_):
        raise ValueError("in backward")

    for act in (model.get_pending_gradients, model.synchronize_gradients, model.zero_grad):
        half_way = model.blocks[1][1]
        hook = half_way.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        loss = square_loss(model, my_part(bad))
        hook.remove()
        with pytest.raises(ValueError, match="in backward"):
            loss.backward()
        act()
        assert all(param.unsharded.grad is None for each in states_below([model]) for param in each.params)
        if act == model.synchronize_gradients:
            assert_close(full_grads(model), _alone(kept))
    assert _pending(model) == {}
    assert full_grads(model) == dict.fromkeys(_alone(kept))
    model.set_requires_gradient_sync(True)
    square_loss(model, my_part(good)).backward()
    assert_close(full_grads(model), _alone(good))


class _Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(10, 12), nn.GELU(), nn.Linear(12, 10))])

    def forward(self, x):
        return self.blocks[0](x)


@row("tensor parallel")
@eager_and_full
@on_ranks(4)
def test_what_tensor_parallel_ranks_see(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone, model = _Parallel(), _Parallel()
    parallelize_module(model.blocks[0], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    call = shard(model, mode, mesh=mesh["dp"])
    model.set_requires_gradient_sync(False)
    data = batches(2, 8, 10)
    for micro in data:
        square_loss(alone, micro).backward()
        square_loss(call, micro.chunk(2)[mesh["dp"].get_local_rank()]).backward()
    weight = model.blocks[0][0].weight
    unsharded, partial = model.get_pending_gradients()[weight]
    assert isinstance(unsharded, DTensor)
    assert unsharded.device_mesh == mesh["tp"]
    assert unsharded.placements == (Shard(0),)
    assert partial is None
    mean = unsharded.full_tensor()
    dist.all_reduce(mean, dist.ReduceOp.SUM, group=mesh.get_group("dp"))
    assert_close({"": mean / 2}, {"": alone.blocks[0][0].weight.grad})
    model.synchronize_gradients()
    assert_close(full_grads(model), full_grads(alone))


@row("accumulation")
@each_mode
@on_ranks(2)
def test_one_unit_of_several(mode):
    model, data = MLP(), batches(2, 8, 10)
    call = shard(model, mode)
    model.set_requires_gradient_sync(False)
    for micro in data:
        square_loss(call, my_part(micro)).backward()
    model.blocks[0].synchronize_gradients()
    expected = _alone(*data)
    assert_close(full_grads(model), {n: each if n.startswith("blocks.0") else None for n, each in expected.items()})
    assert not any(name.startswith("blocks.0") for name in _pending(model))
    model.synchronize_gradients()
    assert_close(full_grads(model), expected)


@row("accumulation", mode="full")
@pytest.mark.parametrize("set_to_none", [True, False])
@thorough(when=lambda set_to_none: not set_to_none)
@on_ranks(2)
def test_dropping_inside_of_a_compiled_function(set_to_none):
    model, (bad, good) = MLP(), batches(2, 8, 10)
    shard(model, "full")

    def loss_of(x):
        model.zero_grad(set_to_none)
        return square_loss(model, x)

    call = compiled(loss_of)
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        call(my_part(bad)).backward()
        model.set_requires_gradient_sync(True)
        call(my_part(good)).backward()
        assert_close(full_grads(model), _alone(good))


@row("accumulation", mode="eager")
@on_ranks(2)
def test_reducing_at_the_wrong_time_is_refused():
    model = MLP()
    shard(model, "eager")
    model.set_manual_backward_finalization(True)
    square_loss(model, my_part(batches(1, 8, 10)[0])).backward()
    handle = model.finalize_backward(async_op=True)
    with pytest.raises(
        RuntimeError, match="synchronize_gradients: wait for the handle of the last finalization first"
    ):
        model.synchronize_gradients()
    handle.wait()

    def in_backward(_):
        with pytest.raises(RuntimeError, match="synchronize_gradients: expected no backward under way"):
            model.synchronize_gradients()

    x = my_part(batches(1, 8, 10)[0]).requires_grad_()
    x.register_hook(in_backward)
    square_loss(model, x).backward()
    model.finalize_backward()
