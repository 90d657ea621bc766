"""What other libraries see: modules and policies of torch.distributed.fsdp."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FunctionType
from typing import Generic, TypeVar

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import Shard

import fsdp_compiled
from fsdp_compiled import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_compiled.torch_fsdp.registry import own_record

IMPLEMENTED = (FunctionType, property, classmethod, staticmethod)


def _model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    fully_shard(model[1])
    return fully_shard(model)


@pytest.mark.parametrize("name", ["FSDPModule", "UnshardHandle", "GradientReductionHandle"])
def test_nothing_of_torchs_classes_is_inherited(name):
    ours, theirs = getattr(fsdp_compiled, name), getattr(torch_fsdp, name, None)
    if theirs is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    assert issubclass(ours, theirs)
    implemented = {name for name, value in vars(theirs).items() if isinstance(value, IMPLEMENTED)}
    assert implemented and implemented <= set(vars(ours))


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_of_torchs_implementation_runs(fake_group, compiled):
    names = ("_fully_shard.py", "_fsdp_state.py", "_fsdp_param_group.py", "_fsdp_param.py", "_fsdp_collectives.py")
    files = tuple(f"_fully_shard/{name}" for name in names)  # here: Dynamo may trace what the profiler calls
    found = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.endswith(files):
            found.append(code.co_qualname)

    sys.setprofile(note)
    try:
        model = _model()
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        call(torch.randn(2, 4)).sum().backward()
        model.to(torch.float64)
        model.unshard(async_op=True).wait()
        model.reshard()
        model.load_state_dict(model.state_dict())
        nn.Sequential.__getitem__(model, slice(0, 1))
    finally:
        sys.setprofile(None)
    assert not found


def test_the_second_base_of_a_modules_class_is_the_users(fake_group):
    model = _model()
    for module in (model, model[1]):
        assert type(module).__bases__[1] is nn.Sequential  # by which Opacus tells the layers that it knows
    assert type(fully_shard(nn.Linear(4, 4))).__bases__[1] is nn.Linear


class Typed(Generic[TypeVar("T")], nn.Linear):
    """Its instances get their ``__dict__`` below a base other than object."""


@pytest.mark.parametrize("cls", [nn.Linear, Typed])
def test_methods_of_a_sharded_module_come_before_those_of_the_users_class(fake_group, cls):
    order = type(fully_shard(cls(4, 4))).__mro__
    assert order.index(FSDPModule) < order.index(cls)


def test_the_class_of_a_module_makes_modules_of_the_users_class(fake_group):
    model = _model()
    for module in (model[0], model[1][0]):
        made = type(module)(4, 4)
        assert type(made) is nn.Linear
        made.to(torch.float64).load_state_dict(made.state_dict())
    assert type(type(model)(nn.GELU())) is nn.Sequential


def test_torchs_functions_find_our_units(fake_group):
    model, other = _model(), _model()
    for module in (model, model[1]):
        assert isinstance(module, torch_fsdp.FSDPModule)
        assert torch_fsdp.fully_shard.state(module) is module._get_fsdp_state()
    assert not isinstance(model[0], torch_fsdp.FSDPModule)
    assert torch_fsdp.fully_shard.state(model[0]) is None
    torch_fsdp.share_comm_ctx([model, other])
    assert model._get_fsdp_state()._comm_ctx is other._get_fsdp_state()._comm_ctx
    model.encode = lambda x: model[0].weight.shape
    torch_fsdp.register_fsdp_forward_method(model, "encode")
    assert model.encode(torch.randn(2, 4)) == (4, 4) and type(model[0].weight.data) is torch.Tensor


def test_the_memory_tracker_of_fsdp2_is_refused(fake_group):
    model = _model()
    with pytest.raises(NotImplementedError, match="FSDPMemTracker replaces .* use fsdp_compiled.inspect.capture"):
        FSDPMemTracker(model).__enter__()


def test_attributes_that_libraries_set_do_not_change_the_graph(fake_group):
    """Transformers marks the models that it shards; Dynamo looks at the mark."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    for mark in (False, True):
        torch.compiler.reset()
        counters.clear()
        model = _model()
        model._is_fsdp_managed_module = mark
        call = torch.compile(model, backend=keep, fullgraph=True)
        for sync in (True, True, False, True):
            model.set_requires_gradient_sync(sync)
            call(torch.randn(2, 4)).sum().backward()
        assert counters["stats"]["unique_graphs"] == 2
    assert graphs[:2] == graphs[2:]


@pytest.mark.parametrize(
    "given",
    [
        torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16, False),
        torch_fsdp.OffloadPolicy(),
        torch_fsdp.CPUOffloadPolicy(pin_memory=False),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_torchs_policies_become_ours(given):
    made = own_record(given)
    assert type(made) is getattr(fsdp_compiled, type(given).__name__)
    assert {name: getattr(made, name) for name in vars(given)} == vars(given)


def test_an_option_of_a_newer_torch(monkeypatch):
    @dataclass(frozen=True)
    class MixedPrecisionPolicy(torch_fsdp.MixedPrecisionPolicy):
        later: torch.dtype | None = None

    monkeypatch.setattr(torch_fsdp, "MixedPrecisionPolicy", MixedPrecisionPolicy)
    made = own_record(MixedPrecisionPolicy(torch.bfloat16))
    assert made == fsdp_compiled.MixedPrecisionPolicy(torch.bfloat16)
    with pytest.raises(NotImplementedError, match="MixedPrecisionPolicy.later: .*; got torch.float32"):
        own_record(MixedPrecisionPolicy(later=torch.float32))


def test_torchs_records_of_meshes_become_ours(fake_group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = own_record(torch_common.HSDPMeshInfo(mesh, 1, 0))
    assert made == fsdp_compiled.HSDPMeshInfo(mesh, 1, 0)
    if hasattr(torch_common, "ShardPlacementResult"):
        info = torch_common.FSDPMeshInfo(mesh["shard"], 0)
        placed = own_record(torch_common.ShardPlacementResult(Shard(1), info))
        assert placed == fsdp_compiled.ShardPlacementResult(Shard(1), fsdp_compiled.FSDPMeshInfo(mesh["shard"], 0))
        model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh, shard_placement_fn=lambda param: placed)
        assert model.weight.placements == (Shard(1),)
    if hasattr(torch_fsdp, "DataParallelMeshDims"):
        dims = torch_fsdp.DataParallelMeshDims("shard", "replicate")
        assert own_record(dims) == fsdp_compiled.DataParallelMeshDims("shard", "replicate")


def test_anything_else_stays():
    for value in (None, "cpu", fsdp_compiled.MixedPrecisionPolicy(), Shard(0), torch_fsdp.MixedPrecisionPolicy):
        assert own_record(value) is value


class _Casts(nn.Linear):
    """Casts as its unit will, as models do that share what they cast."""

    def forward(self, x):
        policy = self._get_fsdp_state()._mp_policy
        return super().forward(x.to(policy.param_dtype))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_reads_its_units_policy(fake_group, compiled):
    model = fully_shard(_Casts(4, 4), mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False))
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    assert call(torch.randn(2, 4)).dtype == torch.bfloat16
