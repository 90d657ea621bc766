"""Blocks as regions on several ranks: what only regions could get wrong, through code generation too."""

from __future__ import annotations

import unittest
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import compile, fully_shard
from fsdp_compiled.regions.block import RegionModule
from fsdp_compiled.regions.choose import set_regions
from tests.support.graphs import record, regions_of, sequence
from tests.support.parity import row
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.training import (
    assert_close,
    assert_trains_like_one_process,
    assert_trains_like_replicas,
    batches,
    compiled,
    full_grads,
    full_params,
    llama,
    llama_loss,
    my_part,
    square_loss,
    token_batches,
    train,
    with_regions,
)


class Block(nn.Module):
    """A block with a constant of its own."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10, bias=False)
        self.norm = nn.LayerNorm(10)

    def forward(self, x, scale=1.0):
        return x + self.down(self.up(self.norm(x)).tanh()) * (scale / (1 + self.index % 2))


class Stack(nn.Module):
    def __init__(self, blocks=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(10) + 0.5)
        self.blocks = nn.ModuleList(blocks() if blocks else (Block(index) for index in range(4)))

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def _sharded(model, **kwargs):
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    return model


def _flat(model):
    set_regions(_sharded(model), "off")
    return model


def _with_regions(model, **kwargs):
    with_regions(_sharded(model, **kwargs), model.blocks)
    return model


@row("training", mode="regions")
@on_ranks(2)
def test_losses_and_gradients_are_those_of_the_flat_graph_through_code_generation():
    trained = {}
    for regions in ("off", "auto"):
        model = _sharded(Stack())
        losses = train(model, compile(model, regions=regions, fullgraph=True), batches(3, 8, 10), square_loss)
        same_on_ranks(losses)
        trained[regions] = torch.tensor(losses), full_params(model)
    torch.testing.assert_close(trained["auto"][0], trained["off"][0], rtol=1e-6, atol=0)
    assert_close(trained["auto"][1], trained["off"][1])


class Saturating(Block):
    """Backward needs what the block returns."""

    def forward(self, x):
        return self.down(self.up(x).sin()).tanh()


class ReadsAgain(Stack):
    """Compute between blocks whose results have the size of what a block has kept for backward."""

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            y = block(x)
            x = ((x + y) * 1.5).sin() + y
        return x


@row("training", mode="regions")
@on_ranks(2)
def test_what_a_block_keeps_for_backward_is_not_overwritten():
    def blocks():
        return [Saturating(index) for index in range(4)]

    model = _sharded(ReadsAgain(blocks))
    call = compile(model, regions="auto", fullgraph=True)
    assert_trains_like_one_process(model, call, ReadsAgain(blocks))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(10, 10), nn.BatchNorm1d(10)

    def forward(self, x):
        return self.norm(self.linear(x)).tanh()


@row("ignored and unused", mode="regions")
@on_ranks(2)
def test_blocks_that_change_their_buffers():
    def blocks():
        return [Normed() for _ in range(3)]

    alone, model = Stack(blocks), _sharded(Stack(blocks))
    set_regions(model, list(model.blocks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch 2.13, which refuses
        assert_trains_like_replicas(model, compiled(model), alone, batches(3, 8, 10))


def _cayley(linear):
    return nn.utils.parametrizations.orthogonal(linear, orthogonal_map="cayley", use_trivialization=False)


@pytest.mark.parametrize(
    ("change", "why"),
    [(nn.utils.spectral_norm, "no out=, got one of normalize"), (_cayley, "no operator with effects")],
)
@on_ranks(2)
def test_blocks_that_torch_compiles_to_wrong_numbers_are_no_regions(change, why):
    if change is _cayley and torch.__version__ < "2.13":
        raise unittest.SkipTest("torch 2.11 compiles these to the right numbers")

    def blocks():
        return [nn.Sequential(change(nn.Linear(10, 10)), nn.Tanh()) for _ in range(3)]

    alone, model = Stack(blocks), _sharded(Stack(blocks))
    set_regions(model, list(model.blocks))
    with pytest.warns(UserWarning, match=why):
        assert_trains_like_replicas(model, compiled(model), alone, batches(3, 8, 10))


class Filtered(nn.Module):
    """A filter in the frequency domain: its backward is called with conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.filter = nn.Linear(10, 10), nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x):
        frequencies = torch.fft.rfft(self.linear(x)) * self.filter
        return (x + torch.fft.irfft(frequencies, n=10)).tanh()


@on_ranks(2)
def test_blocks_that_compute_with_complex_numbers_through_code_generation():
    def blocks():
        return [Filtered() for _ in range(4)]

    model = _sharded(Stack(blocks))
    assert_trains_like_one_process(model, compile(model, regions="auto", fullgraph=True), Stack(blocks))


@row("training", mode="regions")
@on_ranks(2)
def test_without_theirs_in_the_slot_the_passes_refuse_regions():
    model = _sharded(Stack())
    set_regions(model, list(model.blocks))
    text = (
        r"regions: 4 blocks \(Block\) are compiled as a part of the graph, .* raised: \w+: .*; compile the model by"
    )
    with config.patch(_pre_fusion_custom_pass=None), pytest.warns(UserWarning, match=text):
        square_loss(compiled(model), my_part(batches(1, 8, 10)[0])).backward()


@row("training", mode="regions")
@on_ranks(2)
def test_a_llama_trains_as_one_process_does():
    alone, model = llama(), _with_regions(llama())
    data = token_batches(3)
    want = train(alone, alone, data, llama_loss, sharded=False)
    got = train(model, compiled(model), data, llama_loss)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)


@row("reshard", mode="regions")
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_backward_all_gathers_again_what_forward_has_freed(reshard):
    model = _with_regions(Stack(), reshard_after_forward=reshard)
    call, recorder = record(model, lower=False)
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    assert len(sequence(recorder.only("forward"), "unshard")) == 1 + 4 * 5
    # backward reads weights only, and keeps the root's
    assert len(sequence(recorder.only("backward"), "unshard")) == (4 * 3 if reshard else 0)
    assert len(sequence(recorder.only("backward"), "reduce_grad")) == 1 + 4 * 5


class Dropping(Block):
    def forward(self, x):
        return x + nn.functional.dropout(self.down(self.up(x).tanh()), 0.5)


@row("training", mode="regions")
@pytest.mark.parametrize("inductor", [True, False])
@on_ranks(2)
def test_backward_drops_what_forward_has_dropped(inductor):
    model = _with_regions(Stack(lambda: [Dropping(index) for index in range(2)]))
    _assert_backward_drops_alike(compiled(model, inductor=inductor))


class DroppingInCheckpoint(Dropping):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("as_eager", [True, False])
@on_ranks(2)
def test_a_checkpoint_in_a_region_drops_what_forward_has_dropped(as_eager):
    model = _with_regions(Stack(lambda: [DroppingInCheckpoint(index) for index in range(2)]))
    with config.patch(fallback_random=as_eager):  # else the graph holds the states of random generators
        _assert_backward_drops_alike(compiled(model, inductor=True))


def _assert_backward_drops_alike(call) -> None:
    x = my_part(batches(1, 8, 10)[0]).requires_grad_()
    torch.manual_seed(0)
    (grad,) = torch.autograd.grad(call(x).sum(), x)
    step = 1e-3 * torch.ones_like(x)
    moved = []
    for sign in (1, -1):
        torch.manual_seed(0)
        moved.append(call((x + sign * step).detach().requires_grad_()).sum())
    torch.testing.assert_close((moved[0] - moved[1]).detach() / 2, (grad * step).sum(), rtol=2e-2, atol=1e-4)
    outputs = [call(x).detach() for _ in range(2)]
    assert not torch.equal(*outputs)


class Experts(nn.Module):
    """Every token goes to the experts that a router weighs, each a unit inside of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(10, 2)
        self.experts = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def _experts():
    return Stack(lambda: [Experts() for _ in range(2)])


def _experts_in_regions():
    model = _experts()
    for block in model.blocks:
        for expert in block.experts:
            fully_shard(expert)
    return _with_regions(model)


@row("module kinds", mode="regions")
@on_ranks(2)
def test_blocks_with_units_inside():
    alone, model = _experts(), _experts_in_regions()
    assert_trains_like_one_process(model, compiled(model), alone)


@row("module kinds", mode="regions")
@on_ranks(2)
def test_regions_inside_a_region():
    alone, model = _experts(), _experts_in_regions()
    for block in model.blocks:
        set_regions(block.experts, list(block.experts))
    assert all(isinstance(each, RegionModule) for block in model.blocks for each in (block, *block.experts))
    assert_trains_like_one_process(model, compiled(model), alone)


class Surrounded(Stack):
    """Blocks that are called in other surroundings each."""

    def forward(self, x):
        x = self.blocks[0](x * self.scale)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.blocks[1](x)
        with torch.no_grad():
            y = self.blocks[2](x)
        return self.blocks[3](x) + y


class Sums(nn.Module):
    """Layers of equal shapes in any order."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(10, 10))

    def forward(self, x):
        return x + (self.a(x).tanh() + 2 * self.b(x).sin() + 3 * self.c(x)) / 9


class Tied(nn.Module):
    """Three names for two layers of equal shapes."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)])
        self.a, self.b, self.c = (self.layers[index] for index in layers)

    def forward(self, x):
        return x + (self.a(x).tanh() + 2 * self.b(x).sin() + 3 * self.c(x)) / 9


class Numbered(Block):
    def forward(self, x):
        return x + self.down(self.up(x).tanh()) / (2 + self.index)


ALIKE = {
    "order of parameters": lambda: Stack(lambda: [Sums(names) for names in ("abc", "cab", "abc")]),
    "ties": lambda: Stack(lambda: [Tied(0, 0, 1), Tied(0, 1, 1), Tied(0, 1, 0)]),
    "constants": lambda: Stack(lambda: [Numbered(index) for index in range(18)]),
}


@row("module kinds", mode="regions")
@pytest.mark.parametrize("name", ALIKE)
@on_ranks(2)
def test_blocks_that_only_look_alike(name):
    flat, model = _flat(ALIKE[name]()), _with_regions(ALIKE[name]())
    want = train(flat, compiled(flat), batches(3, 8, 10), square_loss)
    assert train(model, compiled(model), batches(3, 8, 10), square_loss) == pytest.approx(want, rel=1e-6)
    assert_close(full_params(model), full_params(flat), rtol=1e-6)


@row("module kinds", mode="regions")
@on_ranks(2)
def test_blocks_under_other_modes_are_parts_of_the_graph():
    flat, model = _flat(Surrounded()), _with_regions(Surrounded())
    want = train(flat, compiled(flat), batches(3, 8, 10), square_loss)
    with pytest.warns(UserWarning, match=r"regions: a block \(Block\) is compiled .* under other modes .*autocast"):
        got = train(model, compiled(model), batches(3, 8, 10), square_loss)
    assert got == pytest.approx(want, rel=1e-6)
    assert_close(full_params(model), full_params(flat), rtol=1e-6)


class Sines(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (torch.sin if func is torch.Tensor.tanh else func)(*args, **(kwargs or {}))


class InModes(Stack):
    def forward(self, x):
        x = x * self.scale
        for index, block in enumerate(self.blocks):
            with Sines() if index % 2 else nullcontext():
                x = block(x)
        return x


@on_ranks(1)
def test_torch_function_modes_count_in_the_blocks_that_they_surround():
    model = _with_regions(InModes())
    call, recorder = record(model, lower=False)
    assert_trains_like_one_process(model, call, InModes())
    assert regions_of(recorder.only("forward", after=True))


class ReturnsItsInput(Block):
    def forward(self, x):
        return x, super().forward(x)


class Breaks(Block):
    def forward(self, x):
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        return super().forward(x)


class OfPairs(Stack):
    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            before, x = block(x)
            x = x + before
        return x


@row("module kinds", mode="regions")
@on_ranks(2)
def test_a_block_that_torch_cannot_make_a_region_of_is_a_part_of_the_graph():
    def blocks():
        return [ReturnsItsInput(index) for index in range(2)]

    alone, model = OfPairs(blocks), _with_regions(OfPairs(blocks))
    call = compiled(model)
    with pytest.warns(
        UserWarning, match=r"regions: 2 blocks \(ReturnsItsInput\) are compiled as a part of the graph"
    ):
        square_loss(call, my_part(batches(1, 8, 10)[0]))
    assert_trains_like_one_process(model, call, alone)


@row("module kinds", mode="regions")
@on_ranks(2)
def test_a_graph_break_inside_a_block():
    def blocks():
        return [Breaks(index) for index in range(2)]

    alone, model = Stack(blocks), _with_regions(Stack(blocks))
    call = compiled(model, fullgraph=False)
    with pytest.warns(UserWarning, match=r"regions: 2 blocks \(Breaks\) are compiled as a part of the graph"):
        square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    model.zero_grad()
    assert_trains_like_one_process(model, call, alone)


@row("module kinds", mode="regions")
@on_ranks(2)
def test_an_error_that_regions_do_not_cause_leaves_them():
    model = _with_regions(Stack())
    call = compiled(model)
    with pytest.raises(Exception, match="(?i)size|shape"):
        call(torch.ones(2, 7))
    call, recorder = record(model, lower=False)
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    assert len(regions_of(recorder.only("forward", after=True))) == 4


@row("frozen and LoRA", mode="regions")
@on_ranks(2)
def test_blocks_that_train_different_parameters():
    alone, model = Stack(), Stack()
    for each in (alone, model):
        each.blocks[1].up.weight.requires_grad = False
        each.blocks[2].requires_grad_(False)
        each.scale.requires_grad = False
    call = compiled(_with_regions(model))
    square_loss(alone, batches(1, 8, 10)[0]).backward()
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    assert_close(full_grads(model), full_grads(alone))


class Unused(Block):
    """One parameter is read in training alone, and one never."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.spare = nn.Parameter(torch.rand(10))

    def forward(self, x):
        return super().forward(x) + (0 if self.index else self.spare)


@row("ignored and unused", mode="regions")
@on_ranks(2)
def test_a_parameter_that_a_block_does_not_read_has_no_gradient():
    def blocks():
        return [Unused(index) for index in range(2)]

    alone, model = Stack(blocks), _with_regions(Stack(blocks))
    call = compiled(model)
    square_loss(alone, batches(1, 8, 10)[0]).backward()
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    assert model.blocks[1].spare.grad is None
    assert_close(full_grads(model), full_grads(alone))


@row("ignored and unused", mode="regions")
@on_ranks(2)
def test_evaluation_has_graphs_of_its_own():
    alone, model = Stack(), _with_regions(Stack())
    call = compiled(model)
    data = batches(2, 8, 10)
    assert_trains_like_replicas(model, call, alone, data)
    with torch.no_grad():
        torch.testing.assert_close(call(data[0]), alone(data[0]))
    assert_trains_like_replicas(model, call, alone, data)
