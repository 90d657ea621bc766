"""Bad input: a clear error, and the model left as it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_compiled import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from fsdp_compiled import fully_shard_with_compiled_compute as with_compiled_compute
from fsdp_compiled.sharding.mesh import FSDPMeshInfo, ShardPlacementResult
from tests.errors.models import Model, assert_refused

pytestmark = pytest.mark.usefixtures("fake_group")


def test_a_container_without_forward():
    model = Model()
    assert_refused(ValueError, "ModuleList: expected a module with a forward, got a container", model, model.layers)


def test_a_module_sharded_twice():
    model = Model()
    fully_shard(model)
    assert_refused(ValueError, "FSDPModel: expected a module that is not sharded yet, got one that", model)


def test_an_outer_module_sharded_before_an_inner_one():
    model = fully_shard(Model())
    message = (
        "Linear: expected parameters that no unit around it has taken, got those of Model; apply fully_shard to inn"
    )
    assert_refused(ValueError, message, model, model.layers[0])
    assert_refused(ValueError, message, model, [model.layers[1], model.layers[0]])


def test_a_scalar_parameter_that_is_a_dtensor():
    model = Model()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model.layers[0].gain = nn.Parameter(distribute_tensor(torch.tensor(1.0), mesh["tp"], [Replicate()]))
    message = r"layers\.0\.gain: expected at least 1 dimension, got a scalar on DeviceMesh\("
    assert_refused(ValueError, message, model, mesh=mesh["dp"])


def test_a_non_contiguous_parameter():
    model = Model()
    model.layers[1].weight = nn.Parameter(torch.randn(6, 8).t())
    assert_refused(
        ValueError,
        r"layers\.1\.weight: expected a contiguous parameter, got shape \(8, 6\) with strides",
        model,
    )


def test_meshes():
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    assert_refused(ValueError, "mesh: expected a 1-D .* or 2-D .* DeviceMesh, got 3-D", mesh=three)
    assert_refused(ValueError, "mesh: a 2-D mesh needs mesh_dim_names", mesh=init_device_mesh("cpu", (2, 2)))
    assert_refused(TypeError, "mesh: expected a DeviceMesh or None, got 4 of int", mesh=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_mesh_of_a_device_that_is_not_there():
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cuda", torch.arange(4), _init_backend=False)
    assert_refused(ValueError, "got device type 'cuda'", mesh=mesh)


def test_shard_dimensions():
    model = Model()
    assert_refused(
        ValueError,
        r"layers\.1\.weight: dim 1 \(6\) must be divisible by 4 shards for Shard\(1\); use Shard\(0\) or pad",
        model,
        shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None,
    )
    assert_refused(
        ValueError,
        r"layers\.0\.bias: expected a shard dimension of a 1-D parameter, got Shard\(1\)",
        shard_placement_fn=lambda p: Shard(1) if p.dim() == 1 else None,
    )
    assert_refused(
        TypeError,
        r"layers\.0\.weight: expected shard_placement_fn to return a Shard, a ShardPlacementResult or None, got 0",
        shard_placement_fn=lambda p: 0,
    )


@pytest.mark.parametrize(
    ("error", "message", "kwargs"),
    [
        (
            TypeError,
            "mp_policy: expected a MixedPrecisionPolicy, got torch.bfloat16",
            {"mp_policy": torch.bfloat16},
        ),
        (TypeError, "offload_policy: expected an OffloadPolicy, got True", {"offload_policy": True}),
        (TypeError, "mesh: expected a DeviceMesh for dp_mesh_dims, got None", {"dp_mesh_dims": object()}),
        (TypeError, "shard_placement_fn: expected a function or None, got 1", {"shard_placement_fn": 1}),
        (TypeError, r"ignored_params: expected a set of parameters, got \[\] of list", {"ignored_params": []}),
        (
            TypeError,
            "ignored_params: expected parameters, got a str among them",
            {"ignored_params": {"weight"}},
        ),
        (
            TypeError,
            "reshard_after_forward: expected True, False, None or .* got 'yes'",
            {"reshard_after_forward": "yes"},
        ),
        (
            ValueError,
            "reshard_after_forward: expected a divisor of .* 4, got 3",
            {"reshard_after_forward": 3},
        ),
        (
            ValueError,
            "reshard_after_forward: expected a divisor of .* 4, got 0",
            {"reshard_after_forward": 0},
        ),
    ],
)
def test_wrong_arguments(error, message, kwargs):
    assert_refused(error, message, **kwargs)


@pytest.mark.parametrize(("target", "got"), [(3, "3 of int"), ([3], "3 of int"), (None, "None of NoneType")])
def test_what_is_no_module(target, got):
    with pytest.raises(TypeError, match=f"module: expected nn.Module or a list of them, got {got}"):
        fully_shard(target)


def test_an_empty_list():
    with pytest.raises(ValueError, match="module: expected a module or a non-empty list of modules"):
        fully_shard([])


def test_compiled_compute_of_a_list():
    with pytest.raises(TypeError, match="module: expected one nn.Module, got .* of list; call it on each module"):
        with_compiled_compute([nn.Linear(1, 1)])


def test_a_group_size_that_means_true_or_false():
    for value, reshard in ((4, True), (1, False)):
        model = Model()
        fully_shard(model, reshard_after_forward=value)
        assert model._get_fsdp_state().unit.config.reshard_after_forward is reshard


def test_parameters_tied_across_units_of_different_policies():
    model = Model()
    model.layers[1].weight = nn.Parameter(torch.randn(6, 8))
    model.layers[0].weight = model.layers[1].weight
    fully_shard(model.layers[0])
    assert_refused(
        ValueError,
        r"layers\.1\.weight: is the same parameter as weight of unit .*; expected the same param_dtype and "
        r"reduce_dtype for both, got \(torch\.float32, torch\.float32\) there and \(torch\.bfloat16, ",
        model,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))  # concerns no parameter


def test_a_smaller_group_needs_the_whole_world():
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("a", "b"))["a"]
    assert_refused(
        ValueError, "expected a divisor of the shard world size 1, got 2", reshard_after_forward=2, mesh=mesh
    )


def test_named_mesh_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="dp_mesh_dims: at least one of shard and replicate must be given"):
        DataParallelMeshDims()
    assert_refused(
        ValueError,
        r"dp_mesh_dims: expected names among \('dp', 'tp'\), got 'pp'",
        mesh=mesh,
        dp_mesh_dims=DataParallelMeshDims(shard="pp"),
    )
    assert_refused(
        ValueError,
        r"layers\.0\.weight: expected a DTensor on the mesh given to fully_shard, since dp_mesh_dims leaves out",
        mesh=mesh,
        dp_mesh_dims=DataParallelMeshDims(shard="dp"),
    )
    assert_refused(
        ValueError,
        "mesh: dp_mesh_dims needs a mesh with mesh_dim_names",
        mesh=init_device_mesh("cpu", (4,)),
        dp_mesh_dims=DataParallelMeshDims(shard="dp"),
    )


def test_a_list_unit_that_lies_only_in_part_below():
    first, second = Model(), Model()
    fully_shard([first.layers[0], second.layers[0]])
    assert_refused(
        ValueError, "expected every module of this list unit below Model, got a FSDPLinear outside it", first
    )


def test_compile_options_are_checked_before_anything_is_sharded():
    model = Model()
    with pytest.raises(TypeError, match="bogus"):
        with_compiled_compute(model, compile_kwargs={"bogus": 1})
    assert type(model) is Model


def test_parameters_that_are_dtensors_already():
    model = Model()
    mesh = init_device_mesh("cpu", (4,))
    model.layers[0].bias = nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Replicate()], src_data_rank=None))
    assert_refused(ValueError, r"layers\.0\.bias: expected meshes with dimension names for a parameter that", model)


def test_a_dtensor_on_another_mesh():
    model = Model()
    one, other = (init_device_mesh("cpu", (2, 2), mesh_dim_names=names) for names in (("dp", "tp"), ("tp", "dp")))
    for layer in model.layers:
        for name, param in list(layer.named_parameters()):
            whole = distribute_tensor(param.detach(), other, [Replicate(), Replicate()], src_data_rank=None)
            setattr(layer, name, nn.Parameter(whole))
    assert_refused(
        ValueError,
        r"layers\.0\.weight: expected a DTensor on the mesh given to fully_shard, .*dp=2, tp=2.*, got .*tp=2, dp=2",
        model,
        mesh=one,
        dp_mesh_dims=DataParallelMeshDims(shard="dp"),
    )


def test_a_smaller_group_than_a_parameters_own_mesh_divides_into():
    three = FSDPMeshInfo(DeviceMesh("cpu", [0, 1, 2]), shard_mesh_dim=0)
    assert_refused(
        ValueError,
        r"layers\.0\.weight: expected reshard_after_forward to be a divisor of the 3 ranks .*, got 2",
        reshard_after_forward=2,
        shard_placement_fn=lambda param: ShardPlacementResult(Shard(0), three),
    )


def test_a_dtensor_that_is_sharded_over_a_data_parallel_dimension():
    model = Model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        for name, param in list(layer.named_parameters()):
            placements = [Shard(0), Replicate()]
            setattr(
                layer, name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements, src_data_rank=None))
            )
    assert_refused(
        ValueError,
        r"layers\.0\.weight: expected Replicate\(\) on data-parallel shard dimension 'dp', got S\(0\)",
        model,
        mesh=mesh,
        dp_mesh_dims=DataParallelMeshDims(shard="dp"),
    )


def _with(param):
    model = Model()
    model.layers[0].extra = param
    return model


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (
            nn.Parameter(torch.eye(4).to_sparse()),
            r"layers\.0\.extra: expected a dense parameter, got layout torch.sparse_coo; replace it by "
            r"nn.Parameter\(param.to_dense\(\)\), or leave it alone with ignored_params",
        ),
        (
            nn.UninitializedParameter(),
            r"layers\.0\.extra: expected a parameter with a shape, got one of a lazy module",
        ),
    ],
    ids=["sparse", "lazy"],
)
def test_parameters_that_cannot_be_cut(param, message):
    assert_refused(ValueError, message, _with(param))


def test_a_sparse_parameter_may_be_ignored():
    model = _with(nn.Parameter(torch.eye(4).to_sparse()))
    fully_shard(model, ignored_params={model.layers[0].extra})
    assert model.layers[0].extra.layout is torch.sparse_coo


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_scripted_modules():
    scripted = torch.jit.script(Model())
    assert_refused(
        ValueError,
        "RecursiveScriptModule: expected a Python module, got a RecursiveScriptModule, .*shard the module that",
        scripted,
    )
    model = Model()
    model.layers[1] = torch.jit.script(model.layers[1])
    assert_refused(ValueError, r"layers\.1: expected a Python module, got a RecursiveScriptModule", model)
    without_parameters = torch.jit.script(nn.Sequential(nn.Tanh()))  # may lie below a unit, but takes no hooks
    assert_refused(ValueError, "RecursiveScriptModule: expected a Python module, got", without_parameters)


class TensorDictParams(nn.Module):
    """Reads its values elsewhere than where they are registered, as tensordict's does."""

    __module__ = "tensordict.nn.params"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def test_parameters_of_tensordict():
    model = Model()
    model.params = TensorDictParams()
    message = "params: expected a module that reads its parameters, got TensorDictParams, whose values would stay"
    assert_refused(NotImplementedError, message, model)


def test_modules_that_something_else_distributes():
    assert_refused(
        ValueError,
        "DataParallel: expected a module that nothing distributes yet, got a DataParallel; shard its .module",
        nn.DataParallel(Model()),
    )
    model = Model()
    model.layers[0] = nn.DataParallel(model.layers[0])
    assert_refused(ValueError, r"layers\.0: expected a module that nothing distributes yet, got a DataPar", model)
    message = "DDPModel: expected a module that nothing distributes yet, got one that replicate was applied to"
    assert_refused(ValueError, message, replicate(Model()))
    model = Model()
    torch_fsdp.fully_shard(model.layers[1])
    message = r"layers\.1: expected units of fsdp_compiled.fully_shard alone, got one of torch.distributed.fsdp; use"
    assert_refused(ValueError, message, model)


def test_torchs_fully_shard_on_one_of_ours():
    with pytest.raises(AssertionError, match="fully_shard has already been applied"):
        torch_fsdp.fully_shard(fully_shard(Model()))
    message = (
        "expected units of fsdp_compiled.fully_shard alone, got torch.distributed.fsdp.fully_shard around or ins"
    )
    model = Model()
    fully_shard(model.layers[1])
    with pytest.raises(ValueError, match=f"Linear: {message}"):
        torch_fsdp.fully_shard(model)
    model = fully_shard(Model())
    with pytest.raises(ValueError, match=f"Model: {message}"):
        torch_fsdp.fully_shard(model.layers[1])


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ("0", TypeError, "expected shard_placement_fn to return a Shard, a ShardPlacementResult or None, got '0'"),
        (Replicate(), TypeError, r"expected shard_placement_fn to return a Shard, .* got R"),
        ((Shard(0),), TypeError, r"expected shard_placement_fn to return a Shard, .* got \("),
        (
            Shard(2),
            ValueError,
            r"expected a shard dimension of a 2-D parameter, got Shard\(2\); use Shard\(0\) to Sha",
        ),
        (Shard(-3), ValueError, r"expected a shard dimension of a 2-D parameter, got Shard\(-3\)"),
        (ShardPlacementResult("0"), TypeError, r"expected shard_placement_fn to return a Shard, .* got '0'"),
        (
            ShardPlacementResult(Shard(0), 3),
            ValueError,
            "expected ShardPlacementResult.mesh_info to be an FSDPMeshInfo",
        ),
    ],
    ids=str,
)
def test_wrong_placements(chosen, error, message):
    assert_refused(error, rf"layers\.0\.weight: {message}", shard_placement_fn=lambda param: chosen)


@pytest.mark.parametrize(
    ("error", "message", "kwargs"),
    [
        (TypeError, "mesh: expected a DeviceMesh or None, got 'cpu' of str", {"mesh": "cpu"}),
        (TypeError, r"mesh: expected a DeviceMesh or None, got \[0, 1\] of list", {"mesh": [0, 1]}),
        (TypeError, "mp_policy: expected a MixedPrecisionPolicy, got None", {"mp_policy": None}),
        (TypeError, "mp_policy: expected a MixedPrecisionPolicy, got <class", {"mp_policy": MixedPrecisionPolicy}),
        (
            TypeError,
            r"MixedPrecisionPolicy.param_dtype: expected torch.dtype or None, got 'bf16'",
            {"mp_policy": torch_fsdp.MixedPrecisionPolicy("bf16")},
        ),
        (TypeError, "offload_policy: expected an OffloadPolicy, got 'cpu'", {"offload_policy": "cpu"}),
        (TypeError, "ignored_params: expected parameters, got a int among them", {"ignored_params": {1}}),
        (TypeError, "reshard_after_forward: expected True, .* got 2.0 of float", {"reshard_after_forward": 2.0}),
        (ValueError, "reshard_after_forward: expected a divisor of .* 4, got -2", {"reshard_after_forward": -2}),
        (
            TypeError,
            r"layers\.0\.weight: expected param_dtype_override_fn to return None, .* got 'bf16' of str",
            {"mp_policy": MixedPrecisionPolicy(param_dtype_override_fn=lambda param: "bf16")},
        ),
        (
            ValueError,
            r"layers\.0\.weight: expected param_dtype_override_fn to return None, .* got torch.float16",
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: torch.half)},
        ),
    ],
)
def test_more_wrong_arguments(error, message, kwargs):
    assert_refused(error, message, **kwargs)
