"""Regions whose blocks are equal and called in different ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_compiled import fully_shard
from tests.support.drawn_regions import check_calls
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    assert_trains_like_one_process,
    batches,
    compiled,
    full_grads,
    my_part,
    shard,
    square_loss,
    with_regions,
)
from tests.support.variants import thorough

NOTHING = ((), {})
CALLS = {
    "a dataclass": [NOTHING, ((), {"a": "dataclass"}), ((), {"a": "other dataclass"}), NOTHING],
    "a dataclass in a list": [NOTHING, (("dataclass in a list",), {}), NOTHING],
    "an object": [NOTHING, (("object",), {}), (("other object",), {})],
    "a function": [NOTHING, ((), {"a": "function"}), ((), {"a": "closure"})],
    "a module": [NOTHING, (("module",), {})],
    "an object before a tensor": [(("other",), {}), (("object", "other"), {}), (("other", "object"), {})],
    "a keyword": [(("other",), {}), ((), {"a": "other"}), ((), {"b": "other"}), (("0.5",), {}), ((), {"a": "0.5"})],
    "a container": [(("other",), {}), (("tuple of one",), {}), (("list",), {}), (("tuple",), {}), (("dict",), {})],
    "a kind of number": [(("1",), {}), (("True",), {}), (("1.0",), {})],
    "the same tensor twice": [(("x", "other"), {}), (("x", "x"), {}), (("other", "x"), {}), (("x", "other"), {})],
    "an attribute of the block": [(("buffer",), {}), (("first buffer",), {}), (("vector",), {}), (("buffer",), {})],
}
VARIED = ("a dataclass in a list", "an object before a tensor", "a container", "a kind of number")


@row("module kinds", mode="regions")
@pytest.mark.parametrize("name", CALLS)
@thorough(when=lambda name: name in VARIED)
@on_ranks(2)
def test_equal_blocks_that_are_called_otherwise(name):
    check_calls(CALLS[name])


class Factor:
    value = 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x, factor=None):
        return x + self.linear(x).tanh() * (1.0 if factor is None else factor.value)


class Model(nn.Module):
    """The second and the third block take an object each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.factors = nn.Parameter(torch.rand(10) + 0.5), (None, Factor(), Factor())
        self.blocks = nn.ModuleList(Block() for _ in self.factors)

    def forward(self, x):
        x = x * self.scale
        for block, factor in zip(self.blocks, self.factors, strict=True):
            x = block(x, factor)
        return x


@row("module kinds", mode="regions")
@on_ranks(2)
def test_an_argument_that_changes_between_calls():
    alone, model = Model(), Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with_regions(model, model.blocks)
    call = compiled(model)
    for value in (1, 3, 2):
        alone.factors[2].value = model.factors[2].value = value
        assert_trains_like_one_process(model, call, alone)


@on_ranks(2)
def test_a_block_that_is_called_by_itself():
    alone, model, (x,) = MLP(), MLP(), batches(1, 8, 10)
    call = shard(model, "regions")
    call(my_part(x))
    square_loss(compiled(model.blocks[0]), my_part(x)).backward()
    square_loss(alone.blocks[0], x).backward()
    assert_close(full_grads(model), full_grads(alone))
