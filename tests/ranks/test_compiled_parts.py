"""Models of which the user has compiled parts by himself, before or after he shards them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_compiled import fully_shard
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    assert_trains_like_one_process,
    batches,
    compiled,
    full_params,
    shard,
    square_loss,
    train,
)
from tests.support.variants import thorough


def _wrapped(block: nn.Module) -> nn.Module:
    return torch.compile(block, fullgraph=True)


def _in_place(block: nn.Module) -> nn.Module:
    block.compile(fullgraph=True)
    return block


def _with_forward(block: nn.Module) -> nn.Module:
    block.forward = torch.compile(block.forward, fullgraph=True)
    return block


COMPILE = {each.__name__: each for each in (_wrapped, _in_place, _with_forward)}


OUTER = {
    ("_wrapped", "before"): "eager",
    ("_in_place", "before"): "compiled",
    ("_with_forward", "before"): "eager",
    ("_wrapped", "after"): "compiled",
    ("_in_place", "after"): "eager",
    ("_with_forward", "after"): "compiled",
    **{(how, "between"): "eager" for how in COMPILE},
}


def _compile_blocks(model: nn.Module, how: str) -> None:
    for name, block in list(model.blocks.named_children()):
        model.blocks.register_module(name, COMPILE[how](block))


@pytest.mark.parametrize("outer", ["eager", "compiled"])
@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("how", COMPILE)
@thorough(when=lambda how, when, outer: outer != OUTER[how, when])  # else every two of the three, but once
@on_ranks(2)
def test_compiled_blocks(how, when, outer):
    """As torchtitan does: blocks are compiled one by one, then sharded; and in other orders."""
    torch._dynamo.reset()
    model, alone = MLP(), MLP()
    if when == "before":
        _compile_blocks(model, how)
    for block in model.blocks:
        fully_shard(block)
    if when == "between":
        _compile_blocks(model, how)
    fully_shard(model)
    if when == "after":
        _compile_blocks(model, how)
    call = torch.compile(model, fullgraph=True) if outer == "compiled" else model
    data = batches(3, 8, 10)
    want = torch.tensor(train(alone, alone, data, square_loss, sharded=False))
    # not the floats, which would have to be equal to the last bit of fp32: Inductor rounds elsewhere
    torch.testing.assert_close(torch.tensor(train(model, call, data, square_loss)), want)
    params = {name.replace("_orig_mod.", ""): param for name, param in full_params(model).items()}
    assert_close(params, full_params(alone))


class Opaque(nn.Module):
    """A layer that Dynamo does not trace: torch gives it parameters of the graph's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(10, 10)])
        self.opaque = torch._dynamo.nonstrict_trace(lambda layer, x: layer(x).tanh())

    def forward(self, x):
        return self.opaque(self.blocks[0], x) + x


@on_ranks(2)
def test_a_layer_that_dynamo_does_not_trace():
    """In one graph its gradients would be lost; torch catches our error, and raises one of its own."""
    model, alone = Opaque(), Opaque()
    call = shard(model, "full")
    with pytest.raises(Exception, match="nonstrict_trace"):
        call(torch.ones(4, 10))
    model.reset_iter_state()
    assert_trains_like_one_process(model, compiled(model, fullgraph=False), alone)
