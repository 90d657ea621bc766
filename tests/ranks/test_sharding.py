"""How a model is divided: units, dimensions, meshes, and when units are resharded."""

from __future__ import annotations

import functools
import gc
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import register_pytree_node

from fsdp_compiled import fully_shard
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    assert_trains_like_one_process,
    batches,
    call_of,
    compiled,
    each_mode,
    each_with_regions,
    eager_and_full,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
    train,
)
from tests.support.variants import thorough


@row("uneven shards")
@each_with_regions
@on_ranks(4)
def test_uneven_first_dimensions_and_empty_shards(mode):
    alone, model = MLP(width=9, hidden=5), MLP(width=9, hidden=5)  # 5 rows on 4 ranks: 2, 2, 1, 0
    call = shard(model, mode)
    lengths = [None] * 4
    dist.all_gather_object(lengths, model.blocks[0][0].weight.to_local().shape[0])
    assert lengths == [2, 2, 1, 0]
    assert_trains_like_one_process(model, call, alone, batches(3, 8, 9))


@row("module kinds")
@eager_and_full
@on_ranks(2)
def test_blocks_without_an_outer_unit(mode):
    alone, model = MLP(), MLP()
    for block in model.blocks:
        fully_shard(block)
    call = call_of(model, mode)
    square_loss(alone, batches(1, 8, 10)[0]).backward()
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    got, want = full_grads(model), full_grads(alone)
    dist.all_reduce(got["scale"], op=dist.ReduceOp.AVG)  # no unit took it
    assert_close(got, want)


@row("module kinds")
@each_with_regions
@on_ranks(2)
def test_nested_units(mode):
    alone, model = MLP(), MLP()
    for block in model.blocks:
        fully_shard(block[0])
        fully_shard(block[3])
    call = shard(model, mode)
    assert model.blocks[1][0]._get_fsdp_state().unit.config.name.endswith(".blocks.1.0")
    assert model.blocks[1][0]._fsdp_params["weight"].name == "blocks.1.0.weight"
    assert_trains_like_one_process(model, call, alone)


@row("meshes")
@each_with_regions
@on_ranks(4)
def test_hybrid_sharding(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone, model = MLP(), MLP()
    call = shard(model, mode, mesh=mesh)
    assert model.scale.placements == (Replicate(), Shard(0))
    assert_trains_like_one_process(model, call, alone)


@row("shard_placement_fn")
@each_with_regions
@on_ranks(2)
def test_another_shard_dimension(mode):
    def last(param):
        return Shard(-1) if param.shape[-1] % 2 == 0 else None

    alone, model = MLP(), MLP()
    call = shard(model, mode, shard_placement_fn=last)
    assert model.blocks[0][0].weight.placements == (Shard(1),)
    assert_trains_like_one_process(model, call, alone)


@row("reshard")
@each_with_regions
@pytest.mark.parametrize("reshard", [True, False])
@thorough(when=lambda mode, reshard: mode == "regions" and not reshard)
@on_ranks(2)
def test_reshard_after_forward(mode, reshard):
    alone, model = MLP(), MLP()
    call = shard(model, mode, reshard_after_forward=reshard)
    assert_trains_like_one_process(model, call, alone)


@row("module kinds")
@eager_and_full
@on_ranks(2)
def test_list_units_some_of_whose_modules_do_not_run(mode):
    def build():
        torch.manual_seed(0)
        return nn.ModuleDict({"a": nn.Linear(10, 10), "b": nn.Linear(10, 10), "never": nn.Linear(10, 10)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = build()

        def forward(self, x):
            return self.parts["b"](self.parts["a"](x).relu())

    alone, model = Model(), Model()
    assert fully_shard(list(model.parts.values())) == list(model.parts.values())
    fully_shard(model)
    call = call_of(model, mode)
    assert_trains_like_one_process(model, call, alone)
    assert model.parts["never"].weight.grad is None


@each_mode
@on_ranks(2)
def test_meta_device_initialisation(mode):
    with torch.device("meta"):
        model = MLP()
    call = shard(model, mode, inductor=True)
    with pytest.raises(Exception, match=r"expected a parameter with storage.*to_empty"):
        call(torch.ones(2, 10))
    torch._dynamo.reset()
    gc.collect()  # what failed to compile holds weak references, which torch 2.11's swap_tensors refuses
    model.to_empty(device="cpu")
    alone = MLP()
    for name, param in model.named_parameters():
        whole = dict(alone.named_parameters())[name].detach()
        local = param.to_local()
        with torch.no_grad():
            local.copy_(whole.chunk(2)[dist.get_rank()])
    assert_trains_like_one_process(model, call, alone)


@row("uneven shards")
@eager_and_full
@on_ranks(1)
def test_a_world_of_one_rank_communicates_nothing(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    assert_trains_like_one_process(model, call, alone)


@dataclass
class Output:
    hidden: torch.Tensor
    step: int = 0


class Structured(MLP):
    def forward(self, x):
        hidden = Output(x * self.scale)
        for block in self.blocks:
            hidden = Output(hidden.hidden + block(hidden).hidden, hidden.step + 1)
        return hidden


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, state):
        return Output(self.linear(state.hidden).tanh(), state.step)


@row("module kinds")
@each_mode
@on_ranks(2)
def test_dataclasses_between_units(mode):
    def build():
        model = Structured()
        torch.manual_seed(2)
        model.blocks = nn.ModuleList([Block(), Block()])
        return model

    alone, model = build(), build()
    call = shard(model, mode)
    data = batches(3, 8, 10)
    want = train(alone, lambda x: alone(x).hidden, data, square_loss, sharded=False)
    got = train(model, lambda x: call(x).hidden, data, square_loss)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)
    assert_close(full_params(model), full_params(alone))


class Record:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


register_pytree_node(Record, lambda record: ([record.hidden], None), lambda values, _: Record(*values))


class WritesTo(nn.Linear):
    def forward(self, record):
        mask = record.hidden > 0
        record.hidden = super().forward(record.hidden).tanh()
        return record, mask


class Records(nn.Module):
    """Its units write to an object and return it, as tensordict's modules do, beside a tensor without gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(WritesTo(10, 10) for _ in range(2))

    def forward(self, x):
        record = Record(x)
        for block in self.blocks:
            record, mask = block(record)
        return record.hidden * mask


@on_ranks(2)
def test_units_that_return_an_object_known_to_pytree():
    model, alone = Records(), Records()
    assert_trains_like_one_process(model, shard(model, "eager"), alone)


class Flow(nn.Module):
    """Returns an object that computes afterwards, as models of distributions do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(10, 10))

    def forward(self):
        return functools.partial(nn.functional.linear, weight=self.weight)


@on_ranks(2)
def test_a_model_that_returns_an_object_that_computes():
    model, alone = fully_shard(Flow()), Flow()
    assert_trains_like_one_process(model, lambda x: model()(x), alone, call_alone=lambda x: alone()(x))


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.weight = nn.Parameter(torch.randn(10))

    def forward(self):
        return self.weight


@on_ranks(2)
def test_a_unit_that_returns_its_parameter_is_hooked_once():
    model, alone = fully_shard(Queries()), Queries()
    data = batches(4, 8, 10)
    assert_trains_like_one_process(model, lambda x: x * model(), alone, data, lambda x: x * alone())
    model.unshard()
    assert len(model.weight._backward_hooks) == 1


class Positions(Queries):
    def forward(self):
        return self.weight[:1]


class WithQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList([nn.Linear(10, 10), Queries(), Positions(), Queries()])
        self.blocks[3].weight = self.blocks[0].bias

    def forward(self, x):
        linear, queries, positions, shared = self.blocks
        return (linear(x) * queries() * positions() * shared()).flatten(1)


@each_mode
@on_ranks(2)
def test_units_that_return_parameters_and_views_of_them(mode):
    """They are resharded before what they return is used."""
    model, alone = WithQueries(), WithQueries()
    call = shard(model, mode)
    data = batches(3, 8, 10)
    assert_trains_like_one_process(model, call, alone, data)
    for without_grad in (torch.no_grad, torch.inference_mode):  # in which autograd does not follow views
        with without_grad():
            torch.testing.assert_close(call(data[0]), alone(data[0]))


class Chunked(nn.Module):
    """The head runs outside forward, in chunks, as memory-saving losses do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Linear(10, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 10)

    def forward(self, x):
        return self.norm(self.body(x).relu())

    def loss(self, call, head, x):
        hidden = call(x)
        return sum(square.square().mean() for part in hidden.chunk(2) for square in [head(part)]) / 2


@row("module kinds")
@eager_and_full
@on_ranks(2)
def test_a_member_of_a_list_unit_that_runs_outside_the_model(mode):
    alone, model = Chunked(), Chunked()
    fully_shard([model.norm, model.head])
    fully_shard(model)
    with torch.no_grad():
        model.head(model(batches(1, 8, 10)[0]))
    assert not model.head._get_fsdp_state().unit.hooked
    call, head = model, model.head
    if mode == "full":
        call = compiled(model)
    for x in batches(2, 8, 10):
        alone.loss(alone, alone.head, x).backward()
        model.loss(call, head, my_part(x)).backward()
    assert_close(full_grads(model), full_grads(alone))


class Empty(nn.Module):
    """Parameters without elements, beside others and as a unit of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there is nothing to initialise
            self.inputs = nn.Linear(0, 10)
            self.alone = nn.Linear(0, 10, bias=False)
        self.linear = nn.Linear(10, 10)
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return self.linear(x) + self.inputs(x[:, :0]) + self.alone(x[:, :0]) + self.none.sum()


class Empties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Empty() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@each_with_regions
@pytest.mark.parametrize("sync", [True, False])
@thorough(when=lambda mode, sync: mode != "eager" and not sync)
@on_ranks(2)
def test_parameters_without_elements(mode, sync):
    alone, model = Empties(), Empties()
    for block in model.blocks:
        fully_shard(block.alone)
    call = shard(model, mode)
    if not sync:
        model.set_requires_gradient_sync(False)
        for each, x in ((alone, batches(1, 8, 10)[0]), (call, my_part(batches(1, 8, 10)[0]))):
            square_loss(each, x).backward()
        model.set_requires_gradient_sync(True)
    assert_trains_like_one_process(model, call, alone)
