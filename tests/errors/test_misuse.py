"""What cannot be right around a sharded model is an error that says what to do instead, and not a wrong number."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fsdp_compiled import compile, fully_shard, fully_shard_with_compiled_compute
from tests.support.training import MLP, shard

pytestmark = pytest.mark.usefixtures("fake_group")
X = torch.randn(2, 10)


def _sharded(mode: str):
    model = MLP()
    if mode != "regional":
        return model, torch.compile(shard(model, "eager"), backend="aot_eager") if mode == "full" else shard(
            model, mode
        )
    for block in model.blocks:
        fully_shard_with_compiled_compute(block, compile_kwargs={"backend": "aot_eager"})
    return model, fully_shard(model)


# ---- other parameters in place of the model's ----


@pytest.mark.parametrize("mode", ["eager", "regional", "full"])
@pytest.mark.parametrize("name", ["blocks.0.0.weight", "scale"])
@pytest.mark.parametrize("sharded", [True, False])
def test_functional_call(mode, name, sharded):
    model, call = _sharded(mode)
    given = {name: (model if sharded else MLP()).get_parameter(name).detach() * 2}
    prefix = "_orig_mod." if mode == "full" else ""
    message = (
        rf"{name}: expected the parameter that fully_shard registered, got a \w+ in its place, as torch.func.fun"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            functional_call(call, {f"{prefix}{key}": value for key, value in given.items()}, (X,))
        call(X).sum().backward()  # and also where forward left the model unsharded


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("computed", [True, False])
def test_functional_call_inside_a_graph(sharded, computed):
    model = shard(MLP(), "eager")
    given = {name: value.detach() for name, value in (model if sharded else MLP()).named_parameters()}
    double = (lambda value: value * 2) if computed else (lambda value: value)

    def step(x, params):
        return functional_call(model, {name: double(value) for name, value in params.items()}, (x,))

    with pytest.raises(
        RuntimeError, match=r"scale: expected the parameter that fully_shard registered, got a Tensor"
    ):
        torch.compile(step, fullgraph=True, backend="aot_eager")(X, given)


class LooksAround(nn.Module):
    """Reads and enumerates its parameters, one of which is tied, in every way and order."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones(10))

    def forward(self, x):
        self.seen = self.gain.dtype
        x = x * self.gain
        self.first.seen = sum(p.shape[0] for p in self.parameters())
        names = [name for name, p in self.named_parameters(remove_duplicate=False) if p.requires_grad]
        names += [name for name, _ in self.second._parameters.items()]
        names += list(self.first.__dict__["_parameters"])
        self.gain, self.second.weight.requires_grad, self.first._parameters["weight"].shape
        return self.second(self.first(x)) * self.gain * len(names)


@pytest.mark.parametrize("outer", [True, False])
def test_a_graph_that_looks_at_its_own_parameters(outer):
    model = LooksAround()
    fully_shard(model.second)
    fully_shard(model)
    call = torch.compile((lambda x: model(x)) if outer else model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        call(X).sum().backward()
    model.second.weight.requires_grad = False
    assert call(X).shape == X.shape


def test_a_parametrization_of_a_sharded_parameter():
    model = shard(MLP(), "eager")
    del model.blocks[0][0]._parameters["weight"]
    with pytest.raises(
        RuntimeError, match=r"blocks\.0\.0\.weight: .* got a NoneType in its place.*before fully_shard"
    ):
        model(X)


@pytest.mark.parametrize("mode", ["eager", "regional", "full"])
def test_param_data(mode):
    model, call = _sharded(mode)
    call(X).sum().backward()
    weight = model.blocks[0][0].weight
    weight.data.mul_(2)  # changes the shard that it has
    call(X).sum().backward()
    weight.data = weight.detach() * 2
    with pytest.raises(
        RuntimeError, match=r"blocks\.0\.0\.weight: expected the shard .* use param\.copy_\(\.\.\.\) un"
    ):
        call(X)


@pytest.mark.parametrize("change", ["data", "parametrization", "an added module"])
def test_a_model_that_a_compiled_function_calls_is_looked_at_in_backward(change):
    model = shard(MLP(), "eager")
    call = torch.compile(lambda x: model(x).sum(), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        call(X).backward()
    weight = model.blocks[0][0].weight
    if change == "data":
        weight.data = weight.detach() * 2
    elif change == "parametrization":
        model.blocks[1][0]._parameters["weight"] = nn.Parameter(weight.to_local())
    else:
        model.extra = nn.Linear(2, 2)
    with pytest.raises(
        (RuntimeError, ValueError, TypeError), match=r"(blocks\.\d\.0\.weight|extra.weight): expected"
    ):
        call(X).backward()


@pytest.mark.parametrize("change", ["to", "load_state_dict", "assign", "to_empty"])
def test_what_follows_a_replaced_shard(change):
    model = shard(MLP(), "eager")
    model(X).sum().backward()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    {
        "to": lambda: model.to(torch.float64).to(torch.float32),
        "load_state_dict": lambda: model.load_state_dict(state),
        "assign": lambda: model.load_state_dict(state, assign=True),
        "to_empty": lambda: model.to_empty(device="cpu"),
    }[change]()
    assert model(X).shape == X.shape


# ---- optimizers ----


@pytest.mark.parametrize("mode", ["eager", "full"])
def test_an_optimizer_made_before_sharding(mode):
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = shard(model, "eager")
    if mode == "full":
        call = torch.compile(model, backend="aot_eager")
    call(X).sum().backward()
    with pytest.raises(
        RuntimeError, match="expected SGD to hold the sharded parameter, got it as it was before fully_"
    ):
        optimizer.step()
    optimizer.param_groups[0]["params"] = list(model.parameters())  # as Accelerate repairs it
    model.scale.grad = torch.ones_like(model.scale)  # what a simulated group has reduced is garbage, maybe zeros
    before = model.scale.to_local().clone()
    optimizer.step()
    assert not torch.equal(model.scale.to_local(), before)


@pytest.mark.parametrize("by", ["unshard", "an eager forward"])
def test_an_optimizer_made_while_unsharded(by):
    model = MLP()
    shard(model, "eager")
    if by == "unshard":
        for module in model.modules():
            if hasattr(module, "unshard"):
                module.unshard()
    else:
        model(X)  # leaves the root's parameters unsharded until backward
    optimizer = torch.optim.AdamW([{"params": [model.blocks[0][0].bias]}, {"params": [model.scale]}])
    model(X).sum().backward()
    with pytest.raises(
        RuntimeError, match="expected AdamW to hold the sharded parameter, got it as it was unsharded, which no step"
    ):
        optimizer.step()


def test_parameters_that_an_optimizer_gets_later():
    model = MLP()
    old = model.scale
    shard(model, "eager")
    optimizer = torch.optim.SGD([model.blocks[0][0].weight], lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": [old]})
    with pytest.raises(RuntimeError, match="scale: expected SGD to hold the sharded parameter"):
        optimizer.step()


# ---- threads ----


class Gate(nn.Module):
    """Lets another thread run ``inside`` in the middle of forward or, if ``backward`` is set, of backward."""

    inside = staticmethod(lambda: None)
    backward = False

    def forward(self, x):
        if not self.backward:
            _in_a_thread(self.inside)
            return x
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda grad: _in_a_thread(self.inside))
        return x


errors: list[BaseException] = []


def _in_a_thread(call) -> None:
    def run():
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("backward", [True, False])
def test_a_forward_in_the_midst_of_another_threads(backward):
    model = nn.Sequential(nn.Linear(10, 10), Gate(), nn.Linear(10, 10))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    gate = model[1]
    gate.backward = backward
    errors.clear()
    gate.inside = lambda: model(X)
    output = model(X)
    gate.inside, inside = lambda: None, gate.inside
    if backward:
        gate.inside = inside
        output.sum().backward()
    assert len(errors) == 1
    assert "expected one thread at a time in the model's forward or backward, got a second; use a model" in str(
        errors[0]
    )
    assert isinstance(errors[0], RuntimeError)
    gate.inside = lambda: None
    if not backward:
        output.sum().backward()  # the first thread's step is as if nothing had happened
    assert all(param.grad is not None for param in model.parameters())
    errors.clear()
    _in_a_thread(lambda: model(X).sum().backward())  # one after the other is fine
    assert not errors


def test_a_compiled_forward_in_the_midst_of_another_threads():
    model = nn.Sequential(nn.Linear(10, 10), Gate(), nn.Linear(10, 10))
    fully_shard(model)
    call = torch.compile(model, backend="aot_eager")
    gate = model[1]
    gate.forward = torch.compiler.disable(gate.forward)
    errors.clear()
    gate.inside = lambda: call(X)
    output = call(X)
    assert [str(error) for error in errors if "Sequential: expected one thread at a time" in str(error)]
    gate.inside = lambda: None
    output.sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_two_models_in_two_threads():
    first, second = shard(MLP(), "eager"), shard(MLP(), "eager")
    model = fully_shard(nn.Sequential(first, Gate()))
    model[1].inside = lambda: second(X).sum().backward()
    errors.clear()
    model(X).sum().backward()
    assert not errors
    assert all(param.grad is not None for each in (model, second) for param in each.parameters())


# ---- options of the compiler ----


@pytest.mark.parametrize("compiler", [torch.compile, compile])
def test_precompilation(compiler):
    model, _ = _sharded("eager")
    message = "^torch._dynamo.config.caching_precompile: expected False, got True; compile without it"
    with torch._dynamo.config.patch(caching_precompile=True), pytest.raises(NotImplementedError, match=message):
        compiler(model, fullgraph=True)(X)


def test_parameters_as_constants():
    _, call = _sharded("full")
    message = "freezing: expected False, got True under no_grad; compile without it"
    with torch._inductor.config.patch(freezing=True), torch.no_grad(), pytest.raises(Exception, match=message):
        call(X)
    call(X).sum().backward()
