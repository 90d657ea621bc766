"""What users ask of a unit: unshard, reshard, prefetch lists, forward methods of other names."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compiled import FSDPModule, fully_shard, register_fsdp_forward_method
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_trains_like_one_process,
    compiled,
    shard,
)


@row("methods", mode="eager")
@on_ranks(2)
def test_unshard_reshard_and_the_handle():
    model = MLP()
    shard(model, "eager")
    block = model.blocks[0]
    assert isinstance(block, FSDPModule)
    sharded = block[0].weight
    assert isinstance(sharded, DTensor)
    handle = block.unshard(async_op=True)
    assert block[0].weight is sharded
    handle.wait()
    handle.wait()
    assert not isinstance(block[0].weight, DTensor)
    torch.testing.assert_close(block[0].weight, MLP().blocks[0][0].weight)
    block.reshard()
    assert block[0].weight is sharded
    assert block.unshard() is None
    torch.testing.assert_close(block[3].bias, MLP().blocks[0][3].bias)


@row("methods", mode="eager")
@on_ranks(2)
def test_explicit_prefetch_lists():
    alone, model = MLP(layers=3), MLP(layers=3)
    call = shard(model, "eager")
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([])
    assert_trains_like_one_process(model, call, alone)
    assert all(isinstance(p, DTensor) for p in model.parameters())


class Encoder(nn.Module):
    """Trained by another method than ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(10, 10)

    def encode(self, x):
        return self.inner(x).relu()


@row("methods")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_a_registered_forward_method(mode):
    alone, model = Encoder(), Encoder()
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(nn.Linear(1, 1), "no_such_method_but_not_sharded_either")
    with pytest.raises(ValueError, match="FSDPEncoder: expected a method 'decode', found none"):
        register_fsdp_forward_method(model, "decode")
    call = compiled(model.encode) if mode == "full" else model.encode
    assert_trains_like_one_process(model, call, alone, call_alone=alone.encode)


class BreakingEncoder(Encoder):
    def encode(self, x):
        x = super().encode(x)
        torch._dynamo.graph_break()
        return x + self.inner.bias


@pytest.mark.parametrize("register", [register_fsdp_forward_method, torch_fsdp.register_fsdp_forward_method])
@on_ranks(2)
def test_a_registered_forward_method_that_breaks_the_graph(register):
    alone, model = BreakingEncoder(), BreakingEncoder()
    fully_shard(model)
    register(model, "encode")
    call = compiled(lambda x: model.encode(x), fullgraph=False)
    assert_trains_like_one_process(model, call, alone, call_alone=alone.encode)


class CallingItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(10, 10)
        self.inner = nn.Linear(10, 10)
        self.scale = nn.Parameter(torch.full((10,), 2.0))

    def forward(self, x):
        return self.inner(x) * self.scale

    def encode(self, x):
        return self(self.first(x) * self.scale) * self.scale


class AroundIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = CallingItself()
        self.last = nn.Linear(10, 10)

    def forward(self, x):
        return self.last(self.unit.encode(self.last(x)))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_outermost", [True, False])
@on_ranks(2)
def test_a_registered_forward_method_that_calls_its_module_and_reads_parameters(is_outermost, is_compiled):
    alone, model = (CallingItself(), CallingItself()) if is_outermost else (AroundIt(), AroundIt())
    unit = model if is_outermost else model.unit
    for module in dict.fromkeys((unit, model)):
        fully_shard(module)
    register_fsdp_forward_method(unit, "encode")
    if is_compiled:
        unit.compile()
    call, call_alone = (model.encode, alone.encode) if is_outermost else (model, alone)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(call(torch.ones(4, 10)), call_alone(torch.ones(4, 10)))
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert_trains_like_one_process(model, call, alone, call_alone=call_alone)


@on_ranks(2)
def test_a_registered_forward_method_that_trains():
    alone, model = CallingItself(), CallingItself()
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")

    def steps(module, optimizer, x):
        for _ in range(2):
            module(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model.steps = functools.partial(steps, model)
    register_fsdp_forward_method(model, "steps")
    optimizer, optimizer_alone = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone))
    model.steps(optimizer, torch.ones(4, 10))
    steps(alone, optimizer_alone, torch.ones(4, 10))
    assert_trains_like_one_process(model, model.encode, alone, call_alone=alone.encode)
