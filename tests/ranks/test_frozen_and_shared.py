"""Parameters that are frozen, shared or ignored, before training, between steps and after loading."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compiled import MixedPrecisionPolicy, fully_shard
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    Tied,
    assert_close,
    assert_trains_like_one_process,
    batches,
    call_of,
    each_with_regions,
    eager_and_full,
    full,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
    train,
)
from tests.support.variants import thorough


@row("frozen and LoRA")
@each_with_regions
@thorough(when=lambda mode: mode == "regional")
@on_ranks(2)
def test_frozen_at_first_and_unfrozen_later(mode):
    alone, model = MLP(), MLP()
    for m in (alone, model):
        m.blocks[0].requires_grad_(False)
        m.scale.requires_grad = False
    call = shard(model, mode)
    data = batches(3, 8, 10)
    assert_trains_like_one_process(model, call, alone, data)
    for m in (alone, model):
        for param in m.parameters():
            param.requires_grad = True
    assert_trains_like_one_process(model, call, alone, data)
    for m in (alone, model):
        m.blocks[1].requires_grad_(False)
    square_loss(call, my_part(data[0])).backward()
    square_loss(alone, data[0]).backward()
    assert_close(full_grads(model), full_grads(alone))


@pytest.mark.parametrize("keeps", [{}, {"reshard_after_forward": False}], ids=["root", "all"])
@eager_and_full
@on_ranks(2)
def test_what_is_set_on_parameters_that_forward_has_left_unsharded_stays(mode, keeps):
    alone, model = MLP(), MLP()
    call, data = shard(model, mode, **keeps), batches(2, 8, 10)
    sharded = list(model.parameters())
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in (alone.parameters(), sharded)]

    def assert_trains():
        train(alone, alone, data, square_loss, sharded=False, optimizer=optimizers[0])
        train(model, call, data, square_loss, optimizer=optimizers[1])
        assert_close(full_params(model), full_params(alone))

    for frozen in ("blocks.0", "", "scale"):
        model(my_part(data[0]))  # without a backward: the root is not resharded
        assert not all(isinstance(param, DTensor) for param in model.parameters())
        for m in (alone, model):
            for name, param in m.named_parameters():
                param.requires_grad = not (frozen and name.startswith(frozen))
        assert_trains()
    model(my_part(data[0]))
    for param in (*sharded, *alone.parameters()):  # as they are registered between steps
        param.requires_grad = param.ndim == 1
    assert_trains()
    model(my_part(data[0]))
    model.scale.requires_grad = False
    assert not copy.deepcopy(model).scale.requires_grad


@pytest.mark.parametrize("syncs", [True, False])
@each_with_regions
@on_ranks(2)
def test_what_is_frozen_between_forward_and_backward_gets_no_gradient_of_it(mode, syncs):
    alone, model = MLP(), MLP()
    call, data = shard(model, mode), batches(3, 8, 10)
    for step, x in enumerate(data):
        model.set_requires_gradient_sync(syncs or step == 2)
        losses = square_loss(alone, x), square_loss(call, my_part(x))
        for each, loss in zip((alone, model), losses, strict=True):
            each.scale.requires_grad = step == 0
            each.blocks[0].requires_grad_(step == 1)
            loss.backward()
            each.requires_grad_()
        if syncs:
            assert_close(full_grads(model), full_grads(alone))
    assert_close(full_grads(model), full_grads(alone))


class _Marked(nn.Parameter):
    """The same memory as an object that knows more, as a 4-bit weight of bitsandbytes does."""

    def __new__(cls, data, requires_grad=False):
        return torch.Tensor._make_subclass(cls, data, requires_grad)


class _Marks(nn.Linear):
    """Puts such an object in its weight's place, in a forward that finds another one there."""

    def forward(self, x):
        if not isinstance(self.weight, _Marked):
            self.weight = _Marked(self.weight)
            self.weight.scale = 2.0
        return self.weight.scale * super().forward(x)


@pytest.mark.parametrize("reshards", [True, False])
@eager_and_full
@on_ranks(2)
def test_a_module_that_puts_its_own_object_in_place_of_a_frozen_weight(mode, reshards):
    alone, model = MLP(), MLP()
    for m in (alone, model):
        for block in m.blocks:
            block[0].__class__ = _Marks
            block[0].weight.requires_grad = False
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshards)
    fully_shard(model)
    call = torch.compile(model, backend="aot_eager") if mode == "full" else model  # Dynamo does not trace it
    assert_trains_like_one_process(model, call, alone, batches(3, 8, 10))
    assert isinstance(model.blocks[0][0].weight, DTensor)
    with pytest.raises(TypeError, match=r"^blocks\.0\.0\.weight: expected a sharded DTensor, got a _Marked"):
        model.blocks[0][0].weight = _Marked(torch.ones(10, 10))  # elsewhere
    model.unshard()
    model.blocks[0].unshard()
    with pytest.raises(TypeError, match=r"^blocks\.0\.0\.weight: expected a sharded DTensor, got a _Marked"):
        model.blocks[0][0].weight = _Marked(model.blocks[0][0].weight, requires_grad=True)  # its gradient were lost
    with pytest.raises(TypeError, match=r"^blocks\.0\.0\.bias: expected a sharded DTensor, got a _Marked"):
        model.blocks[0][0].bias = _Marked(model.blocks[0][0].bias)  # as were that of the bias


INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64)


class _Scaled(nn.Sequential):
    """Multiplies by parameters that are no floating point, as quantised weights are."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 10), nn.GELU())
        for i, dtype in enumerate(INTEGERS):
            factors = (torch.arange(10) % (2 + i)).to(dtype)
            self.register_parameter(f"factors_{i}", nn.Parameter(factors, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for i, dtype in enumerate(INTEGERS):
            factors = getattr(self, f"factors_{i}")
            assert factors.dtype == dtype
            x = x * (1 + factors.to(x.dtype) / 32)
        return x


class _WithIntegers(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Scaled() for _ in range(2))


@row("frozen and LoRA")
@each_with_regions
@on_ranks(2)
def test_integers_are_gathered_as_they_are(mode):
    alone, model = _WithIntegers(), _WithIntegers()
    call = shard(model, mode, mp_policy=MixedPrecisionPolicy(torch.float64, torch.float32))
    data = batches(3, 8, 10)
    losses = torch.tensor(train(alone, alone, data, square_loss, sharded=False))
    torch.testing.assert_close(torch.tensor(train(model, call, data, square_loss)), losses, rtol=1e-5, atol=0)


class _Tied(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.blocks[1][3] = self.blocks[0][3]


@row("tied and shared")
@eager_and_full
@on_ranks(2)
def test_parameters_and_modules_shared_inside_a_unit(mode):
    alone, model = _Tied(), _Tied()
    fully_shard(model)
    assert model.blocks[1][0].weight is model.blocks[0][0].weight
    call = call_of(model, mode)
    assert_trains_like_one_process(model, call, alone)


@row("ignored and unused")
@each_with_regions
@on_ranks(2)
def test_ignored_parameters_are_left_alone(mode):
    alone, model = MLP(), MLP()
    ignored = model.blocks[0][0].weight
    call = shard(model, mode, ignored_params={ignored})
    assert model.blocks[0][0].weight is ignored
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    square_loss(alone, batches(1, 8, 10)[0]).backward()
    got, want = full_grads(model), full_grads(alone)
    dist.all_reduce(got["blocks.0.0.weight"], op=dist.ReduceOp.AVG)  # what fully_shard left to the user
    assert_close(got, want)


@row("state dict", "tied and shared")
@eager_and_full
@on_ranks(2)
def test_loading_shared_parameters_with_assign(mode):
    alone, model = Tied(), fully_shard(Tied())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert model.last.weight is model.first.weight
    call = call_of(model, mode)
    train(model, call, batches(2, 8, 10), square_loss)
    train(alone, alone, batches(2, 8, 10), square_loss, sharded=False)
    torch.testing.assert_close(full(model.state_dict()["last.weight"]), alone.last.weight.detach())
