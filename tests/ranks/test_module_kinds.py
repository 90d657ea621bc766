"""Modules that hold, share or skip parameters in unusual ways, and models compiled only in part."""

from __future__ import annotations

import copy
from abc import ABC
from contextlib import nullcontext
from typing import Generic, Protocol, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.func import functional_call

from fsdp_compiled import FSDPModule, MixedPrecisionPolicy, fully_shard, fully_shard_with_compiled_compute
from fsdp_compiled.collectives import backend
from fsdp_compiled.hooks import group
from tests.support.graphs import record, sequence
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    MODES,
    WITH_REGIONS,
    assert_close,
    assert_trains_like_one_process,
    assert_trains_like_replicas,
    batches,
    compiled,
    full_grads,
    my_part,
    shard,
    square_loss,
)

each_mode = pytest.mark.parametrize("mode", MODES)
each_with_regions = pytest.mark.parametrize("mode", WITH_REGIONS)
eager_and_full = pytest.mark.parametrize("mode", ["eager", "full"])
COLLECTIVES = (
    "launch_all_gather",
    "launch_reduce_scatter",
    "launch_all_reduce",
    "unshard",
    "reduce_grad",
)


class Small(nn.Module):
    """A parameter of the root's own and units that compile fast."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = x + block(x)
        return x


class Abstract(ABC, Small):
    """Its instances get their ``__dict__`` below a base other than object."""


class Typed(Generic[TypeVar("T")], Small):
    """Such a base again, which refuses to be subclassed as it is."""


class HasForward(Protocol):
    def forward(self, x): ...


class Declared(HasForward, Small):
    """Of a subclass of such a base typing would make another protocol, of which nothing is an instance."""

    forward = Small.forward


def _compiled(model, mode, **kwargs):
    if mode != "full":
        return model
    return torch.compile(model, fullgraph=True, **kwargs) if kwargs else compiled(model)


class Chunked(nn.Module):
    """Norm and head are one list unit; the head runs on one part of the sequence after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.norm(self.body(x).relu())
        return torch.cat([self.head(part).tanh() for part in hidden.chunk(2, dim=-2)], dim=-2)


@row("module kinds")
@eager_and_full
@on_ranks(2)
def test_a_list_unit_whose_head_runs_on_chunks(mode):
    alone, model = Chunked(), Chunked()
    fully_shard([model.norm, model.head])
    fully_shard(model)
    assert_trains_like_replicas(model, _compiled(model, mode), alone, batches(3, 4, 4, 6))


class Kinds(nn.Module):
    """Parameters in lists and dicts, attention that reads its parts' parameters, and a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.listed = nn.ParameterList([torch.rand(6, 6), torch.rand(6, 6)])
        self.named = nn.ParameterDict({"shift": torch.rand(6), "matrix": torch.rand(6, 6)})
        self.parts = nn.ModuleDict({"norm": nn.LayerNorm(6), "attention": nn.MultiheadAttention(6, 2)})
        self.twice = nn.Linear(6, 6)

    def forward(self, x):
        x = x @ self.listed[0]
        for matrix in (self.named["matrix"], *reversed(list(self.listed))):
            x = self.twice(x @ (matrix + self.named.shift)).tanh()
        x = self.parts["norm"](x)
        return self.parts["attention"](x, x, x, need_weights=False)[0]


@row("module kinds", "tied and shared")
@eager_and_full
@on_ranks(2)
def test_parameter_lists_and_dicts_attention_and_a_unit_called_twice(mode):
    alone, model = Kinds(), Kinds()
    for module in (model.parts["attention"], model.twice):
        fully_shard(module)
    fully_shard(model)
    call = _compiled(model, mode)
    data = batches(3, 4, 3, 6)
    assert_trains_like_replicas(model, call, alone, data)
    for m in (alone, model):
        m.eval()
    with torch.no_grad():  # attention takes its fast path
        torch.testing.assert_close(call(data[0]), alone(data[0]), rtol=1e-5, atol=1e-5)


class OwnCall(nn.Linear):
    """Its class has a ``__call__``, which reads a parameter after the module's hooks have run."""

    def __call__(self, x):
        return super().__call__(x * 2) * self.bias


class OwnCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = OwnCall(6, 6)
        self.blocks = nn.ModuleList([OwnCall(6, 6), nn.Sequential(OwnCall(6, 6), nn.Tanh())])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@row("module kinds")
@each_mode
@on_ranks(2)
def test_classes_with_a_call_of_their_own(mode):
    alone, model = OwnCalls(), OwnCalls()
    assert_trains_like_replicas(model, shard(model, mode), alone, batches(3, 4, 6))


class Registered(nn.Module):
    """Subclasses are listed by a name that each must give."""

    classes: dict[str, type] = {}

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        assert kind not in Registered.classes
        Registered.classes[kind] = cls


class Scaled(Registered, kind="scaled"):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x):
        return x * self.scale


class OfRegistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Scaled(), nn.Sequential(Scaled(), nn.Linear(6, 6))])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@each_mode
@on_ranks(2)
def test_classes_that_want_arguments_of_their_subclasses(mode):
    alone, model = OfRegistered(), OfRegistered()
    call = shard(model, mode)
    assert Registered.classes["scaled"] is Scaled
    assert_trains_like_replicas(model, call, alone, batches(3, 4, 6))


class Recurrent(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = getattr(nn, kind)(6, 6)

    def forward(self, x):
        return self.rnn(x)[0]


@row("module kinds")
@eager_and_full
@on_ranks(2)
def test_recurrent_modules_run_eagerly_and_torch_refuses_to_compile_them(mode):
    for kind in ("RNN", "LSTM", "GRU"):
        alone, model = Recurrent(kind), Recurrent(kind)
        fully_shard(model.rnn)
        fully_shard(model)
        data = batches(3, 4, 3, 6)
        if mode == "full":
            for module in (alone, model):  # sharded or not
                torch._dynamo.reset()
                with pytest.raises(torch._dynamo.exc.Unsupported, match="Dynamo does not support RNN, GRU, or LSTM"):
                    torch.compile(module, fullgraph=True)(data[0])
        assert_trains_like_replicas(model, torch.compile(model) if mode == "full" else model, alone, data)


@on_ranks(2)
def test_recurrent_modules_in_one_graph_where_dynamo_allows_them():
    for kind in ("RNN", "LSTM", "GRU"):
        alone, model = Recurrent(kind), Recurrent(kind)
        fully_shard(model.rnn)
        fully_shard(model)
        # oneDNN: for its LSTM, Inductor asserts the strides of an output that is undefined, sharded or not
        with torch._dynamo.config.patch(allow_rnn=True), torch.backends.mkldnn.flags(enabled=False):
            call = compiled(model, inductor=kind == "LSTM")
            assert_trains_like_replicas(model, call, alone, batches(3, 4, 3, 6))


class OneBuffer(nn.LSTM):
    """Moves its weights into one buffer when they are other objects, as recurrent modules do on a GPU for cuDNN."""

    def flatten_parameters(self):
        with torch.no_grad():
            pieces = torch.cat([weight.flatten() for weight in self._flat_weights]).split(
                [weight.numel() for weight in self._flat_weights]
            )
            for weight, piece in zip(self._flat_weights, pieces, strict=True):
                weight.set_(piece.view_as(weight))


@pytest.mark.parametrize("reshards", [True, False])
@eager_and_full
@on_ranks(2)
def test_a_module_that_moves_its_parameters(mode, reshards):
    alone, model = Recurrent("LSTM"), Recurrent("LSTM")
    model.rnn.__class__ = OneBuffer
    fully_shard(model.rnn, reshard_after_forward=reshards)
    fully_shard(model)
    assert_trains_like_replicas(model, torch.compile(model) if mode == "full" else model, alone, batches(3, 4, 3, 6))
    for param in model.rnn._get_fsdp_state().params:
        assert param.unsharded.param.untyped_storage().nbytes() == 0
    with torch.no_grad():
        torch.testing.assert_close(model(batches(1, 4, 3, 6)[0]), alone(batches(1, 4, 3, 6)[0]))


class Stateful(nn.Module):
    """A norm with running statistics, and a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())])
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("gain", torch.rand(6), persistent=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x * self.gain)
        self.seen += x.detach().sum(0)
        return x


@row("ignored and unused")
@each_with_regions
@on_ranks(2)
def test_buffers_are_each_ranks_own(mode):
    alone, model = Stateful(), Stateful()
    call = shard(model, mode)
    data = batches(3, 8, 6)
    assert_trains_like_replicas(model, call, alone, data)
    assert model.blocks[0][1].num_batches_tracked == 3
    assert_close(
        {name: value for name, value in model.state_dict().items() if name in dict(alone.named_buffers())},
        {name: value for name, value in alone.named_buffers() if name != "gain"},
    )
    for m in (alone, model):
        m.eval()
    with torch.no_grad():
        torch.testing.assert_close(call(data[0]), alone(data[0]), rtol=1e-5, atol=1e-5)


class Autocast(Small):
    inside = True

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16) if self.inside else nullcontext():
            return super().forward(x)


@row("mixed precision")
@each_with_regions
@on_ranks(2)
def test_autocast_inside_and_outside_the_model(mode):
    for inside in (True, False):
        alone, model = Autocast(1), Autocast(1)
        alone.inside = model.inside = inside
        call = shard(model, mode)

        def outside(called):
            def run(x):
                with nullcontext() if inside else torch.autocast(x.device.type, torch.bfloat16):  # noqa: B023
                    return called(x)

            return run

        dtypes = []
        hook = model.blocks[0].register_forward_hook(lambda m, args, out, seen=dtypes: seen.append(out.dtype))
        with torch.no_grad():
            outside(model)(batches(1, 8, 6)[0])
        hook.remove()
        assert dtypes == [torch.bfloat16]
        # Inductor rounds to bf16 less often
        rtol = 1e-5 if mode == "eager" else 2e-2
        assert_trains_like_replicas(model, outside(call), alone, batches(3, 8, 6), outside(alone), rtol)
        square_loss(outside(call), my_part(batches(1, 8, 6)[0])).backward()
        assert {(p.dtype, p.grad.dtype) for p in model.parameters()} == {(torch.float32, torch.float32)}


class OtherDtype(nn.Module):
    """What a unit with this ``param_dtype`` and ``output_dtype=torch.float32`` computes."""

    def __init__(self, module, dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, x):
        params = {name: param.to(self.dtype) for name, param in self.module.named_parameters()}
        return functional_call(self.module, params, (x.to(self.dtype),)).float()


@row("mixed precision")
@each_mode
@on_ranks(2)
def test_policies_that_differ_per_unit(mode):
    dtypes = (torch.bfloat16, torch.float64)
    alone, model = Small(), Small()
    unit = fully_shard_with_compiled_compute if mode == "regional" else fully_shard
    for block, dtype in zip(model.blocks, dtypes, strict=True):
        unit(block, mp_policy=MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, output_dtype=torch.float32))
    fully_shard(model)
    call = _compiled(model, mode)
    reference = Small()
    reference.scale = alone.scale
    reference.blocks = nn.ModuleList(OtherDtype(*pair) for pair in zip(alone.blocks, dtypes, strict=True))
    rtol = 1e-5 if mode == "eager" else 2e-2
    assert_trains_like_replicas(model, call, alone, batches(3, 8, 6), reference, rtol)


class ComputesWeights(Small):
    """A block runs with weights that the model computes, as in a hypernetwork and in an inner step of training."""

    def forward(self, x):
        first, last = self.blocks
        weights = {"weight": first.weight * 2, "bias": first.bias + 1}
        return x + functional_call(last, weights, (x * self.scale,))


class TakesWeights(Small):
    """A block runs with the weights of another one."""

    def forward(self, x):
        first, last = self.blocks
        return first(x) + functional_call(last, dict(first.named_parameters()), (x * self.scale,))


@pytest.mark.parametrize("kind", [ComputesWeights, TakesWeights])
@on_ranks(2)
def test_functional_call_in_a_forward_that_is_compiled(kind):
    model, alone = kind(), kind()
    for each in (model, alone):
        each.blocks[1].requires_grad_(False)
    fully_shard(model)
    assert_trains_like_one_process(model, torch.compile(model, backend="aot_eager"), alone, batches(3, 8, 6))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="expected the parameter that fully_shard registered"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(batches(1, 8, 6)[0])


class Branches(Small):
    """Which blocks run is decided anew in every step."""

    chosen = (0,)

    def forward(self, x):
        x = x * self.scale
        for index in self.chosen:
            x = x + self.blocks[index](x)
        return x


@row("ignored and unused")
@each_mode
@on_ranks(2)
def test_branches_that_differ_per_step(mode):
    alone, model = Branches(), Branches()
    shard(model, "eager" if mode == "full" else mode)
    counter = CompileCounterWithBackend("inductor")
    call = _compiled(model, mode, backend=counter)
    for chosen in ((0,), (1,), (0,)):
        alone.chosen = model.chosen = chosen
        x = my_part(batches(1, 8, 6)[0])
        square_loss(call, x).backward()
        unused = {name for name, param in model.named_parameters() if param.grad is None}
        assert unused == {n for n, _ in model.named_parameters() if n[7:8] in {*"01"} - {str(i) for i in chosen}}
        model.zero_grad()
        assert_trains_like_replicas(model, call, alone, batches(2, 8, 6))
    assert counter.frame_count == (2 if mode == "full" else 0)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(3, 1), nn.Linear(1, 2), nn.Linear(2, 3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


@row("uneven shards")
@eager_and_full
@on_ranks(4)
def test_fewer_rows_than_ranks(mode):
    alone, model = Narrow(), Narrow()
    call = shard(model, mode)
    rows = [block.weight.to_local().shape[0] for block in model.blocks]
    assert rows == [[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]][dist.get_rank()]
    assert_trains_like_replicas(model, call, alone, batches(3, 8, 3))


@row("uneven shards", "meshes")
@eager_and_full
@on_ranks(2)
def test_groups_of_one_rank_communicate_nothing(mode):
    x = batches(1, 4, 6)[0]
    for sizes, expected in (((2, 1), {"all_reduce"}), ((1, 2), {"all_gather", "reduce_scatter"})):
        alone, model = Small(1), Small(1)
        shard(model, "eager", mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")))
        call = record(model)[0] if mode == "full" else model
        seen = set()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_gather", "all_gather_coalesced", "reduce_scatter", "all_reduce"):
                patch.setattr(backend, name, _noted(name.removesuffix("_coalesced"), seen))
            square_loss(call, my_part(x)).backward()
        square_loss(alone, x).backward()
        assert_close(full_grads(model), full_grads(alone))
        assert seen == expected


def _noted(name, seen):
    original = getattr(backend, name)

    def call(*args):
        seen.add(name)
        return original(*args)

    return call


@row("uneven shards")
@eager_and_full
@on_ranks(1)
def test_a_world_of_one_rank_has_no_collective_in_its_graphs(mode):
    model = Small(1)
    shard(model, "eager")
    call, recorder = record(model) if mode == "full" else (model, None)
    with nullcontext() if recorder else CommDebugMode() as communication:
        square_loss(call, batches(1, 4, 6)[0]).backward()
    if recorder:
        assert [sequence(graph, *COLLECTIVES) for _, graph in recorder.after] == [[], []]
    else:
        assert communication.get_total_counts() == 0


@row("switching", mode=MODES)
@on_ranks(2)
def test_some_units_compiled_and_others_not():
    alone, model = Small(3), Small(3)
    eager, compiled, regional = model.blocks
    fully_shard(eager)
    counter = CompileCounterWithBackend("inductor")
    fully_shard(compiled).compile(fullgraph=True, backend=counter)  # its collectives are in its graph
    fully_shard_with_compiled_compute(regional)
    fully_shard(model)
    assert_trains_like_replicas(model, model, alone, batches(3, 8, 6))
    assert counter.frame_count == 1


@on_ranks(2)
def test_what_torch_compile_made_is_sharded_inside():
    """As accelerate does; the root's own parameters are all-gathered in the graph, too."""
    alone, model = MLP(), MLP()
    call = compiled(model)
    for block in model.blocks:
        fully_shard(block)
    assert fully_shard(call) is call
    assert isinstance(model, FSDPModule) and not isinstance(call, FSDPModule)
    counters.clear()
    with mock.patch.object(group, "launch_all_gather", wraps=group.launch_all_gather) as gathers:
        assert_trains_like_one_process(model, call, alone)
    assert counters["stats"]["unique_graphs"] == 1 and not gathers.called


class Scripted(MLP):
    """Some of its code is compiled by TorchScript, as that of e3nn's operations is, without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.squash = torch.jit.script(nn.Sequential(nn.Tanh(), nn.Softsign()))

    def forward(self, x):
        return self.squash(super().forward(x))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@on_ranks(2)
def test_scripted_code_without_parameters(is_compiled):
    model, alone = Scripted(), Scripted()
    call = shard(model, "eager")
    assert_trains_like_one_process(model, compiled(model, fullgraph=False) if is_compiled else call, alone)
    copied, alone = copy.deepcopy(model), copy.deepcopy(alone)
    assert_trains_like_one_process(copied, copied, alone)


@eager_and_full
@pytest.mark.parametrize("kind", [Abstract, Typed, Typed[int], Declared])
@on_ranks(2)
def test_a_base_without_dict_before_module(kind, mode):
    model = kind()
    call = shard(model, mode)
    assert_trains_like_one_process(model, call, kind(), batches(3, 8, 6))
    assert isinstance(model, type(model)) and not isinstance(kind(), type(model))


@on_ranks(2)
def test_a_graph_module_in_one_graph():
    """Its class has a ``__call__`` that Dynamo skips."""
    model = fx.symbolic_trace(Small())
    for block in model.blocks.children():
        fully_shard(block)
    fully_shard(model)
    assert_trains_like_one_process(model, compiled(model), Small(), batches(3, 8, 6))
