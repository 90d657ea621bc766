"""What users change between ``fully_shard`` and a forward, and other parallelism around units."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrize

from fsdp_compiled import fully_shard
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    MODES,
    assert_close,
    assert_trains_like_one_process,
    batches,
    compiled,
    full,
    full_grads,
    my_part,
    shard,
    square_loss,
)
from tests.support.variants import thorough


@row("state dict")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_parameter_put_past_its_module_before_the_first_forward_is_trained(mode):
    alone, model = MLP(width=9, hidden=5), MLP(width=9, hidden=5)  # uneven
    call = shard(model, mode)
    replaced = {}
    for name in ("scale", "blocks.0.0.weight", "blocks.1.3.bias"):
        path, _, attribute = name.rpartition(".")
        module, old = model.get_submodule(path), model.get_parameter(name)
        new = nn.Parameter(distribute_tensor(full(old).detach() * 2, old.device_mesh, old.placements))
        module._parameters[attribute] = replaced[name] = new
        with torch.no_grad():
            alone.get_parameter(name).mul_(2)
    if mode == "eager":
        model.blocks[0].unshard()
        model.blocks[0].reshard()
    assert_trains_like_one_process(model, call, alone, batches(3, 8, 9))
    assert all(model.get_parameter(name) is param for name, param in replaced.items())


@row("module kinds")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_units_added_and_swapped_while_training(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    assert_trains_like_one_process(model, call, alone, batches(2, 8, 10))
    for each in (alone, model):
        torch.manual_seed(5)
        blocks = [nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 10)) for _ in range(2)]
        if each is model:
            blocks = [fully_shard(block) for block in blocks]
        each.blocks.append(blocks[0])
        each.blocks[0] = blocks[1]
    assert_trains_like_one_process(model, call, alone, batches(2, 8, 10))
    assert all(isinstance(param, DTensor) for param in model.parameters())


@row("module kinds", mode="eager")
@on_ranks(2)
def test_replicate_around_units_leaves_them_alone():
    alone, model = MLP(), MLP()
    for block in model.blocks:
        fully_shard(block)
    replicate(model)
    for data in batches(2, 8, 10):
        square_loss(alone, data).backward()
        square_loss(model, my_part(data)).backward()
        assert_close(full_grads(model), full_grads(alone))
    assert replicate.state(model)._param_names == ["scale"]
    assert isinstance(model.blocks[0][0].weight, DTensor)


@row("module kinds")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_a_module_under_replicate_stays_whole(mode):
    alone, model = MLP(), MLP()
    replicate(model.blocks[1])
    fully_shard(model.blocks[0])
    fully_shard(model)
    call = compiled(model, fullgraph=False) if mode == "full" else model
    for data in batches(2, 8, 10):
        square_loss(alone, data).backward()
        square_loss(call, my_part(data)).backward()
        assert_close(full_grads(model), full_grads(alone))
    assert not isinstance(model.blocks[1][0].weight, DTensor)


class Doubled(nn.Module):
    """Parametrizes the weight of a layer while it calls it, as PEFT does for LoRA of parameters."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.inner, self.bias = nn.Linear(10, 10, bias=False), nn.Parameter(torch.randn(10))
        self.inner.weight.requires_grad_(trains)

    def forward(self, x):
        parametrize.register_parametrization(self.inner, "weight", _Double())
        y = self.inner(x) + self.bias
        parametrize.remove_parametrizations(self.inner, "weight", leave_parametrized=False)
        return y.tanh()


class _Double(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("mode", ["eager", "pieces"])
@thorough(when=lambda mode, trains: mode == "pieces" and not trains)
@on_ranks(2)
def test_a_forward_that_parametrizes_a_weight_for_a_while(mode, trains):
    alone, model = MLP(), MLP()
    for each in (alone, model):
        torch.manual_seed(3)
        each.blocks.extend(Doubled(trains) for _ in range(2))
    call = shard(model, "eager")
    if mode == "pieces":
        call = compiled(model, fullgraph=False)
    assert_trains_like_one_process(model, call, alone, batches(3, 8, 10))
    assert all(isinstance(param, DTensor) for param in model.parameters())


class Converted(nn.Module):
    """Converts a layer in every forward, as routers of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.dtype = nn.Linear(10, 10), nn.Linear(10, 10), torch.float32

    def forward(self, x):
        x = self.first(x).to(self.dtype)
        self.gate = self.gate.to(self.dtype)
        return self.gate(x).tanh().float()


@on_ranks(2)
def test_a_forward_that_converts_a_layer():
    alone, model = MLP(), MLP()
    for each in (alone, model):
        torch.manual_seed(3)
        each.blocks.append(Converted())
    call = shard(model, "eager")
    for dtype in (torch.float32, torch.float64):
        alone.blocks[-1].dtype = model.blocks[-1].dtype = dtype
        assert_trains_like_one_process(model, call, alone, batches(3, 8, 10))
    assert model.blocks[-1].gate.weight.dtype == torch.float64


class Resharded(nn.Linear):
    """Lets go of its parameters before its forward has ended, itself or by what needs shards."""

    do: str = "reshard"

    def forward(self, x):
        x = super().forward(x)
        getattr(self, self.do, lambda: None)()
        return x + super().forward(x)


@pytest.mark.parametrize("do", ["reshard", "state_dict"])
@on_ranks(2)
def test_a_forward_that_reshards_its_unit(do):
    alone, model = MLP(), MLP()
    for each in (alone, model):
        torch.manual_seed(3)
        each.blocks.append(Resharded(10, 10))
        each.blocks[-1].do = do
    assert_trains_like_one_process(model, shard(model, "eager"), alone, batches(3, 8, 10))
