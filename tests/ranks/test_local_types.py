"""Plain parameters with types of the package spmd_types, tensor parallel by the model's own collectives."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fsdp_compiled import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard, stream_parameters
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    assert_close,
    batches,
    each_with_regions,
    full_grads,
    full_params,
    shard,
    square_loss,
)
from tests.support.variants import thorough

spmd = pytest.importorskip("spmd_types")
spmd_checker = pytest.importorskip("spmd_types.checker")


class _Enter(torch.autograd.Function):
    """From the same on every rank with equal gradients to the same with gradients that are yet to be summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return wait_tensor(all_reduce(grad, "sum", ctx.group)), None


class _Leave(torch.autograd.Function):
    """From summands to their sum."""

    @staticmethod
    def forward(ctx, x, group):
        return wait_tensor(all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _enter(x, group):
    return _Enter.apply(x, group)


def _leave(x, group):
    return _Leave.apply(x, group)


class Block(nn.Module):
    """A norm's scale, two matrices and a bias, over the ranks of ``mesh``, or alone."""

    def __init__(self, mesh=None) -> None:
        super().__init__()
        tp, size, rank = (None, 1, 0) if mesh is None else (mesh.get_group(), mesh.size(), mesh.get_local_rank())
        self.tp, self.enter, self.leave = tp, _enter, _leave
        self.scale, self.bias = nn.Parameter(torch.rand(10) + 0.5), nn.Parameter(torch.rand(10))
        self.up = nn.Parameter((torch.randn(12, 10) / 4).chunk(size)[rank].clone())
        self.down = nn.Parameter((torch.randn(10, 12) / 4).chunk(size, 1)[rank].clone())
        if tp is not None:
            for name, of_tp in {"scale": spmd.R, "bias": spmd.I, "up": spmd.S(0), "down": spmd.S(1)}.items():
                spmd.assert_type(getattr(self, name), {tp: of_tp})

    def forward(self, x):
        inside = x if self.tp is None else self.enter(x, self.tp)
        y = torch.relu((inside * self.scale) @ self.up.t()) @ self.down.t()
        return x + (y if self.tp is None else self.leave(y, self.tp)) + self.bias


class Stack(nn.Module):
    def __init__(self, mesh=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _sharded(mesh, mode="eager", **kwargs):
    model = Stack(mesh["tp"])
    call = shard(model, mode, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), **kwargs)
    return model, call


def _mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@row("tensor parallel", "meshes")
@each_with_regions
@thorough(when=lambda mode: mode in ("regional", "regions"))
@on_ranks(4)
def test_types_become_placements(mode):
    mesh, alone = _mesh(), Stack()
    model, call = _sharded(mesh, mode)
    block = model.blocks[0]
    placements = {name: param.placements[1] for name, param in block.named_parameters()}
    assert placements == {"scale": Replicate(), "bias": Replicate(), "up": Shard(0), "down": Shard(1)}
    assert_close(full_params(model), full_params(alone))
    for data in batches(2, 8, 10):
        square_loss(alone, data).backward()
        square_loss(call, data.chunk(2)[mesh.get_local_rank("dp")]).backward()
        assert_close(full_grads(model), full_grads(alone))
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (model, alone)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        for each in (alone, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    assert_close(full_params(model), full_params(alone))
    assert_close(dict(stream_parameters(model, dtype=None)), full_params(alone))


class Scale(nn.Module):
    def __init__(self, mesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        spmd.assert_type(self.weight, {mesh.get_group(): spmd.R})

    def forward(self, x):
        return x * self.weight


@row("tensor parallel", "mixed precision", mode="eager")
@on_ranks(4)
def test_gradients_are_summed_in_the_dtype_of_the_reduction():
    mesh = _mesh()
    model = Scale(mesh["tp"])
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), mp_policy=policy)
    model(torch.full((1, 8), 1.0 if mesh.get_local_rank("tp") else 1 / 512)).float().sum().backward()
    assert model.weight.grad.full_tensor().eq(1 + 1 / 512).all()  # 1 in bf16


@row("tensor parallel", mode="eager")
@on_ranks(4)
def test_a_step_under_type_checking():
    mesh, grads, seen = _mesh(), [], []
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    for checks in (False, True):
        model, call = _sharded(mesh)
        x = torch.linspace(-1, 1, 40).view(4, 10) * (1 + mesh.get_local_rank("dp"))
        with ExitStack() as stack:
            if checks:
                for block in model.blocks:
                    block.enter = lambda x, tp: spmd.convert(x, tp, src=spmd.I, dst=spmd.R)
                    block.leave = lambda x, tp: spmd.all_reduce(x, tp, src=spmd.P, dst=spmd.I)
                stack.enter_context(spmd.set_current_mesh(mesh))
                stack.enter_context(spmd_checker.typecheck())
                spmd.assert_type(x, {dp: spmd.V, tp: spmd.I})
                hook = model.blocks[0].register_forward_pre_hook
                hook(lambda block, args: seen.append(spmd.get_local_type(block.scale)))
            loss = call(x).square().sum()
            if checks:
                loss = spmd.reinterpret(loss, dp, src=spmd.V, dst=spmd.P)
            loss.backward()
        grads.append(full_grads(model))
    assert seen == [{spmd.MeshAxis.of(dp): spmd.R, spmd.MeshAxis.of(tp): spmd.R}]
    assert_close(*grads)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("types", "message"),
    [
        ({"tp": "P"}, "weight: expected a type R, I or S(dim) on mesh dimension 'tp', got P"),
        ({"tp": "V"}, "weight: expected a type R, I or S(dim) on mesh dimension 'tp', got V"),
        ({"dp": "R"}, "weight: expected a type R, I or S(dim) on mesh dimension 'tp', got None"),
        ({"dp": "I", "tp": "R"}, "weight: expected the type R on data-parallel axis mesh_dp, got I; gradients"),
    ],
)
def test_types_that_do_not_fit(types, message):
    mesh = _mesh()
    model = nn.Linear(4, 4, bias=False)
    spmd.assert_type(model.weight, {mesh.get_group(dim): getattr(spmd, each) for dim, each in types.items()})
    with pytest.raises(ValueError) as error:
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert message in str(error.value)
    with pytest.raises(ValueError, match="weight: expected a full mesh for a parameter with types of spmd_types"):
        fully_shard(model, mesh=mesh["dp"])
    assert type(model) is nn.Linear
