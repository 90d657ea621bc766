"""Bad input: a clear error, and the model left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compiled import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from fsdp_compiled import fully_shard_with_compiled_compute as with_compiled_compute

pytestmark = pytest.mark.usefixtures("fake_group")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 8)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


def _assert_refused(error, message, model=None, target=None, **kwargs):
    model = Model() if model is None else model
    target = model if target is None else target
    before = {name: id(p) for name, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(error, match=message):
        fully_shard(target, **kwargs)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert [type(m) for m in model.modules()] == classes
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_a_container_without_forward():
    model = Model()
    _assert_refused(ValueError, "ModuleList: expected a module with a forward, got a container", model, model.layers)


def test_a_module_sharded_twice():
    model = Model()
    fully_shard(model)
    _assert_refused(ValueError, "FSDPModel: expected a module that is not sharded yet, got one that", model)


def test_an_outer_module_sharded_before_an_inner_one():
    model = fully_shard(Model())
    message = (
        "Linear: expected parameters that no unit around it has taken, got those of Model; apply fully_shard to inn"
    )
    _assert_refused(ValueError, message, model, model.layers[0])
    _assert_refused(ValueError, message, model, [model.layers[1], model.layers[0]])


def test_a_scalar_parameter():
    model = Model()
    model.layers[0].gain = nn.Parameter(torch.tensor(1.0))
    _assert_refused(ValueError, r"layers\.0\.gain: expected at least 1 dimension, got a scalar", model)


def test_a_non_contiguous_parameter():
    model = Model()
    model.layers[1].weight = nn.Parameter(torch.randn(6, 8).t())
    _assert_refused(
        ValueError,
        r"layers\.1\.weight: expected a contiguous parameter, got shape \(8, 6\) with strides",
        model,
    )


def test_meshes():
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    _assert_refused(ValueError, "mesh: expected a 1-D .* or 2-D .* DeviceMesh, got 3-D", mesh=three)
    _assert_refused(ValueError, "mesh: a 2-D mesh needs mesh_dim_names", mesh=init_device_mesh("cpu", (2, 2)))
    _assert_refused(TypeError, "mesh: expected a DeviceMesh or None, got 4 of int", mesh=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_mesh_of_a_device_that_is_not_there():
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cuda", torch.arange(4), _init_backend=False)
    _assert_refused(ValueError, "got device type 'cuda'", mesh=mesh)


def test_shard_dimensions():
    model = Model()
    _assert_refused(
        ValueError,
        r"layers\.1\.weight: dim 1 \(6\) must be divisible by 4 shards for Shard\(1\); use Shard\(0\) or pad",
        model,
        shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None,
    )
    _assert_refused(
        ValueError,
        r"layers\.0\.bias: expected a shard dimension of a 1-D parameter, got Shard\(1\)",
        shard_placement_fn=lambda p: Shard(1) if p.dim() == 1 else None,
    )
    _assert_refused(
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
        (TypeError, "mesh: expected a DeviceMesh or None, got None", {"dp_mesh_dims": object()}),
        (TypeError, "shard_placement_fn: expected a function or None, got 1", {"shard_placement_fn": 1}),
        (TypeError, "ignored_params: expected a set of parameters, got list", {"ignored_params": []}),
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
    _assert_refused(error, message, **kwargs)


@pytest.mark.parametrize(("target", "got"), [(3, "int"), ([3], "int"), (None, "NoneType")])
def test_what_is_no_module(target, got):
    with pytest.raises(TypeError, match=f"module: expected nn.Module or a list of them, got {got}"):
        fully_shard(target)


def test_an_empty_list():
    with pytest.raises(ValueError, match="module: expected a module or a non-empty list of modules"):
        fully_shard([])


def test_compiled_compute_of_a_list():
    with pytest.raises(TypeError, match="module: expected one nn.Module, got list; call it on each module"):
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
    _assert_refused(
        ValueError,
        r"layers\.1\.weight: is the same parameter as weight of unit .*; expected the same param_dtype and "
        r"reduce_dtype for both, got \(torch\.float32, torch\.float32\) there and \(torch\.bfloat16, ",
        model,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))  # concerns no parameter


def test_a_smaller_group_needs_the_whole_world():
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("a", "b"))["a"]
    _assert_refused(
        ValueError, "expected a divisor of the shard world size 1, got 2", reshard_after_forward=2, mesh=mesh
    )


def test_named_mesh_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="dp_mesh_dims: at least one of shard and replicate must be given"):
        DataParallelMeshDims()
    _assert_refused(
        ValueError,
        r"dp_mesh_dims: expected names among \('dp', 'tp'\), got 'pp'",
        mesh=mesh,
        dp_mesh_dims=DataParallelMeshDims(shard="pp"),
    )
    _assert_refused(
        ValueError,
        r"layers\.0\.weight: expected a DTensor on the mesh given to fully_shard, since dp_mesh_dims leaves out",
        mesh=mesh,
        dp_mesh_dims=DataParallelMeshDims(shard="dp"),
    )
    _assert_refused(
        ValueError,
        "mesh: dp_mesh_dims needs a mesh with mesh_dim_names",
        mesh=init_device_mesh("cpu", (4,)),
        dp_mesh_dims=DataParallelMeshDims(shard="dp"),
    )


def test_a_list_unit_that_lies_only_in_part_below():
    first, second = Model(), Model()
    fully_shard([first.layers[0], second.layers[0]])
    _assert_refused(
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
    _assert_refused(ValueError, r"layers\.0\.bias: expected meshes with dimension names for a parameter that", model)


def test_a_dtensor_that_is_sharded_over_a_data_parallel_dimension():
    model = Model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        for name, param in list(layer.named_parameters()):
            placements = [Shard(0), Replicate()]
            setattr(
                layer, name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements, src_data_rank=None))
            )
    _assert_refused(
        ValueError,
        r"layers\.0\.weight: expected Replicate\(\) on data-parallel shard dimension 'dp', got S\(0\)",
        model,
        mesh=mesh,
        dp_mesh_dims=DataParallelMeshDims(shard="dp"),
    )


def test_deepcopy():
    import copy

    model = fully_shard(Model())
    with pytest.raises(TypeError, match="FSDPModel: a sharded module cannot be deep-copied"):
        copy.deepcopy(model)


def test_pickling_and_copying():
    import copy
    import io
    import pickle

    model = Model()
    fully_shard(model.layers[0])
    fully_shard(model)
    for target in (model, model.layers[1], nn.Sequential(model)):
        for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
            with pytest.raises(
                TypeError, match=r"a sharded module cannot be pickled or copied.*; save state_dict\(\)"
            ):
                save(target)
    with pytest.raises(TypeError, match="FSDPModel: a sharded module cannot be pickled or copied"):
        copy.copy(model)


def test_sharing_memory_with_other_processes():
    model = Model()
    fully_shard(model.layers[0])
    for target in (nn.Sequential(model), model.layers[0]):
        with pytest.raises(TypeError, match="FSDPLinear: a sharded module cannot share its memory"):
            target.share_memory()
    nn.Linear(1, 1).share_memory()


def test_methods():
    model = fully_shard(Model())
    with pytest.raises(
        ValueError, match="set_modules_to_forward_prefetch: expected modules given to fully_shard, got Linear"
    ):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    with pytest.raises(
        TypeError, match="set_modules_to_backward_prefetch: expected a list of modules, got FSDPModel"
    ):
        model.set_modules_to_backward_prefetch(model)
    for method in (model.set_requires_gradient_sync, model.set_reshard_after_forward, model.unshard):
        with pytest.raises(TypeError, match="expected True or False, got 1 of int"):
            method(1)
    for factor, error in ((0, ValueError), (-1.0, ValueError), ("2", TypeError), (True, TypeError)):
        with pytest.raises(error, match="factor: expected a"):
            model.set_gradient_divide_factor(factor)
    for count, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="max_input_buffers: expected a"):
            model.set_reduce_scatter_max_input_buffers(count)
    for method, wanted in (
        (model.set_custom_all_gather, "AllGather"),
        (model.set_custom_reduce_scatter, "ReduceScatter"),
    ):
        with pytest.raises(TypeError, match=f"comm: expected an {wanted}, got 3 of int"):
            method(3)
    with pytest.raises(TypeError, match="hook: expected a function, got 3"):
        model.set_all_reduce_hook(3)
    with pytest.raises(TypeError, match="stream: expected a torch.Stream or None, got 3 of int"):
        model.set_all_reduce_hook(print, stream=3)
    with pytest.raises(ValueError, match="FSDPModule|expected a module given to fully_shard, got one without state"):
        fully_shard.state(nn.Linear(1, 1))
    assert fully_shard.state(model) is model._get_fsdp_state()
    with pytest.raises(ValueError, match="share_comm_ctx: expected modules given to fully_shard, got Linear"):
        share_comm_ctx([nn.Linear(1, 1)])


def test_loading_a_plain_tensor_in_place_of_a_shard():
    model = fully_shard(Model())
    state = {name: nn.Parameter(torch.zeros(value.shape)) for name, value in model.state_dict().items()}
    with pytest.raises(TypeError, match=r"layers\.0\.weight: expected a sharded DTensor, got a Parameter"):
        model.load_state_dict(state, assign=True)
    assert isinstance(model.layers[0].weight, DTensor)


def test_a_refused_assignment_leaves_every_parameter_sharded():
    model = Model()
    model.gain = nn.Parameter(torch.ones(8))
    fully_shard(model)
    before = dict(model.named_parameters())
    state = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
    with pytest.raises(TypeError, match=r"gain: expected a sharded DTensor, got a Tensor; assign a DTensor"):
        model.load_state_dict(state, assign=True)
    other = {f"layers.1.{name}": value for name, value in fully_shard(nn.Linear(8, 4)).state_dict().items()}
    with pytest.raises(ValueError, match=r"layers\.1\.weight: expected shape \(8, 6\) with .* got \(4, 8\)"):
        model.load_state_dict(other, strict=False, assign=True)
    assert all(param is before[name] for name, param in model.named_parameters())


@pytest.mark.parametrize("value", [nn.Parameter(torch.zeros(6, 8)), None])
def test_assigning_what_is_not_sharded(value):
    model = Model()
    fully_shard(model.layers[0])
    fully_shard(model)
    before = dict(model.named_parameters())
    with pytest.raises(
        TypeError, match=rf"layers\.0\.weight: expected a sharded DTensor, got a {type(value).__name__}"
    ):
        model.layers[0].weight = value
    with pytest.raises(ValueError, match=r"layers\.1\.weight: expected shape \(8, 6\) with .* got \(6, 8\)"):
        model.layers[1].weight = model.layers[0].weight
    assert all(param is before[name] for name, param in model.named_parameters())


def test_deleting_a_sharded_parameter():
    model = fully_shard(Model())
    message = (
        r"layers\.0\.bias: expected to stay after fully_shard, which all-gathers it with its unit; delete it before"
    )
    with pytest.raises(AttributeError, match=message):
        del model.layers[0].bias
    assert isinstance(model.layers[0].bias, DTensor)
    del model.layers[0]._parameters["bias"]  # as torch.nn.utils.weight_norm does
    assert not hasattr(model.layers[0], "bias")


def test_slicing_a_sharded_sequential_gives_a_plain_one():
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    assert isinstance(model, FSDPModule)
    assert type(model[1:]) is nn.Sequential


def test_modules_of_one_class_keep_their_own_policies():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    fully_shard(first, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(second)
    assert type(first) is type(second)
    dtypes = [m._fsdp_params["weight"].dtypes[0] for m in (first, second)]
    assert dtypes == [torch.bfloat16, torch.float32]
    assert isinstance(first.weight, DTensor)
