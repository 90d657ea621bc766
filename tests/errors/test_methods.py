"""Methods of FSDPModule, called wrongly."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import DataParallelMeshDims, fully_shard, register_fsdp_forward_method, share_comm_ctx
from tests.errors.models import Model, sharded_model

pytestmark = pytest.mark.usefixtures("fake_group")


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


FLAGS = {
    "set_requires_gradient_sync": "requires_gradient_sync",
    "set_requires_all_reduce": "requires_all_reduce",
    "set_reshard_after_forward": "reshard_after_forward",
    "set_reshard_after_backward": "reshard_after_backward",
    "set_keep_unsharded_storage": "keep",
    "set_reduce_scatter_unused_params": "reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group": "enable",
    "set_is_last_backward": "is_last_backward",
    "set_unshard_in_backward": "unshard_in_backward",
    "set_force_sum_reduction_for_comms": "enable",
    "set_allocate_memory_from_process_group_for_comm": "enable",
    "set_manual_backward_finalization": "enabled",
    "unshard": "async_op",
    "_set_unshard_async_op": "async_op",
}
RECURSIVE = list(FLAGS)[:7]


@pytest.mark.parametrize("method", FLAGS)
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_flags(method, value):
    message = f"{FLAGS[method]}: expected True or False, got {value!r} of {type(value).__name__}"
    with pytest.raises(TypeError, match=message):
        getattr(sharded_model(), method)(value)


@pytest.mark.parametrize("method", [*RECURSIVE, "set_reduce_scatter_max_input_buffers"])
def test_recursion(method):
    with pytest.raises(TypeError, match="recurse: expected True or False, got 'no' of str"):
        getattr(sharded_model(), method)(1 if method.endswith("buffers") else True, recurse="no")


@pytest.mark.parametrize("method", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "expected a list of modules, got None of NoneType"),
        ("layers", TypeError, "expected a list of modules, got 'layers' of str"),
        ([3], ValueError, "expected modules given to fully_shard, got int; shard it first"),
    ],
)
def test_prefetch_lists(method, value, error, message):
    with pytest.raises(error, match=f"{method}: {message}"):
        getattr(sharded_model(), method)(value)


@pytest.mark.parametrize(
    ("method", "value", "error", "message"),
    [
        ("set_gradient_divide_factor", None, TypeError, "factor: expected a number, got None of NoneType"),
        (
            "set_gradient_divide_factor",
            float("nan"),
            ValueError,
            "factor: expected a positive, finite number, got nan",
        ),
        (
            "set_gradient_divide_factor",
            float("inf"),
            ValueError,
            "factor: expected a positive, finite number, got inf",
        ),
        ("set_reduce_scatter_divide_factor", "2", TypeError, "factor: expected a number, got '2' of str"),
        ("set_reduce_scatter_max_input_buffers", True, TypeError, "max_input_buffers: expected an int, got True"),
        ("set_post_optim_event", 3, TypeError, "event: expected a torch.Event or None, got 3"),
        ("set_symm_mem_for_comm", "gloo", ValueError, "backend: expected 'NCCL' or 'CUDA', got 'gloo'"),
        ("set_all_reduce_hook", None, TypeError, "hook: expected a function, got None"),
    ],
)
def test_values(method, value, error, message):
    with pytest.raises(error, match=message):
        getattr(sharded_model(), method)(value)


@pytest.mark.parametrize(
    ("method", "args"),
    [("set_manual_backward_finalization", (True,)), ("finalize_backward", ()), ("reset_iter_state", ())],
)
def test_what_only_the_outermost_unit_can_do(method, args):
    with pytest.raises(
        RuntimeError, match=rf"{method}: expected the outermost unit, got Model\.layers\.0; call it on Mo"
    ):
        getattr(sharded_model().layers[0], method)(*args)


def test_finalization_without_asking_for_it():
    with pytest.raises(
        RuntimeError, match=r"finalize_backward: call set_manual_backward_finalization\(True\) before"
    ):
        sharded_model().finalize_backward()


class _Stream:
    def wait_stream(self, other):
        raise NotImplementedError


@pytest.mark.parametrize("roles", [{"replicate": "a"}, {"replicate": "a", "shard": "b"}])
def test_a_stream_for_a_hook_where_gradients_are_reduced_over_replicas(roles):
    mesh = init_device_mesh("cpu", (2, 2) if "shard" in roles else (4,), mesh_dim_names=("a", "b")[: len(roles)])
    model = fully_shard(Model(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**roles))
    with pytest.raises(
        ValueError, match="stream: expected None for Model, whose gradients are reduced over replicas, "
    ):
        model.set_all_reduce_hook(print, stream=_Stream())
    model.set_all_reduce_hook(print)


def test_a_separate_group_where_a_unit_below_is_only_replicated():
    model, mesh = Model(), init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model.layers[1], mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="a"))
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"1\.weight: expected a sharded parameter, got one that is only replicated"):
        model.set_separate_reduce_scatter_group()
    units = (model, *model.layers)
    assert not any(fully_shard.state(unit).unit.config.separate_reduce_group for unit in units)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fully_shard.state(3), TypeError, "module: expected a module given to fully_shard, got 3 of int"),
        (lambda: share_comm_ctx(None), TypeError, "share_comm_ctx: expected a list of modules, got None of NoneType"),
        (lambda: share_comm_ctx([3]), ValueError, "share_comm_ctx: expected modules given to fully_shard, got int"),
        (
            lambda: register_fsdp_forward_method(sharded_model(), "nope"),
            ValueError,
            "FSDPModel: expected a method 'nope', found none",
        ),
        (
            lambda: register_fsdp_forward_method(sharded_model(), print),
            TypeError,
            "method_name: expected the name of a method, got <built-in function print>",
        ),
        (
            lambda: register_fsdp_forward_method("model", "forward"),
            TypeError,
            "module: expected an nn.Module, got 'model' of str",
        ),
    ],
)
def test_functions_on_sharded_modules(call, error, message):
    with pytest.raises(error, match=message):
        call()
