"""Units that return objects: what these hold trains, and what they compute later."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from fsdp_compiled import fully_shard
from tests.support.ranks import on_ranks
from tests.support.training import (
    assert_close,
    assert_trains_like_one_process,
    batches,
    full_grads,
    my_part,
    shard,
)

from .test_sharding import Flow


class Policy(Flow):
    """Returns a tensor, too, of which the loss may know nothing."""

    def forward(self):
        return self.weight.sum(), super().forward()


@on_ranks(2)
def test_a_model_that_returns_a_tensor_and_an_object_that_computes():
    model, alone = fully_shard(Policy()), Policy()
    assert_trains_like_one_process(model, lambda x: model()[1](x), alone, call_alone=lambda x: alone()[1](x))


class ComputedAhead(Flow):
    def forward(self, x):
        return functools.partial(torch.mul, super().forward()(x))


@on_ranks(2)
def test_an_object_that_is_differentiated_by_inputs_before_the_backward():
    """By the first, the unit's inputs get their gradients, and none of its parameters has one."""
    model, alone = fully_shard(ComputedAhead()), ComputedAhead()
    model.set_reshard_after_backward(False)
    for module, x in ((model, my_part(batches(1, 8, 10)[0])), (alone, batches(1, 8, 10)[0])):
        x.requires_grad_()
        loss = module(x)(2).square().mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
    model.reshard()
    assert_close(full_grads(model), full_grads(alone))


class Box:
    def __init__(self, output):
        self.output = output


class Boxes(nn.Module):
    """Its blocks return objects; their parameters are as large as what the allocator gives back to the system."""

    def __init__(self, hides: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.hides = hides
        self.first = nn.Linear(512, 512)
        self.blocks = nn.ModuleList(InBox(hides) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            box = block(x)
            x = x + (box.output[0] if self.hides else box.output)
        return x


class InBox(nn.Sequential):
    def __init__(self, hides: bool) -> None:
        super().__init__(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
        self.hides = hides

    def forward(self, x):
        output = super().forward(x)
        return Box([output] if self.hides else output)


@on_ranks(2)
def test_objects_with_tensors_as_attributes_train():
    """Backward waits for a block that is all-gathered ahead before it uses its parameters."""
    model, alone = Boxes(), Boxes()
    assert_trains_like_one_process(model, shard(model, "eager"), alone, batches(3, 8, 512))


@on_ranks(2)
def test_objects_that_hide_their_tensors_are_not_all_gathered_ahead():
    """Nothing tells of their backward in time: it would use what has not arrived yet."""
    model = Boxes(hides=True)
    call = shard(model, "eager")
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        call(my_part(batches(1, 8, 512)[0])).sum().backward()
