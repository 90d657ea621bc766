"""What is done wrong to a model that is sharded already."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compiled import FSDPModule, MixedPrecisionPolicy, fully_shard
from tests.errors.models import Model, sharded_model

pytestmark = pytest.mark.usefixtures("fake_group")


def test_deepcopy_of_a_part_of_a_unit():
    model = Model()
    fully_shard(model.layers[0])
    fully_shard(model)
    message = (
        "Linear: expected all modules with parameters of unit Model to be deep-copied, got this one alone; "
        "deep-copy the module that was given to fully_shard, or one around it"
    )
    with pytest.raises(ValueError, match=message):
        copy.deepcopy(model.layers[1])
    with pytest.raises(ValueError, match=message):
        copy.deepcopy(model.layers)
    copied = copy.deepcopy(model.layers[0])
    assert isinstance(copied, FSDPModule) and copied.weight is not model.layers[0].weight


def test_deepcopy_of_a_function_that_refers_to_the_module():
    model = sharded_model()
    model.eval_forward = lambda x: model(x)
    with pytest.raises(
        TypeError, match=r"Model\.eval_forward: expected no function that refers to the module, got a fu"
    ):
        copy.deepcopy(model)
    del model.eval_forward
    torch_fsdp.register_fsdp_forward_method(model, "forward")
    with pytest.raises(TypeError, match=r"Model\.forward: .* got a method, .*; put it there after deep-copying"):
        copy.deepcopy(nn.Sequential(model))


def test_pickling_and_copying():
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
    dtypes = [m._fsdp_params["weight"].spec.all_gather.dtype for m in (first, second)]
    assert dtypes == [torch.bfloat16, torch.float32]
    assert isinstance(first.weight, DTensor)


ADDED = "expected a parameter that fully_shard has seen, got one that was added to the model afterwards"
CHANGES = {
    "append": (lambda m: m.layers.append(nn.Linear(8, 8)), r"layers\.2\.weight: .*on layers\.2 \(Linear\) first"),
    "swap": (
        lambda m: setattr(m.layers, "0", nn.Linear(8, 6)),
        r"layers\.0\.weight: .*on layers\.0 \(Linear\) first",
    ),
    "add": (lambda m: m.add_module("head", nn.Linear(8, 8)), r"head\.weight: .*on head \(Linear\) first, or freeze"),
    "parameter": (lambda m: setattr(m, "gain", nn.Parameter(torch.ones(8))), "gain: .*; add it before fully_shard"),
}


def _call(model, mode):
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if mode == "full" else model
    return lambda: call(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("mode", ["eager", "full"])
@pytest.mark.parametrize("when", ["before the first forward", "later"])
@pytest.mark.parametrize("change", CHANGES)
def test_modules_added_after_sharding_are_heard_of(change, when, mode):
    model = sharded_model()
    step = _call(model, mode)
    if when == "later":
        step()
    apply, message = CHANGES[change]
    apply(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=message) as raised:
            step()
        assert ADDED in str(raised.value)
    for param in model.parameters():
        if not isinstance(param, DTensor):
            param.requires_grad_(False)
    if change != "parameter":
        step()


@pytest.mark.parametrize("mode", ["eager", "full"])
def test_modules_that_may_be_added_after_sharding(mode):
    model = sharded_model()
    step = _call(model, mode)
    step()
    model.layers.append(nn.ReLU())
    model.layers.append(nn.Linear(8, 8).requires_grad_(False))
    model.layers.append(nn.Linear(8, 8))
    fully_shard(model.layers[-1])
    model.layers[0] = fully_shard(nn.Linear(8, 6))
    step()
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert {name for name, grad in grads.items() if not isinstance(grad, DTensor)} == {
        "layers.3.weight",
        "layers.3.bias",
    }
    state = model._get_fsdp_state()
    for name in ("0", "4"):
        added = model.layers.get_submodule(name)._get_fsdp_state()
        assert not added.is_root and added.outermost is state
        assert added.params[0].name == f"layers.{name}.weight"


def test_an_ignored_parameter_is_not_taken_for_an_added_one():
    with torch.device("meta"):
        model = Model()
    fully_shard(model, ignored_params={model.layers[0].weight})
    model.to_empty(device="cpu")  # other parameter objects
    model(torch.ones(2, 8)).sum().backward()
    assert type(model.layers[0].weight) is nn.Parameter


def test_a_parameter_that_another_code_has_put_past_the_module():
    model = sharded_model()
    model.layers[0]._parameters["weight"] = nn.Parameter(torch.ones(6, 8))
    with pytest.raises(TypeError, match=r"layers\.0\.weight: expected a sharded DTensor, got a Parameter; assign"):
        model(torch.ones(2, 8))
    model.layers[0]._parameters["weight"] = nn.Parameter(model.layers[1].weight.detach().clone())
    with pytest.raises(ValueError, match=r"layers\.0\.weight: expected shape \(6, 8\) with .* got \(8, 6\) with"):
        model.layers[0].unshard()
