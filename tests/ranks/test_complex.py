"""Complex parameters, which collectives carry as real numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_compiled import MixedPrecisionPolicy, fully_shard
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MODES,
    assert_close,
    assert_trains_like_one_process,
    batches,
    call_of,
    full_grads,
    my_part,
    shard,
    square_loss,
)
from tests.support.variants import thorough

# torch 2.11's invoke_subgraph refuses the conjugate views that gradients of complex numbers are.
no_regions = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 has no regions of complex numbers")
each_mode = pytest.mark.parametrize("mode", [*MODES, pytest.param("regions", marks=no_regions)])
each_dtype = pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=["64", "128"])
# Inductor runs eager kernels on complex numbers, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")


class Filter(nn.Module):
    """A learned filter of frequencies beside real parameters; two ranks share five rows unevenly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.real = nn.Linear(10, 10)
        self.gain = nn.Parameter(torch.randn(6, dtype=dtype) / 3)
        self.mix = nn.Parameter(torch.randn(5, 6, dtype=dtype) / 3)

        self.computes_in = (torch.float32, dtype)

    def forward(self, x):
        assert (self.real.weight.dtype, self.gain.dtype) == self.computes_in
        frequencies = torch.fft.rfft(self.real(x.to(self.computes_in[0])).float()).to(self.gain.dtype) * self.gain
        mixed = frequencies @ self.mix.transpose(0, 1)
        return x + torch.fft.irfft(nn.functional.pad(mixed, (0, 1)), n=10).to(x.dtype)


class Filters(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.randn(10, dtype=dtype))
        self.blocks = nn.ModuleList(Filter(dtype) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + (x * self.scale).abs().to(x.dtype)


def on_dimension_1(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 and param.shape[1] % 2 == 0 else None


@row("complex parameters")
@each_mode
@each_dtype
@pytest.mark.parametrize("choose", [None, on_dimension_1], ids=["Shard(0)", "Shard(1)"])
@thorough(when=lambda dtype, mode: mode != "eager" and dtype == torch.complex128)
@on_ranks(2)
def test_complex_parameters_train(mode, dtype, choose):
    alone, model = Filters(dtype), Filters(dtype)
    call = shard(model, mode, shard_placement_fn=choose)
    assert {p.dtype for p in model.parameters()} == {torch.float32, dtype}
    assert_trains_like_one_process(model, call, alone)


@row("complex parameters")
@each_mode
@on_ranks(2)
def test_a_policy_leaves_complex_parameters_alone(mode):
    alone, model = Filters(torch.complex64), Filters(torch.complex64)
    for block in model.blocks:
        block.computes_in = (torch.bfloat16, torch.complex64)
    call = shard(
        model, mode, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    )
    (x,) = batches(1, 8, 10)
    square_loss(alone, x).backward()
    square_loss(call, my_part(x)).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32, torch.complex64}
    assert_close(full_grads(model), full_grads(alone), rtol=3e-2)


@row("complex parameters")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(4)
def test_complex_parameters_with_replicas_and_accumulation(mode):
    alone, model = Filters(torch.complex64), Filters(torch.complex64)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    call = shard(model, mode, mesh=mesh)
    model.set_gradient_divide_factor(2.0)
    for index, x in enumerate(batches(3, 8, 10)):
        model.set_requires_gradient_sync(index == 2)
        square_loss(alone, x).backward()
        square_loss(call, my_part(x)).backward()
    for name, grad in (want := full_grads(alone)).items():
        if name == "scale":
            grad *= dist.get_world_size() / 2
    assert_close(full_grads(model), want)


@on_ranks(2)
def test_clipping_complex_gradients():
    alone, model = Filters(torch.complex64), Filters(torch.complex64)
    shard(model, "eager")
    (x,) = batches(1, 8, 10)
    square_loss(alone, x).backward()
    square_loss(model, my_part(x)).backward()
    want = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    got = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    torch.testing.assert_close(got, want)
    assert_close(full_grads(model), full_grads(alone))


class Conjugated(nn.Module):
    """Its gradient is a view: the conjugate of another tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return torch.view_as_real(x * self.weight.conj()).sum()


@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_a_gradient_that_is_a_conjugate_view(mode):
    alone, model = Conjugated(), fully_shard(Conjugated())
    x = torch.randn(2, 4, 4, dtype=torch.complex64)
    (alone(x).mean() / 2).backward()
    call_of(model, mode)(x[dist.get_rank()]).backward()
    assert_close(full_grads(model), full_grads(alone))
