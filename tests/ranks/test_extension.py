"""Tensor subclasses that send something else than their values: int8 or float8 rows with a scale each."""

from __future__ import annotations

import pytest
import torch
from quantised_all_gather import QuantisedGathered, gather_quantised, quantise
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_compiled import MixedPrecisionPolicy, fully_shard
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.sharding.dtensor import local_of
from tests.support.graphs import record
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MODES,
    assert_trains_like_replicas,
    batches,
    compiled,
    full,
    full_grads,
    mean_over_ranks,
    my_part,
    seeded_generator,
    shard,
    square_loss,
    with_regions,
)
from tests.support.variants import thorough

each_mode = pytest.mark.parametrize("mode", ["eager", "full", "regions"])


def quantised(weight, wire):
    """The values that arrive."""
    rows, scales = quantise(weight, wire)
    return rows.to(torch.float32) * scales


def _all_gathered(graph):
    """The dtypes of what a graph all-gathers."""
    launches = [node for node in graph.nodes if nodes.is_launch(node) and nodes.stage_of(node) == "all_gather"]
    return {nodes.bucket_of(node).spec.dtype for node in launches}


class Net(nn.Module):
    def __init__(self, extended: bool, wire: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.extended, self.wire = extended, wire
        if extended:
            gather_quantised(self, wire)

    def forward(self, x):
        for block in self.blocks:
            weight = None if self.extended else through(block.weight, self.wire)
            x = (block(x) if weight is None else nn.functional.linear(x, weight, block.bias)).tanh()
        return x


def through(weight, wire):
    """Quantised in forward, the identity in backward."""
    return weight + (quantised(weight.detach(), wire) - weight.detach())


def _assert_trains_like(alone, model, call):
    """``call``, which trains ``model``, has the losses and gradients of ``alone`` in three steps."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for data in batches(3, 8, 6):
        want, got = alone(data).square().mean(), call(my_part(data)).square().mean()
        for loss in (want, got):
            loss.backward()
        torch.testing.assert_close(mean_over_ranks(got), want.item(), rtol=1e-5, atol=0)
        for name, grad in full_grads(model).items():
            torch.testing.assert_close(grad, dict(alone.named_parameters())[name].grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@row("tensor-subclass extensions")
@pytest.mark.parametrize("wire", [torch.int8, torch.float8_e4m3fn])
@each_mode
@on_ranks(2)
def test_a_quantised_all_gather(mode, wire):
    alone, model = Net(False, wire), Net(True, wire)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    call, recorder = _compiled(model, mode, model.blocks)
    _assert_trains_like(alone, model, call)
    weight = model.blocks[0].weight
    torch.testing.assert_close(full(weight._local_tensor.values), my_part(alone.blocks[0].weight.detach()))
    if recorder is not None:
        forward, backward = recorder.only("forward", after=True), recorder.only("backward", after=True)
        for graph in (forward, backward):
            dtypes = _all_gathered(graph)
            assert wire in dtypes and len(dtypes) == 2


@row("tensor-subclass extensions", mode="eager")
@on_ranks(2)
def test_an_extension_may_release_what_was_all_gathered():
    alone, model = Net(False, torch.int8), Net(True, torch.int8)
    with pytest.MonkeyPatch.context() as patch:
        release = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
        patch.setattr(QuantisedGathered, release, lambda weight: "yes", raising=False)
        with pytest.raises(TypeError, match=rf"weight: expected QuantisedGathered\.{release} to return a bool, got"):
            fully_shard(model.blocks[0])
        patch.setattr(QuantisedGathered, release, lambda weight: True)
        seen = []
        for block in model.blocks:
            fully_shard(block)
            outputs = block._fsdp_params["weight"].unsharded
            block.register_forward_hook(
                lambda *_, held=outputs: seen.extend(output.untyped_storage().nbytes() for output in held._outputs)
            )
        fully_shard(model)
        _assert_trains_like(alone, model, model)
        assert seen and not any(seen)


@row("tensor-subclass extensions")
@each_mode
@thorough(when=lambda mode: mode == "regions")
@on_ranks(2)
def test_float8_training_of_torchao(mode):
    alone, sharded = _float8_model(gathers_float8=False), _float8_model(gathers_float8=True)
    call, recorder = _shard(sharded, mode)
    assert_trains_like_replicas(sharded, call, alone, batches(3, 32, 32))
    from torchao.float8 import fsdp_utils

    with pytest.MonkeyPatch.context() as patch:  # the scales that were computed for all weights at once are used
        batch = my_part(batches(1, 32, 32)[0])
        want = square_loss(call, batch)
        fsdp_utils.precompute_float8_dynamic_scale_for_fsdp(sharded)
        patch.setattr(fsdp_utils, "hp_tensor_to_float8_dynamic", None)
        assert torch.equal(square_loss(call, batch), want)
    micro_batches = batches(2, 32, 32)
    for sync, batch in zip((False, True), micro_batches, strict=True):
        sharded.set_requires_gradient_sync(sync)
        square_loss(call, my_part(batch)).backward()
        square_loss(alone, my_part(batch)).backward()
    for name, grad in full_grads(sharded).items():
        mine = alone.get_parameter(name).grad
        torch.distributed.all_reduce(mine)
        torch.testing.assert_close(grad, mine / 2, rtol=1e-5, atol=1e-7)
    if recorder is not None:
        for graph in (recorder.after[0][1], recorder.after[1][1]):
            assert torch.float8_e4m3fn in _all_gathered(graph)


@row("tensor-subclass extensions")
@each_mode
@thorough(when=lambda mode: mode != "eager")
@on_ranks(4)
def test_float8_training_of_torchao_with_replicas(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone, sharded = _float8_model(gathers_float8=False), _float8_model(gathers_float8=True)
    call, _ = _shard(sharded, mode, mesh=mesh)
    assert_trains_like_replicas(sharded, call, alone, batches(3, 32, 32))


@row("tensor-subclass extensions")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(4)
def test_float8_training_of_torchao_on_top_of_tensor_parallelism(mode):
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = (mesh[name] for name in mesh.mesh_dim_names)
    alone, sharded = _float8_model(gathers_float8=False), _float8_model(gathers_float8=True)
    for block in (*alone, *sharded):
        parallelize_module(block, tp, {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()})
    call, _ = _shard(sharded, mode, mesh=dp)
    # torchao scales each rank's part of a gathered weight by itself, but a weight that is not gathered as a whole.
    for batch in batches(3, 32, 32):
        mine = batch.chunk(2)[dp.get_local_rank()]
        want, got = square_loss(alone, mine), square_loss(call, mine)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
        want.backward()
        got.backward()
        for param, ours in zip(alone.parameters(), sharded.parameters(), strict=True):
            torch.distributed.all_reduce(local_of(param.grad), group=dp.get_group())
            param.grad /= dp.size()
            grad = param.grad.full_tensor() if isinstance(param, DTensor) else param.grad
            assert (ours.grad.full_tensor() - grad).norm() < 0.25 * grad.norm()  # 0.14: what float8 rounds away
        for model in (alone, sharded):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()


class WithPadding(QuantisedGathered):
    """What arrives keeps the padding of an uneven dimension 0."""

    @staticmethod
    def __tensor_unflatten__(parts, wire, size, stride):
        return WithPadding(parts["values"], wire)

    def fsdp_pre_all_gather(self, mesh):
        return quantise(self.values if isinstance(self, WithPadding) else self, torch.int8), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        unsharded = (outputs[0].to(torch.float32) * outputs[1]).to(dtype)
        return (unsharded, (unsharded,)) if out is None else out.copy_(unsharded)


class Uneven(nn.Module):
    """9 and 1 rows; ``alone`` it reads what arrives from the others."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.alone = alone
        self.blocks = nn.ModuleList([nn.Linear(6, 9, bias=False), nn.Linear(9, 1, bias=False)])

    def forward(self, x):
        for block in self.blocks:
            weight = through(block.weight, torch.int8) if self.alone else None
            x = (nn.functional.linear(x, weight) if self.alone else block(x)).tanh()
        return x


def _on_class(model, shard_it):
    for block in model.blocks:
        block.weight = nn.Parameter(WithPadding(block.weight.detach(), torch.int8))
    shard_it()


def _on_instance(model, shard_it):
    shard_it()
    for block in model.blocks:
        local = block.weight._local_tensor
        for method in (WithPadding.fsdp_pre_all_gather, WithPadding.fsdp_post_all_gather):
            setattr(local, method.__name__, method.__get__(local))


@row("tensor-subclass extensions", "uneven shards")
@pytest.mark.parametrize("put", [_on_class, _on_instance])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_an_extended_all_gather_of_uneven_shards(mode, put):
    alone, model = Uneven(True), Uneven(False)
    put(model, lambda: shard(model, mode))
    call = compiled(model) if mode == "full" else model
    _assert_trains_like(alone, model, call)


def _wrapped_blocks(device: str) -> nn.Module:
    """Blocks whose weights are of a wrapper subclass that defines no all-gather."""
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False)) for _ in range(2)]
    for block in blocks:
        for linear in (block[0], block[2]):
            weight = linear.weight.detach().to(device)
            linear.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    return nn.Sequential(*blocks)


def _send_as_bfloat16(model, asked, plain=False):
    """Put both methods on every local tensor; ``asked`` gets what the first was called with."""

    def pre(self, mesh, outer_size, outer_stride, module, mp_policy):
        if not torch.compiler.is_compiling():
            asked.append((mesh.ndim, mesh.size(), tuple(outer_size)))
        return ((self.a if plain else self).to(torch.bfloat16),), None

    @torch.no_grad()
    def post(self, outputs, metadata, dtype, *, out=None):
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                return out.copy_(outputs[0])
        unsharded = outputs[0].to(dtype)
        return unsharded, (outputs[0], unsharded)

    for param in model.parameters():
        local = param._local_tensor
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre.__get__(local), post.__get__(local)


@row("tensor-subclass extensions")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@each_mode
@on_ranks(2)
def test_methods_on_the_local_tensor_of_a_wrapper_subclass(mode, device):
    asked, losses = {True: [], False: []}, []
    for ours in (True, False):
        model = _wrapped_blocks(device)
        for module in (*model, model):
            (fully_shard if ours else torch_fully_shard)(module, reshard_after_forward=True)
        if device == "meta":
            model.to_empty(device="cpu")
            for number, param in enumerate(model.parameters()):
                values = torch.randn(param.shape, generator=seeded_generator(number)).chunk(2)
                for inner in (param._local_tensor.a, param._local_tensor.b):
                    inner.copy_(values[torch.distributed.get_rank()])
        _send_as_bfloat16(model, asked[ours], plain=mode != "eager")
        call = _compiled(model, mode, model)[0] if ours else model
        losses.append([])
        for batch in batches(3, 8, 6):
            loss = square_loss(call, my_part(batch))
            loss.backward()
            losses[-1].append(loss.item())
            for param in model.parameters():
                for inner in (param._local_tensor.a, param._local_tensor.b):
                    inner.sub_(0.1 * param.grad._local_tensor)
            model.zero_grad()
    assert asked[False]
    assert asked[True] == asked[False] or mode != "eager"
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_graph_sends_no_wrapper_subclass(fake_group):
    model = fully_shard(nn.Sequential(_wrapped_blocks("cpu")[0][0]))
    _send_as_bfloat16(model, [])
    with pytest.raises(
        Exception, match="fsdp_pre_all_gather to return plain tensors where it is compiled, got .*TwoTensor"
    ):
        compiled(model)(torch.ones(1, 6))


@row("tensor-subclass extensions", mode="eager")
@on_ranks(4)
def test_methods_on_the_local_tensor_get_the_mesh_of_the_shards():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, asked = _wrapped_blocks("cpu"), []
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    _send_as_bfloat16(model, asked)
    model(torch.ones(1, 6))
    assert asked == [(1, 2, (8, 6)), (1, 2, (6, 8))] * 2


def _shard(model, mode, **kwargs):
    for block in model:
        fully_shard(block, reshard_after_forward=True, **kwargs)
    fully_shard(model, **kwargs)
    return _compiled(model, mode, model)


def _compiled(model, mode, blocks):
    if mode == "regions":
        with_regions(model, blocks)
        return compiled(model), None
    return record(model) if mode == "full" else (model, None)


def _float8_model(gathers_float8: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False)) for _ in range(2)]
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_float8, emulate=True)
    return convert_to_float8_training(nn.Sequential(*blocks), config=config)


def test_half_an_extension_is_refused(fake_group):
    class OnlyPre(torch.Tensor):
        def fsdp_pre_all_gather(self, mesh):
            return (self,), None

    class TwoArguments(OnlyPre):
        def fsdp_pre_all_gather(self, mesh, size):
            return (self,), None

        def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
            return outputs[0], ()

    for cls, message in (
        (OnlyPre, "weight: expected OnlyPre to define both fsdp_pre_all_gather and fsdp_post_all_gather, got only"),
        (TwoArguments, r"weight: expected TwoArguments.fsdp_pre_all_gather to take \(mesh\) or \(mesh, outer_size"),
    ):
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(model.weight.detach().as_subclass(cls))
        with pytest.raises(ValueError, match=message):
            fully_shard(model, mp_policy=MixedPrecisionPolicy())


def test_extension_methods_that_return_something_else(fake_group):
    pre, post = (lambda mesh: ((), None)), (lambda *args, out=None: (torch.ones(3), ()))
    for methods, error, message in (
        (
            {"fsdp_pre_all_gather": pre},
            ValueError,
            "weight: expected Tensor to define both fsdp_pre_all_gather and fsd",
        ),
        (
            {"fsdp_pre_all_gather": lambda mesh: torch.ones(2), "fsdp_post_all_gather": post},
            ValueError,
            r"weight: expected Tensor.fsdp_pre_all_gather to return \(a tuple of tensors, metadata\), got <class",
        ),
        (
            {"fsdp_pre_all_gather": pre, "fsdp_post_all_gather": lambda *args, out=None: torch.ones(2)},
            ValueError,
            r"weight: expected Tensor.fsdp_post_all_gather to return \(the unsharded tensor, a tuple of tensors that",
        ),
        (
            {"fsdp_pre_all_gather": pre, "fsdp_post_all_gather": post},
            ValueError,
            r"weight: expected Tensor.fsdp_post_all_gather to return a tensor of shape \(4, 4\), or with more rows "
            r"as padding, got \(3,\)",
        ),
    ):
        model = fully_shard(nn.Linear(4, 4))
        for name, method in methods.items():
            setattr(model.weight._local_tensor, name, method)
        with pytest.raises(error, match=message):
            model(torch.ones(1, 4))
    model = fully_shard(nn.Linear(4, 4), reshard_after_forward=2)
    for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        setattr(model.weight._local_tensor, name, pre)
    with pytest.raises(
        NotImplementedError, match="weight: reshard_after_forward as a group size is not implemented f"
    ):
        model(torch.ones(1, 4))
