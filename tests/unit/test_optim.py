from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from abc import ABC
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_compiled.optim import step_on_shards

pytestmark = pytest.mark.usefixtures("fake_group")


class Lion(optim.Optimizer):
    """Elementwise, with state of every kind: per element, a number and a tensor without dimensions."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "seen": 0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["seen"] += 1
            for param in group["params"]:
                if param.grad is None or not param.requires_grad:
                    continue
                state = self.state[param]
                momentum = state.get("momentum", torch.zeros_like(param, dtype=torch.float64))
                state["momentum"] = momentum.lerp(param.grad.double(), 0.1)  # a new tensor at every step
                state["steps"] = state.get("steps", 0) + 1
                state["largest"] = torch.zeros(())
                param.sub_(state["momentum"].sign().to(param.dtype), alpha=group["lr"])


class Registered(optim.SGD):
    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind


class Named(Registered, kind="named"):
    pass


class Abstract(ABC, optim.SGD):
    """Gets its ``__dict__`` below a base other than object, as the optimizers of pytorch_optimizer do."""


def _dtensor(*shape, placement=None, dtype=torch.float32):
    mesh = init_device_mesh("cpu", (4,))
    return DTensor.from_local(torch.randn(shape, dtype=dtype), mesh, [placement or Shard(0)])


def _param(*shape, **kwargs):
    param = nn.Parameter(_dtensor(*shape, **kwargs))
    param.grad = _dtensor(*shape, **kwargs)
    return param


def _raises(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


# ---- what may be wrapped ----


def test_a_class_that_wants_arguments_of_its_subclasses():
    optimizer = step_on_shards(Named([_param(4, 2)], lr=0.1), elementwise=True)
    optimizer.step()
    assert optimizer.kind == "named"
    assert type(copy.deepcopy(optimizer)) is Named


def test_a_class_with_a_base_without_dict():
    optimizer = step_on_shards(Abstract([_param(4, 2)], lr=0.1), elementwise=True)
    optimizer.step()
    assert isinstance(optimizer, Abstract)
    assert type(copy.deepcopy(optimizer)) is Abstract


def test_returns_the_optimizer_and_may_be_called_again():
    optimizer = optim.AdamW([_param(2, 3)])
    assert step_on_shards(optimizer) is optimizer
    cls = type(optimizer)
    assert step_on_shards(optimizer) is optimizer
    assert type(optimizer) is cls is type(step_on_shards(optim.AdamW([_param(2)])))
    assert issubclass(cls, optim.AdamW) and cls.__name__ == "AdamW" and cls is not optim.AdamW


@pytest.mark.parametrize("argument", ["blocks", "newton_schulz"])
def test_refuses_arguments_about_matrices_in_a_second_call(argument):
    optimizer = step_on_shards(optim.Muon([_param(2, 3)]))
    value = {"blocks": {nn.Parameter(torch.ones(2, 2)): (99,)}, "newton_schulz": lambda matrix, *_: matrix}[argument]
    with _raises(
        ValueError,
        f"{argument}: expected None for an optimizer that steps on shards already, got a value; "
        "pass it to the first call",
    ):
        step_on_shards(optimizer, **{argument: value})
    assert step_on_shards(optimizer) is optimizer


def test_refuses_what_is_no_optimizer():
    with _raises(
        TypeError,
        "optimizer: expected a torch.optim.Optimizer, got Linear(in_features=1, out_features=1, bias=True) of Linear",
    ):
        step_on_shards(nn.Linear(1, 1))
    with _raises(TypeError, "elementwise: expected True or False, got 1 of int"):
        step_on_shards(optim.SGD([_param(2)]), elementwise=1)


@pytest.mark.parametrize("cls", [optim.Adafactor, optim.LBFGS, optim.SparseAdam])
def test_refuses_optimizers_that_are_not_elementwise(cls):
    message = (
        f"{cls.__name__}: expected an elementwise optimizer, got one whose update of an element depends on others; "
        "use it without step_on_shards"
    )
    for elementwise in (False, True):
        with _raises(ValueError, message):
            step_on_shards(cls([_param(2, 3)]), elementwise=elementwise)


def test_refuses_matrices_under_tensor_parallelism_and_on_the_host():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements in ((Shard(0), Shard(1)), (Shard(0), Shard(0))):
        param = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, placements))
        message = "param_groups[0]['params'][0]: expected matrices sharded over one mesh dimension, got ("
        with pytest.raises(NotImplementedError, match=re.escape(message)) as found:
            step_on_shards(optim.Muon([param]))
        assert str(found.value).endswith("; step matrices under tensor parallelism without step_on_shards")
    param = nn.Parameter(_param(4, 4).detach())
    offloaded = param.device_mesh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(offloaded), "device_type", "cuda")
        with pytest.raises(NotImplementedError, match="expected a matrix on cuda, got one on cpu"):
            step_on_shards(optim.Muon([param]))


def test_muon_refuses_gradients_and_state_of_another_layout():
    param = nn.Parameter(_param(4, 4).detach())  # [16, 4] on 4 ranks
    optimizer = step_on_shards(optim.Muon([param]))
    param.grad = DTensor.from_local(torch.ones(16, 1), param.device_mesh, (Shard(1),))
    with pytest.raises(ValueError, match="expected a gradient with the parameter's"):
        optimizer.step()
    param.grad = torch.zeros_like(param)
    optimizer.state[param]["momentum_buffer"] = torch.zeros(16, 4)
    with pytest.raises(ValueError, match="expected a DTensor as state 'momentum_buffer'"):
        optimizer.step()
    with pytest.raises(
        ValueError, match=re.escape("newton_schulz of param_groups[0]['params'][0]: expected an update")
    ):
        _alone(lambda matrix, *_: matrix[:1])


def _alone(newton_schulz):
    param = nn.Parameter(torch.ones(2, 2))
    param.grad = torch.ones(2, 2)
    step_on_shards(optim.Muon([param]), newton_schulz=newton_schulz).step()


def test_plain_parameters_are_stepped_alone():
    params = [nn.Parameter(torch.eye(3)) for _ in range(2)]
    for param in params:
        param.grad = torch.arange(9.0).view(3, 3)
    step_on_shards(optim.Muon(params[:1])).step()
    optim.Muon(params[1:]).step()
    assert torch.equal(*params)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 3)])
def test_muon_steps_beside_an_empty_matrix(shape):
    """One has no owner, but momentum as torch gives it one."""
    empty, param = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.ones(4, 3))
    empty.grad, param.grad = torch.zeros(shape), torch.randn(4, 3)
    optimizer = optim.Muon([param])
    optimizer.param_groups[0]["params"].append(empty)
    step_on_shards(optimizer).step()
    assert optimizer.state[empty]["momentum_buffer"].shape == shape
    assert not torch.equal(param, torch.ones(4, 3))


def test_refuses_classes_that_it_does_not_know():
    class MyAdam(optim.Adam):
        pass

    for optimizer in (MyAdam([_param(2)]), Lion([_param(2)])):
        message = (
            f"{type(optimizer).__name__}: expected an optimizer of torch.optim that is known to be elementwise, got "
            "another class; pass elementwise=True if each element's update depends on that element alone"
        )
        with _raises(ValueError, message):
            step_on_shards(optimizer)
        assert step_on_shards(optimizer, elementwise=True) is optimizer


def test_refuses_a_differentiable_step():
    message = "SGD: expected differentiable=False, got True; a step on shards is not recorded by autograd"
    with _raises(ValueError, message):
        step_on_shards(optim.SGD([_param(2)], differentiable=True))


class Around(optim.Optimizer):
    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups[0]["params"], {})
        self.inner, self.param_groups = optimizer, optimizer.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


def test_refuses_an_optimizer_around_another():
    """The inner one's state is of the plain tensors of one step; in the next it would begin anew."""
    optimizer = Around(optim.Adam([_param(4, 2)]))
    do = "give that one to step_on_shards, then to this class"
    with _raises(ValueError, f"Around.inner: expected no optimizer within the optimizer, got Adam; {do}"):
        step_on_shards(optimizer, elementwise=True)


def test_refuses_a_step_that_was_replaced():
    optimizer = optim.SGD([_param(2)])
    optimizer.step = abs
    message = (
        "SGD.step: expected the method of its class, got <built-in function abs> on the object; "
        "call step_on_shards before what replaces it"
    )
    with _raises(ValueError, message):
        step_on_shards(optimizer)


def test_refuses_partial_parameters_at_once_and_in_a_step():
    param = _param(2, placement=Partial())
    message = (
        "param_groups[{}]['params'][0]: expected a DTensor without Partial, got shape "
        f"(2,) with ({Partial()!r},) on {param.device_mesh}; use the optimizer without step_on_shards"
    )
    with _raises(ValueError, message.format(0)):
        step_on_shards(optim.SGD([param]))
    optimizer = step_on_shards(optim.SGD([_param(2)]))
    optimizer.add_param_group({"params": [param]})
    with _raises(ValueError, message.format(1)):
        optimizer.step()


# ---- what a step refuses ----


def test_refuses_gradients_of_another_layout():
    good, bad = _param(2, 3), _param(2, 3)
    before = good._local_tensor.clone()
    optimizer = step_on_shards(optim.SGD([("good", good), ("layer.bad", bad)]))
    bad.grad = DTensor.from_local(torch.ones(8, 3), bad.device_mesh, [Replicate()])
    message = (
        f"layer.bad: expected a gradient with the parameter's (Shard(dim=0),) on {bad.device_mesh}, got "
        f"(Replicate(),) on {bad.device_mesh}; redistribute it before the step"
    )
    with _raises(ValueError, message):
        optimizer.step()
    assert torch.equal(good._local_tensor, before)


def test_refuses_plain_gradients_and_state_of_the_whole_shape():
    param = _param(2, 3)
    optimizer = step_on_shards(optim.AdamW([param]))
    optimizer.step()
    momentum = optimizer.state[param]["exp_avg"]
    optimizer.state[param]["exp_avg"] = torch.zeros(8, 3)
    message = (
        "param_groups[0]['params'][0]: expected a DTensor as state 'exp_avg', got a plain tensor of the whole shape "
        "(8, 3); distribute it like the parameter before it is loaded"
    )
    with _raises(ValueError, message):
        optimizer.step()
    optimizer.state[param]["exp_avg"] = momentum
    param.grad = torch.zeros(8, 3)
    message = (
        "param_groups[0]['params'][0]: expected a DTensor as gradient, got a plain tensor of shape (8, 3); "
        "distribute it like the parameter"
    )
    with _raises(ValueError, message):
        optimizer.step()


# ---- what a step does ----


def test_optimizers_of_other_classes():
    param, frozen = _param(2, 3), nn.Parameter(_dtensor(2), requires_grad=False)
    alone, grad = nn.Parameter(param._local_tensor.clone()), param.grad
    alone.grad = grad._local_tensor
    optimizer, other = step_on_shards(Lion([param, frozen]), elementwise=True), Lion([alone])
    for _ in range(3):
        optimizer.step()
        other.step()
    state, expected = optimizer.state[param], other.state[alone]
    assert torch.equal(param._local_tensor, alone)
    assert (optimizer.steps, optimizer.param_groups[0]["seen"], state["steps"]) == (3, 3, 3)
    assert list(state) == list(expected)
    assert isinstance(state["momentum"], DTensor) and state["momentum"].dtype is torch.float64
    assert torch.equal(state["momentum"]._local_tensor, expected["momentum"])
    assert type(state["largest"]) is torch.Tensor
    assert frozen not in optimizer.state
    assert param.grad is grad and param.requires_grad and param._local_tensor.grad is None


def test_plain_parameters_beside_dtensors():
    param, plain = _param(2, 3), nn.Parameter(torch.ones(4))
    alone = nn.Parameter(torch.ones(4))
    optimizer = step_on_shards(optim.AdamW([param, plain], foreach=True))
    other = optim.AdamW([alone], foreach=True)
    for _ in range(2):
        plain.grad, alone.grad = torch.full((4,), 2.0), torch.full((4,), 2.0)
        optimizer.step()
        other.step()
    assert torch.equal(plain, alone)
    assert type(optimizer.state[plain]["exp_avg"]) is torch.Tensor
    assert isinstance(optimizer.state[param]["exp_avg"], DTensor)
    assert list(optimizer.state) == [param, plain]


class _Restarts(Lion):
    """Deletes all state of a parameter at the end of every second step."""

    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            if self.state[param]["steps"] == 2:
                del self.state[param]


def test_state_that_a_step_deletes():
    sharded, plain = _param(2, 3), nn.Parameter(torch.ones(2))
    plain.grad = torch.ones(2)
    optimizer = step_on_shards(_Restarts([sharded, plain]), elementwise=True)
    optimizer.state["mine"] = {"kept": True}
    for step in range(4):
        optimizer.step()
        assert optimizer.state.keys() == ({"mine"} if step % 2 else {"mine", sharded, plain})


def test_gradients_of_another_dtype():
    param = nn.Parameter(_dtensor(2, 3, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    param.grad = _dtensor(2, 3)
    before = param._local_tensor.clone()
    step_on_shards(optim.SGD([param], lr=1.0)).step()
    torch.testing.assert_close(param._local_tensor, (before - param.grad._local_tensor).bfloat16())


def test_hooks_and_closures_see_dtensors():
    seen = []

    def look(optimizer, *_):
        seen.append([type(param) for param in optimizer.param_groups[0]["params"]])

    optimizer = step_on_shards(optim.SGD([_param(2)]))
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    handles = [register_optimizer_step_pre_hook(look), register_optimizer_step_post_hook(look)]
    optimizer.step(lambda: look(optimizer))
    for handle in handles:
        handle.remove()
    assert seen == [[DTensor]] * 5


@pytest.mark.parametrize("inside", ["closure", "step"])
def test_an_exception_leaves_everything_as_it_was_shown(inside):
    class Failing(optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise KeyError("in step")

    param = _param(2)
    optimizer = step_on_shards(Failing([param], momentum=0.9), elementwise=True)
    with pytest.raises(KeyError, match=inside):
        optimizer.step(partial(_fail, "in closure") if inside == "closure" else None)
    assert optimizer.param_groups[0]["params"] == [param] and param.grad is not None
    assert list(optimizer.state) == ([] if inside == "closure" else [param])
    assert all(isinstance(values["momentum_buffer"], DTensor) for values in optimizer.state.values())
    with pytest.raises(KeyError, match="in step"):
        optimizer.step()


def _fail(text):
    raise KeyError(text)


def test_a_step_keeps_no_tensor():
    param = _param(2, 3)
    optimizer = step_on_shards(optim.AdamW([param]))
    optimizer.step()
    held = [weakref.ref(param.grad._local_tensor), weakref.ref(optimizer.state[param]["exp_avg"]._local_tensor)]
    optimizer.zero_grad()
    optimizer.state[param]["exp_avg"] = _dtensor(2, 3)
    assert [reference() for reference in held] == [None, None]


def test_an_optimizer_is_freed_with_its_last_reference():
    optimizer = step_on_shards(optim.AdamW([_param(2, 3)]))
    scheduler = optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.step()
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        del scheduler.optimizer, optimizer
        assert alive() is None
    finally:
        gc.enable()


def test_copies_step_on_dtensors_until_they_are_wrapped():
    optimizer = step_on_shards(optim.AdamW([_param(2, 3)]))
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    assert type(copied) is type(copy.copy(optimizer)) is optim.AdamW
    plain = step_on_shards(optim.AdamW([nn.Parameter(torch.ones(2))]))
    assert type(pickle.loads(pickle.dumps(plain))) is optim.AdamW
    copied.step()
    step_on_shards(copied).step()
    (values,), (expected,) = copied.state.values(), optimizer.state.values()
    assert values["step"] == expected["step"] + 2


def test_torch_compile_leaves_the_step_alone():
    param = _param(2, 3)
    before = param._local_tensor.clone()
    optimizer = step_on_shards(optim.SGD([param], lr=1.0))
    torch.compile(lambda: optimizer.step(), backend="eager")()
    assert torch.equal(param._local_tensor, before - param.grad._local_tensor)
