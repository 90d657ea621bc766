"""``grad_dtype`` of parameters, which decides the dtype of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, step_on_shards
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import each_mode, each_with_regions, full_grads, shard
from tests.support.variants import thorough

BF16, FP32 = torch.bfloat16, torch.float32


class Layers(nn.Module):
    """What gives the same bf16 numbers as operators and as a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        blocks = (nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 10)) for _ in range(2))
        self.blocks, self.last = nn.ModuleList(blocks), nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).float().square().sum()


def _model(grad_dtype: torch.dtype | None = FP32) -> Layers:
    model = Layers().to(BF16)
    for param in model.parameters():
        param.grad_dtype = grad_dtype
    return model


def _batches(steps: int) -> Tensor:
    """Of every rank: [steps, ranks, 4, 10]."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    return torch.randn(steps, dist.get_world_size(), 4, 10, generator=generator).to(BF16)


def _means(batches: Tensor) -> dict[str, Tensor]:
    """The mean over ranks of one process's bf16 gradients, in fp32, summed over steps."""
    alone, found = Layers().to(BF16), dict[str, Tensor]()
    for batch in batches:
        for each in batch:
            alone(each).backward()
            for name, param in alone.named_parameters():
                found[name] = found.get(name, 0) + param.grad.float() / len(batch)
            alone.zero_grad()
    return found


def _backward(call, batch):
    call(batch[dist.get_rank()]).backward()


def _assert_equal(model: nn.Module, expected: dict[str, Tensor]) -> None:
    assert {param.dtype for param in model.parameters()} == {BF16}
    for name, grad in full_grads(model).items():
        assert grad.dtype == FP32
        torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def _assert_backward_leaves_means(model: nn.Module, call: Callable[..., Tensor], batches: Tensor) -> None:
    for batch in batches:
        _backward(call, batch)
    _assert_equal(model, _means(batches))


@row("gradient dtypes")
@each_with_regions
@on_ranks(2)
def test_fp32_gradients_of_bf16_parameters(mode):
    model, batches = _model(), _batches(2)
    call = shard(model, mode, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for batch in batches:
        _backward(call, batch)
        expected = _means(batch[None])
        _assert_equal(model, expected)
        assert any(not torch.equal(each, each.to(BF16).float()) for each in expected.values())
        model.zero_grad()
    _assert_backward_leaves_means(model, call, batches)


@row("gradient dtypes")
@each_mode
@on_ranks(4)
def test_accumulation_over_replicas(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, batches = _model(), _batches(3)
    call = shard(model, mode, mesh=mesh)
    for step, batch in enumerate(batches):
        model.set_requires_gradient_sync(step > 0)
        model.set_requires_all_reduce(step > 1)
        _backward(call, batch)
    _assert_equal(model, _means(batches))


@row("gradient dtypes")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_shards_on_the_host(mode):
    model = _model()
    call = shard(model, mode, offload_policy=CPUOffloadPolicy(pin_memory=False))
    _assert_backward_leaves_means(model, call, _batches(1))


@row("gradient dtypes")
@pytest.mark.parametrize("mode", ["eager", "full"])
@pytest.mark.parametrize(
    "grad_dtype, policy",
    [(FP32, (BF16, FP32)), (FP32, (None, None)), (FP32, (None, BF16)), (None, (None, FP32)), (None, (BF16, None))],
)
@thorough(when=lambda mode, grad_dtype, policy: mode == "full" and grad_dtype is FP32 and policy != (BF16, FP32))
@on_ranks(2)
def test_the_dtypes_of_fsdp2(grad_dtype, policy, mode):
    model, batches = _model(grad_dtype), _batches(2)
    call = shard(model, mode, mp_policy=MixedPrecisionPolicy(*policy))
    other = _model(grad_dtype)
    for module in (*other.blocks, other):
        torch_fsdp.fully_shard(module, mp_policy=torch_fsdp.MixedPrecisionPolicy(*policy))
    for batch in batches:
        _backward(call, batch)
        _backward(other, batch)
    got, expected = full_grads(model), full_grads(other)
    if torch.__version__ < "2.15":  # whose FSDP2 knows nothing of it
        own = grad_dtype or policy[1] or BF16
        assert {each.dtype for each in got.values()} == {own}
        return
    for name, grad in got.items():
        assert grad.dtype == expected[name].dtype
        assert torch.equal(grad, expected[name])


@row("gradient dtypes")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_some_parameters_of_a_unit(mode):
    model, batches = Layers().to(BF16), _batches(1)
    for block in model.blocks:
        block[0].weight.grad_dtype = FP32
    call = shard(model, mode)
    _backward(call, batches[0])
    expected = _means(batches)
    for name, grad in full_grads(model).items():
        assert grad.dtype == (FP32 if name.endswith("0.weight") else BF16)
        rtol = 1e-6 if grad.dtype == FP32 else 1e-2
        torch.testing.assert_close(grad.float(), expected[name], rtol=rtol, atol=1e-3 * rtol)


@row("gradient dtypes")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_set_after_sharding(mode):
    model = Layers().to(BF16)
    call = shard(model, mode)
    for param in model.parameters():
        param.grad_dtype = FP32
    _assert_backward_leaves_means(model, call, _batches(1))


@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_set_after_the_first_forward(mode):
    model, batches = Layers().to(BF16), _batches(1)
    call = shard(model, mode)
    _backward(call, batches[0])
    model.zero_grad()
    model.blocks[1][0].weight.grad_dtype = FP32
    error = "blocks.1.0.weight: expected grad_dtype to stay torch.bfloat16, got torch.float32; set grad_dtype before"
    with pytest.raises(RuntimeError, match=error):
        _backward(call, batches[0])
    model.blocks[1][0].weight.grad_dtype = BF16
    model.zero_grad()
    _backward(call, batches[0])
    for name, mean in _means(batches).items():
        torch.testing.assert_close(full_grads(model)[name].float(), mean, rtol=1e-2, atol=1e-5)


@row("gradient dtypes")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_copies_and_loaded_parameters_inherit_it(mode):
    model = _model()
    shard(model, "eager")
    copied = deepcopy(model)
    model.load_state_dict(copied.state_dict(), assign=True)
    for each in (model, copied):
        call = torch.compile(each, backend="aot_eager", fullgraph=True) if mode == "full" else each
        _assert_backward_leaves_means(each, call, _batches(1))


@row("gradient dtypes")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_conversions_leave_gradients(mode):
    model, batches = _model(), _batches(1)
    call = shard(model, mode)
    _backward(call, batches[0])
    expected = full_grads(model)
    model.half()
    assert {param.dtype for param in model.parameters()} == {torch.float16}
    assert {param.grad_dtype for param in model.parameters()} == {FP32}
    for name, grad in full_grads(model).items():
        assert torch.equal(grad, expected[name])
    model.bfloat16()
    for same in (model.bfloat16, model.cpu, lambda: model.to("cpu", torch.bfloat16)):
        same()
        assert {param.grad_dtype for param in model.parameters()} == {FP32}
    _backward(call, batches[0])
    _assert_equal(model, {name: 2 * grad for name, grad in expected.items()})


@row("gradient dtypes")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_a_conversion_that_fails_half_way_leaves_gradients(mode):
    model, batches = _model(), _batches(1)
    model.blocks[0].register_buffer("unused", torch.zeros(1))
    call = shard(model, mode)
    _backward(call, batches[0])
    expected = full_grads(model)

    def convert(tensor):
        if not isinstance(tensor, nn.Parameter):
            raise RuntimeError("no conversion of buffers")
        return tensor.half()

    with pytest.raises(RuntimeError, match="no conversion of buffers"):
        model._apply(convert)
    assert {param.dtype for param in model.parameters()} == {torch.float16, torch.bfloat16}
    for name, grad in full_grads(model).items():
        assert torch.equal(grad, expected[name])
    model.bfloat16()
    _backward(call, batches[0])
    _assert_equal(model, {name: 2 * grad for name, grad in expected.items()})


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.float().T @ x.float()


@row("gradient dtypes")
@pytest.mark.parametrize("mode", ["eager"])
@on_ranks(2)
def test_a_functions_fp32_gradient_is_not_rounded(mode):
    class Wide(nn.Linear):
        def forward(self, x):
            return _WideProduct.apply(x, self.weight)

    model, batches = Wide(10, 7, bias=False).to(BF16), _batches(2)
    model.weight.grad_dtype = FP32
    weight = model.weight.detach().clone()
    fully_shard(model)
    expected = torch.zeros_like(weight, dtype=FP32)
    for step, batch in enumerate(batches):
        model.set_requires_gradient_sync(step > 0)
        _backward(lambda x: model(x).float().square().sum(), batch)
        for x in batch:
            grad = 2 * (x @ weight.T).float()
            expected += grad.to(BF16).float().T @ x.float() / len(batch)
    torch.testing.assert_close(model.weight.grad.full_tensor(), expected, rtol=1e-6, atol=1e-6)


@row("gradient dtypes")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_an_optimizer_on_shards(mode):
    model, alone, batches = _model(), _model(), _batches(2)
    call = shard(model, mode)
    optimizer = step_on_shards(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    other = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
    for batch in batches:
        _backward(call, batch)
        found = full_grads(model)
        for name, param in alone.named_parameters():
            param.grad = found[name]
        optimizer.step()
        other.step()
        model.zero_grad()
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected)


def test_a_dtype_that_no_gradient_has(fake_group):
    model = nn.Linear(2, 2)
    model.weight.grad_dtype = torch.int64
    with pytest.raises(ValueError, match="weight: expected grad_dtype to be floating point or None, got torch.int64"):
        fully_shard(model)
