"""``torch.func`` around a sharded model, and backwards that are repeated or differentiated themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import func, nn
from torch.autograd.functional import hvp, jacobian, jvp

from fsdp_compiled import MixedPrecisionPolicy, fully_shard, fully_shard_with_compiled_compute
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    assert_trains_like_one_process,
    batches,
    full_grads,
    my_part,
    shard,
)
from tests.support.variants import thorough

TRANSFORMS = {
    "jvp": lambda call, x, t: torch.cat(func.jvp(call, (x,), (t,))),
    "jvp of one output": lambda call, x, t: func.jvp(call, (x,), (t,))[1],
    "grad": lambda call, x, t: func.grad(lambda x: call(x).square().sum())(x),
    "vjp": lambda call, x, t: func.vjp(call, x)[1](t)[0],
    "vmap": lambda call, x, t: func.vmap(call)(x),
    "jacrev": lambda call, x, t: func.jacrev(call)(x),
    "jacfwd": lambda call, x, t: func.jacfwd(call)(x),
    "hvp": lambda call, x, t: func.jvp(func.grad(lambda x: call(x).square().sum()), (x,), (t,))[1],
}


def _grads_of_replicas(alone: nn.Module) -> dict[str, torch.Tensor | None]:
    for param in alone.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
    return full_grads(alone)


def _assert_trains_on(model: nn.Module, call, alone: nn.Module) -> None:
    model.zero_grad()
    alone.zero_grad()
    assert_trains_like_one_process(model, call, alone)


def _regional(model: MLP) -> MLP:
    for block in model.blocks:
        fully_shard_with_compiled_compute(block, compile_kwargs={"backend": "aot_eager"})
    return fully_shard(model)


@pytest.mark.parametrize("transform", TRANSFORMS)
@on_ranks(2)
def test_transforms_of_an_eager_forward(transform):
    model, alone = MLP(), MLP()
    shard(model, "eager")
    x, tangent = map(my_part, batches(2, 8, 10))
    for reshard in (True, False, False):
        model.set_reshard_after_forward(reshard)
        got, want = (TRANSFORMS[transform](call, x, tangent) for call in (model, alone))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        got.square().mean().backward()
        want.square().mean().backward()
        assert_close(full_grads(model), _grads_of_replicas(alone))
        model.zero_grad()
        alone.zero_grad()
    _assert_trains_on(model, model, alone)


@pytest.mark.parametrize("transform", ["jvp", "vmap"])
@on_ranks(2)
def test_transforms_around_compiled_layers(transform):
    model, alone = _regional(MLP()), MLP()
    x, tangent = map(my_part, batches(2, 8, 10))
    got, want = (TRANSFORMS[transform](call, x, tangent) for call in (model, alone))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    got.square().mean().backward()
    want.square().mean().backward()
    assert_close(full_grads(model), _grads_of_replicas(alone))
    _assert_trains_on(model, model, alone)


def _layers() -> nn.Sequential:  # without LayerNorm, whose forward-mode derivative Dynamo cannot trace
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 14), nn.GELU(), nn.Linear(14, 10))


@pytest.mark.parametrize("transform", ["jvp", "grad"])
@on_ranks(2)
def test_transforms_inside_a_graph(transform):
    model, alone = _layers(), _layers()
    fully_shard(model[0])
    fully_shard(model)
    x, tangent = map(my_part, batches(2, 8, 10))
    step = torch.compile(
        lambda x, tangent: TRANSFORMS[transform](model, x, tangent), fullgraph=True, backend="aot_eager"
    )
    got, want = step(x, tangent), TRANSFORMS[transform](alone, x, tangent)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    got.square().mean().backward()
    want.square().mean().backward()
    assert_close(full_grads(model), _grads_of_replicas(alone))


class Forces(MLP):
    """Returns the gradient of an energy by its input, as models of molecules do."""

    def __init__(self, transforms: bool) -> None:
        super().__init__()
        self.transforms = transforms

    def forward(self, x):
        if self.transforms:
            return func.grad(lambda x: 0.01 * super(Forces, self).forward(x).square().sum())(x)
        x = x.detach().requires_grad_()
        energy = 0.01 * (super().forward(x) * self.scale).square().sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return gradient * self.scale


@pytest.mark.parametrize(
    ("mode", "transforms"), [("eager", False), ("eager", True), ("full", True)], ids=["grad", "func", "in a graph"]
)
@pytest.mark.parametrize("reshard", [True, False])
@thorough(when=lambda mode, reshard: mode == "full" and not reshard)
@on_ranks(2)
def test_a_forward_that_differentiates_itself(mode, transforms, reshard):
    model, alone = Forces(transforms), Forces(transforms)
    call = shard(model, mode, reshard_after_forward=reshard)
    assert_trains_like_one_process(model, call, alone)
    micros, complete = list(batches(2, 8, 10)), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(complete.append)
    for micro in micros:
        model.set_requires_gradient_sync(micro is micros[-1])
        for each, x in ((model, my_part(micro)), (alone, micro)):
            (call if each is model else each)(x).square().mean().backward()
    assert_close(full_grads(model), full_grads(alone))
    assert len(complete) == len(set(complete))  # the inner backward leaves sums to the outer one


class ForcesOfBlock(nn.Module):
    """Differentiates by what the model's input depends on, through its own inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x, of):
        energy = self.last(self.first(x).tanh())
        (forces,) = torch.autograd.grad(energy.square().sum(), of(), retain_graph=True)
        return energy + forces


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_unit_that_differentiates_through_its_inputs(reshard):
    class Model(MLP):
        def forward(self, x):
            positions = x.detach().requires_grad_()
            return self.blocks[1](self.blocks[0](positions * self.scale), lambda: positions)

    models = model, alone = Model(), Model()
    for each in models:
        torch.manual_seed(0)
        each.blocks[1] = ForcesOfBlock()
    assert_trains_like_one_process(model, shard(model, "eager", reshard_after_forward=reshard), alone)


class PassesOn(nn.Linear):
    def forward(self, data):
        return {**data, "h": super().forward(data["h"]).tanh()}


class ForcesByDict(nn.Module):
    """Differentiates by what its units pass on in a dict, as those of SchNetPack and NequIP do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(PassesOn(10, 10) for _ in range(2))

    def forward(self, x):
        x = x.detach().requires_grad_()
        data = {"x": x, "h": x.square()}
        for block in self.blocks:
            data = block(data)
        return torch.autograd.grad(data["h"].square().sum(), data["x"], create_graph=True)[0]


@on_ranks(2)
def test_differentiating_by_what_units_pass_on():
    model, alone = ForcesByDict(), ForcesByDict()
    assert_trains_like_one_process(model, shard(model, "eager"), alone)


class PassesOnWithHook(PassesOn):
    def forward(self, data):
        data["x"].register_hook(lambda grad: grad / 2)
        return super().forward({**data, "h": data["x"] + data["h"]})


class HookedByDict(ForcesByDict):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.blocks = nn.Parameter(torch.rand(10)), nn.ModuleList([PassesOnWithHook(10, 10)])

    def forward(self, x):
        data = self.blocks[0]({"x": x * self.scale, "h": x})
        return data["x"] * data["h"]


@on_ranks(2)
def test_a_hook_on_what_a_unit_passes_on():
    model, alone = HookedByDict(), HookedByDict()
    assert_trains_like_one_process(model, shard(model, "eager"), alone)


class GradientOfInputs(nn.Linear):
    def forward(self, x, h, of):
        energy = super().forward((x + h * self.bias).tanh())
        return energy, torch.autograd.grad(energy.square().sum(), of(), create_graph=True)[0]


class ReturnsForces(ForcesByDict):
    """Its unit's output is the very gradient that has come to the unit's input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([GradientOfInputs(10, 10)])

    def forward(self, x):
        x = x.detach().requires_grad_()
        return self.blocks[0](x, x.detach().requires_grad_(), lambda: x)[1]


@on_ranks(2)
def test_a_unit_that_returns_the_gradient_of_its_input():
    model, alone = ReturnsForces(), ReturnsForces()
    assert_trains_like_one_process(model, shard(model, "eager"), alone)


class Equilibrium(nn.Module):
    """A fixed point, whose gradient is one, too: a hook on the output computes it by backwards of the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)

    def forward(self, x):
        with torch.no_grad():
            z = (self.inner(x) + x).tanh()
        z = (self.inner(z) + x).tanh()
        start = z.detach().requires_grad_()
        end = (self.inner(start) + x.detach()).tanh()
        z.register_hook(lambda grad: grad + torch.autograd.grad(end, start, grad, retain_graph=True)[0])
        return z


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_hook_on_the_output_that_runs_a_backward(reshard):
    models = model, alone = MLP(), MLP()
    for each in models:
        torch.manual_seed(0)
        each.blocks[1] = Equilibrium()
    assert_trains_like_one_process(model, shard(model, "eager", reshard_after_forward=reshard), alone)


class TrainsItself(MLP):
    def forward(self, x):
        loss = super().forward(x).square().mean()
        loss.backward()
        return loss.detach()


@on_ranks(2)
def test_a_forward_that_runs_its_backward():
    model, alone, data = TrainsItself(), TrainsItself(), batches(3, 8, 10)
    shard(model, "eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for x in data:
        model(my_part(x))
        alone(x)
        assert_close(full_grads(model), full_grads(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_a_jvp_after_a_forward_that_left_the_model_unsharded():
    model, alone = MLP(), MLP()
    shard(model, "eager", reshard_after_forward=False)
    x, tangent = map(my_part, batches(2, 8, 10))
    model(x)
    torch.cat(func.jvp(model, (x,), (tangent,))).sum().backward()
    torch.cat(func.jvp(alone, (x,), (tangent,))).sum().backward()
    assert_close(full_grads(model), _grads_of_replicas(alone))


@on_ranks(2)
def test_a_jvp_with_mixed_precision():
    model, alone = MLP(), MLP().bfloat16()
    shard(model, "eager", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x, tangent = map(my_part, batches(2, 8, 10))
    got = func.jvp(model, (x,), (tangent,))
    want = func.jvp(alone, (x.bfloat16(),), (tangent.bfloat16(),))
    torch.testing.assert_close(got, want)
    for each in (got, want):
        torch.cat(each).float().square().mean().backward()
    want_grads = {name: grad.float() for name, grad in _grads_of_replicas(alone).items()}
    assert_close(full_grads(model), want_grads, rtol=3e-2)


@on_ranks(2)
def test_forward_mode_autograd():
    from torch.autograd import forward_ad

    model, alone = MLP(), MLP()
    shard(model, "eager")
    x, tangent = map(my_part, batches(2, 8, 10))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(), tangent)
        got, want = (forward_ad.unpack_dual(call(dual)) for call in (model, alone))
        torch.testing.assert_close(got.tangent, want.tangent)
        got.tangent.square().sum().backward()
        want.tangent.square().sum().backward()
    assert_close(full_grads(model), _grads_of_replicas(alone))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is ")  # deprecated; torch's jvp uses it
def test_a_compiled_model_refuses_transforms_from_outside(fake_group):
    model = shard(MLP(), "full")
    x = torch.randn(2, 10)
    with pytest.raises(Exception, match=r"torch\.func\.jvp\(compiled_fn\)"):
        func.jvp(model, (x,), (x,))


# ---- repeated and differentiated backwards ----


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(14) + 0.5)

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("sync", [True, False])
@on_ranks(2)
def test_a_linear_loss_whose_backward_another_thread_has_recorded(sync):
    """As on a GPU, where the backward of a penalty reaches some of the first one's operations after forward's."""
    models = model, alone = MLP(), MLP()
    for each in models:
        torch.manual_seed(0)
        for block in each.blocks:
            block[2] = Scaled()
    shard(model, "eager")
    for last in (False, True) if not sync else (True, True):
        model.set_requires_gradient_sync(last)
        x = my_part(batches(1, 8, 10)[0]).requires_grad_()
        for each in models:
            with ThreadPoolExecutor(1) as other:
                out = each(x).sum()
                (grad,) = other.submit(torch.autograd.grad, out, x, create_graph=True).result()
            grad.square().mean().backward()
    assert_close(full_grads(model), _grads_of_replicas(alone))
    model.zero_grad()
    alone.zero_grad()
    _assert_trains_on(model, model, alone)


@on_ranks(2)
def test_a_gradient_penalty():
    model, alone = MLP(), MLP()
    shard(model, "eager")
    (x,) = map(my_part, batches(1, 8, 10))
    x.requires_grad_()
    for reshard, linear in ((True, True), (True, False), (False, True), (False, False)):
        model.set_reshard_after_forward(reshard)
        for call in (model, alone):
            out = call(x)
            (grad,) = torch.autograd.grad(out.sum() if linear else out.square().sum(), x, create_graph=True)
            (grad.square().sum() + out.mean()).backward()
        assert_close(full_grads(model), _grads_of_replicas(alone))
        model.zero_grad()
        alone.zero_grad()
    _assert_trains_on(model, model, alone)


@pytest.mark.parametrize("mode", ["regional", "full"])
@on_ranks(2)
def test_a_gradient_penalty_through_a_graph_is_refused(mode):
    model, alone = MLP(), MLP()
    call = shard(model, "full") if mode == "full" else _regional(model)
    (x,) = map(my_part, batches(1, 8, 10))
    (grad,) = torch.autograd.grad(call(x.requires_grad_()).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.square().sum().backward()
    model.reset_iter_state()  # or else the optimizer made next would get the unsharded parameters
    _assert_trains_on(model, call, alone)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_jvp_by_two_backwards_that_is_trained(reshard):
    model, alone = MLP(), MLP()
    shard(model, "eager", reshard_after_forward=reshard)
    x, tangent = map(my_part, batches(2, 8, 10))
    for _ in range(2):
        for call in (model, alone):
            call.zero_grad()
            output, derivative = jvp(call, x, tangent, create_graph=True)
            (output.square().mean() + derivative.square().mean()).backward()
        assert_close(full_grads(model), _grads_of_replicas(alone))
    _assert_trains_on(model, model, alone)


class ChangesOutputs(MLP):
    """Of three dimensions, what its blocks return are views, which it changes in place."""

    def forward(self, x):
        x = (x * self.scale).unsqueeze(1)
        for block in self.blocks:
            x = block(x).add_(x)
        return x.squeeze(1)


@pytest.mark.parametrize("kind", [MLP, ChangesOutputs])
@pytest.mark.parametrize("product", [jvp, hvp])
@on_ranks(2)
def test_products_by_backwards_of_backwards_that_are_trained(product, kind):
    model, alone = kind(), kind()
    shard(model, "eager")
    x, tangent = map(my_part, batches(2, 8, 10))
    for _ in range(2):
        for call in (model, alone):
            call.zero_grad()
            _, derivative = product(lambda x, call=call: call(x).square().mean(), x, tangent, create_graph=True)
            derivative.square().mean().backward()
        assert_close(full_grads(model), _grads_of_replicas(alone))
    _assert_trains_on(model, model, alone)


@on_ranks(2)
def test_a_batched_backward_that_makes_a_graph_is_refused():
    """Torch would lose the graph at the end of each unit's backward, and parameters their gradients."""
    model, alone = MLP(), MLP()
    call = shard(model, "eager")
    (x,) = map(my_part, batches(1, 8, 10))
    with pytest.raises(
        NotImplementedError, match="is_grads_batched: expected False with create_graph=True, got True"
    ):
        jacobian(call, x, create_graph=True, vectorize=True)
    torch.testing.assert_close(jacobian(call, x, vectorize=True), jacobian(alone, x, vectorize=True))
    _assert_trains_on(model, call, alone)


@pytest.mark.parametrize("mode", ["eager", "regional", "full"])
@on_ranks(2)
def test_repeated_backwards(mode):
    model, alone = MLP(), MLP()
    call = _regional(model) if mode == "regional" else shard(model, mode)
    (x,) = map(my_part, batches(1, 8, 10))
    for each in (call, alone):
        loss = each(x).square().sum()
        loss.backward(retain_graph=True)
        each(x).sum().backward()  # another step in between
        loss.backward()
    assert_close(full_grads(model), _grads_of_replicas(alone))
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss_again = call(x).square().sum()
        loss_again.backward()
        loss_again.backward()
    _assert_trains_on(model, call, alone)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_gradients_have_no_graph(mode):
    model, alone = MLP(), MLP()
    call = shard(model, mode)
    (x,) = map(my_part, batches(1, 8, 10))
    call(x).square().sum().backward(create_graph=True)
    alone(x).square().sum().backward()
    assert not any(param.grad.requires_grad for param in model.parameters())
    assert_close(full_grads(model), _grads_of_replicas(alone))
    _assert_trains_on(model, call, alone)
