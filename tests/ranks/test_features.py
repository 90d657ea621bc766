"""What a sharded model can do besides a plain step, in each mode, against one process."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from fsdp_compiled.hooks.state import states_below
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    MODES,
    WITH_REGIONS,
    assert_close,
    assert_trains_like_one_process,
    batches,
    compiled,
    full,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
    train,
)

each_mode = pytest.mark.parametrize("mode", MODES)
each_with_regions = pytest.mark.parametrize("mode", WITH_REGIONS)


@row("uneven shards")
@each_with_regions
@on_ranks(4)
def test_uneven_first_dimensions_and_empty_shards(mode):
    alone, model = MLP(width=9, hidden=5), MLP(width=9, hidden=5)  # 5 rows on 4 ranks: 2, 2, 1, 0
    call = shard(model, mode)
    lengths = [None] * 4
    dist.all_gather_object(lengths, model.blocks[0][0].weight.to_local().shape[0])
    assert lengths == [2, 2, 1, 0]
    assert_trains_like_one_process(model, call, alone, batches(3, 8, 9))


@row("module kinds")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_blocks_without_an_outer_unit(mode):
    alone, model = MLP(), MLP()
    for block in model.blocks:
        fully_shard(block)
    call = compiled(model) if mode == "full" else model
    square_loss(alone, batches(1, 8, 10)[0]).backward()
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    got, want = full_grads(model), full_grads(alone)
    dist.all_reduce(got["scale"], op=dist.ReduceOp.AVG)  # no unit took it
    assert_close(got, want)


@row("module kinds")
@each_with_regions
@on_ranks(2)
def test_nested_units(mode):
    alone, model = MLP(), MLP()
    for block in model.blocks:
        fully_shard(block[0])
        fully_shard(block[3])
    call = shard(model, mode)
    assert model.blocks[1][0]._get_fsdp_state().unit.config.name.endswith(".blocks.1.0")
    assert model.blocks[1][0]._fsdp_params["weight"].name == "blocks.1.0.weight"
    assert_trains_like_one_process(model, call, alone)


@row("meshes")
@each_with_regions
@on_ranks(4)
def test_hybrid_sharding(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone, model = MLP(), MLP()
    call = shard(model, mode, mesh=mesh)
    assert model.scale.placements == (Replicate(), Shard(0))
    assert_trains_like_one_process(model, call, alone)


@row("shard_placement_fn")
@each_with_regions
@on_ranks(2)
def test_another_shard_dimension(mode):
    def last(param):
        return Shard(-1) if param.shape[-1] % 2 == 0 else None

    alone, model = MLP(), MLP()
    call = shard(model, mode, shard_placement_fn=last)
    assert model.blocks[0][0].weight.placements == (Shard(1),)
    assert_trains_like_one_process(model, call, alone)


@row("reshard")
@each_with_regions
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_reshard_after_forward(mode, reshard):
    alone, model = MLP(), MLP()
    call = shard(model, mode, reshard_after_forward=reshard)
    assert_trains_like_one_process(model, call, alone)


@row("accumulation")
@each_with_regions
@on_ranks(2)
def test_accumulation_without_sync(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    first, second, third = batches(3, 8, 10)
    for micro in (first, second, third):
        square_loss(alone, micro).backward()
    for micro in (first, second, third):
        model.set_requires_gradient_sync(micro is third)
        square_loss(call, my_part(micro)).backward()
        if micro is not third:
            assert all(p.grad is None for p in model.parameters())
    assert_close(full_grads(model), full_grads(alone))
    # and nothing is left over for the next step
    model.zero_grad()
    alone.zero_grad()
    square_loss(alone, first).backward()
    square_loss(call, my_part(first)).backward()
    assert_close(full_grads(model), full_grads(alone))


@row("accumulation")
@each_mode
@on_ranks(2)
def test_accumulation_with_a_reduction_each_time(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    for micro in batches(3, 8, 10):
        square_loss(alone, micro).backward()
        square_loss(call, my_part(micro)).backward()
    assert_close(full_grads(model), full_grads(alone))


@row("accumulation")
@each_with_regions
@on_ranks(2)
def test_accumulation_when_forwards_come_before_backwards(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    data = batches(5, 8, 10)
    losses = [square_loss(alone, x) for x in data]
    sum(losses).backward()

    def forward(index, sync):
        model.set_requires_gradient_sync(sync)
        return square_loss(call, my_part(data[index]))

    first = forward(0, sync=False)
    second = forward(1, sync=True)
    model.set_requires_gradient_sync(False)
    first.backward()
    model.set_requires_gradient_sync(True)
    second.backward()
    forward(2, sync=False).backward()
    fourth = forward(3, sync=False)
    fifth = forward(4, sync=True)
    model.set_requires_gradient_sync(False)
    fourth.backward()
    model.set_requires_gradient_sync(True)
    fifth.backward()
    assert_close(full_grads(model), full_grads(alone))


@row("accumulation", "mixed precision")
@each_with_regions
@on_ranks(2)
def test_accumulation_in_fp32_of_bf16_gradients(mode):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = MLP()
    call = shard(model, mode, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    first, second = batches(2, 8, 10)
    square_loss(call, my_part(first)).backward()
    accumulated = {p.gradients.unsharded.grad.dtype for s in states_below([model]) for p in s.params}
    assert accumulated == {torch.float32}
    model.set_requires_gradient_sync(True)
    square_loss(call, my_part(second)).backward()
    alone = MLP()
    (square_loss(alone, first) + square_loss(alone, second)).backward()
    assert_close(full_grads(model), full_grads(alone), rtol=5e-2)


@row("mixed precision")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_mixed_precision_policy_fields(mode):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)
    seen = []
    model = MLP()
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(model, mp_policy=policy)
    model.blocks[0][0].register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    call = compiled(model) if mode == "full" else model
    x = my_part(batches(1, 8, 10)[0])
    out = call(x)
    assert out.dtype == torch.float64
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    out.sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


class _Recording(MLP):
    def forward(self, x):
        self.dtypes = (x.dtype, self.scale.dtype)
        return super().forward(x)


@row("mixed precision")
@each_with_regions
@on_ranks(2)
def test_a_parameter_that_keeps_its_dtype(mode):
    alone, model = _Recording(), _Recording()

    def keep(param):
        return param.dtype if param is scale else None

    scale = model.scale
    call = shard(model, mode, mp_policy=MixedPrecisionPolicy(torch.float64, param_dtype_override_fn=keep))
    assert_trains_like_one_process(model, call, alone)
    assert model.dtypes == (torch.float64, torch.float32)


@row("mixed precision")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_inputs_stay_as_they_are_without_cast_forward_inputs(mode):
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, cast_forward_inputs=False)
    model = nn.Linear(4, 4)
    fully_shard(model, mp_policy=policy)
    call = compiled(model) if mode == "full" else model
    with pytest.raises(Exception, match="(?i)dtype|double"):
        call(torch.ones(2, 4))


@row("mixed precision")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_fp16_reduction_does_not_overflow(mode):
    model = nn.Linear(4, 2, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    call = compiled(model) if mode == "full" else model
    (call(torch.full((1, 4), 200.0)) * 200).sum().backward()  # 40000 on each rank; their sum exceeds 65504
    torch.testing.assert_close(full(model.weight.grad), torch.full((2, 4), 40000.0), rtol=1e-3, atol=0)


@row("mixed original dtypes")
@each_with_regions
@on_ranks(2)
def test_different_original_dtypes_in_one_unit(mode):
    def build():
        model = MLP()
        for block in model.blocks:
            block[2].double()
            block[2].register_forward_pre_hook(lambda m, args: (args[0].double(),))
            block[2].register_forward_hook(lambda m, args, out: out.float())
        return model

    alone, model = build(), build()
    call = shard(model, mode)
    assert_trains_like_one_process(model, call, alone)
    assert model.blocks[0][2].weight.grad is None
    assert model.blocks[0][2].weight.dtype == torch.float64


@row("frozen and LoRA")
@each_with_regions
@on_ranks(2)
def test_frozen_at_first_and_unfrozen_later(mode):
    alone, model = MLP(), MLP()
    for m in (alone, model):
        m.blocks[0].requires_grad_(False)
        m.scale.requires_grad = False
    call = shard(model, mode)
    data = batches(3, 8, 10)
    assert_trains_like_one_process(model, call, alone, data)
    for m in (alone, model):
        for param in m.parameters():
            param.requires_grad = True
    assert_trains_like_one_process(model, call, alone, data)
    for m in (alone, model):
        m.blocks[1].requires_grad_(False)
    square_loss(call, my_part(data[0])).backward()
    square_loss(alone, data[0]).backward()
    assert_close(full_grads(model), full_grads(alone))


class _Tied(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.blocks[1][3] = self.blocks[0][3]


@row("tied and shared")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_parameters_and_modules_shared_inside_a_unit(mode):
    alone, model = _Tied(), _Tied()
    fully_shard(model)
    assert model.blocks[1][0].weight is model.blocks[0][0].weight
    call = compiled(model) if mode == "full" else model
    assert_trains_like_one_process(model, call, alone)


@row("ignored and unused")
@each_with_regions
@on_ranks(2)
def test_ignored_parameters_are_left_alone(mode):
    alone, model = MLP(), MLP()
    ignored = model.blocks[0][0].weight
    call = shard(model, mode, ignored_params={ignored})
    assert model.blocks[0][0].weight is ignored
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    square_loss(alone, batches(1, 8, 10)[0]).backward()
    got, want = full_grads(model), full_grads(alone)
    dist.all_reduce(got["blocks.0.0.weight"], op=dist.ReduceOp.AVG)  # what fully_shard left to the user
    assert_close(got, want)


class _Checkpointed(MLP):
    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@row("activation checkpointing")
@each_mode
@on_ranks(2)
def test_activation_checkpointing(mode):
    alone, model = _Checkpointed(), _Checkpointed()
    call = shard(model, mode)
    assert_trains_like_one_process(model, call, alone)


@row("module kinds")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_list_units_some_of_whose_modules_do_not_run(mode):
    def build():
        torch.manual_seed(0)
        return nn.ModuleDict({"a": nn.Linear(10, 10), "b": nn.Linear(10, 10), "never": nn.Linear(10, 10)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = build()

        def forward(self, x):
            return self.parts["b"](self.parts["a"](x).relu())

    alone, model = Model(), Model()
    assert fully_shard(list(model.parts.values())) == list(model.parts.values())
    fully_shard(model)
    call = compiled(model) if mode == "full" else model
    assert_trains_like_one_process(model, call, alone)
    assert model.parts["never"].weight.grad is None


@each_mode
@on_ranks(2)
def test_meta_device_initialisation(mode):
    with torch.device("meta"):
        model = MLP()
    call = shard(model, mode, inductor=True)
    with pytest.raises(Exception, match=r"expected a parameter with storage.*to_empty"):
        call(torch.ones(2, 10))
    torch._dynamo.reset()
    gc.collect()  # what failed to compile holds weak references, which torch 2.11's swap_tensors refuses
    model.to_empty(device="cpu")
    alone = MLP()
    for name, param in model.named_parameters():
        whole = dict(alone.named_parameters())[name].detach()
        local = param.to_local()
        with torch.no_grad():
            local.copy_(whole.chunk(2)[dist.get_rank()])
    assert_trains_like_one_process(model, call, alone)


@row("state dict")
@each_mode
@on_ranks(2)
def test_state_dict_goes_round(mode):
    model, other = MLP(), MLP()
    call, other_call = shard(model, mode), shard(other, mode)
    data = batches(2, 8, 10)
    train(model, call, data, square_loss)
    with torch.no_grad():
        call(data[0])  # the root keeps its parameters unsharded in eager mode
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    other_call(data[0])
    other.load_state_dict(state)
    assert_close(full_params(other), full_params(model))
    third = MLP()
    third_call = shard(third, mode)
    third.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    want = train(model, call, data, square_loss)
    assert train(other, other_call, data, square_loss) == want
    assert train(third, third_call, data, square_loss) == want


@row("mixed precision")
@each_mode
@on_ranks(2)
def test_conversion_to_another_dtype_after_sharding(mode):
    alone, model = MLP(width=9, hidden=5).double(), MLP(width=9, hidden=5)
    call = shard(model, mode, inductor=True)
    call(batches(1, 8, 9)[0])
    model.double()
    assert_trains_like_one_process(model, call, alone, batches(3, 8, 9).double())
    assert {p.dtype for p in model.parameters()} == {torch.float64}


@row("switching", mode=("eager", "full"))
@on_ranks(2)
def test_eager_then_compiled_then_eager():
    alone, model = MLP(), MLP()
    call = shard(model, "full")
    data = batches(3, 8, 10)
    for turn in (model, call, model, call):
        assert_trains_like_one_process(model, turn, alone, data)
        with torch.no_grad():  # leaves the root unsharded: the next training step must not use old values
            square_loss(model, my_part(data[0]))


@row("optimizers and evaluation")
@each_mode
@on_ranks(2)
def test_evaluation_between_steps(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    x = batches(1, 8, 10)[0]
    for context in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(call(x), alone(x))
        assert_trains_like_one_process(model, call, alone)


@row("switching", mode="eager")
@on_ranks(2)
def test_uncompiled_pieces_of_a_compiled_unit_gather_by_themselves():
    class Opaque(MLP):
        def forward(self, x):
            x = x * self.scale
            return self._rest(x)

        @torch.compiler.disable
        def _rest(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    alone, model = Opaque(), Opaque()
    fully_shard(model)  # one unit, part of whose modules run outside every graph and hook
    assert_trains_like_one_process(model, compiled(model, fullgraph=False), alone)


@row("methods", mode="eager")
@on_ranks(2)
def test_unshard_reshard_and_the_handle():
    model = MLP()
    shard(model, "eager")
    block = model.blocks[0]
    assert isinstance(block, FSDPModule)
    sharded = block[0].weight
    assert isinstance(sharded, DTensor)
    handle = block.unshard(async_op=True)
    assert block[0].weight is sharded
    handle.wait()
    handle.wait()
    assert not isinstance(block[0].weight, DTensor)
    torch.testing.assert_close(block[0].weight, MLP().blocks[0][0].weight)
    block.reshard()
    assert block[0].weight is sharded
    assert block.unshard() is None
    torch.testing.assert_close(block[3].bias, MLP().blocks[0][3].bias)


@row("methods", mode="eager")
@on_ranks(2)
def test_explicit_prefetch_lists():
    alone, model = MLP(layers=3), MLP(layers=3)
    call = shard(model, "eager")
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([])
    assert_trains_like_one_process(model, call, alone)
    assert all(isinstance(p, DTensor) for p in model.parameters())


class Encoder(nn.Module):
    """Trained by another method than ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(10, 10)

    def encode(self, x):
        return self.inner(x).relu()


class BreakingEncoder(Encoder):
    def encode(self, x):
        x = super().encode(x)
        torch._dynamo.graph_break()
        return x + self.inner.bias


@row("methods")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_a_registered_forward_method(mode):
    alone, model = Encoder(), Encoder()
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(nn.Linear(1, 1), "no_such_method_but_not_sharded_either")
    with pytest.raises(ValueError, match="FSDPEncoder: expected a method 'decode', found none"):
        register_fsdp_forward_method(model, "decode")
    call = compiled(model.encode) if mode == "full" else model.encode
    assert_trains_like_one_process(model, call, alone, call_alone=alone.encode)


@pytest.mark.parametrize("register", [register_fsdp_forward_method, torch_fsdp.register_fsdp_forward_method])
@on_ranks(2)
def test_a_registered_forward_method_that_breaks_the_graph(register):
    alone, model = BreakingEncoder(), BreakingEncoder()
    fully_shard(model)
    register(model, "encode")
    call = compiled(lambda x: model.encode(x), fullgraph=False)
    assert_trains_like_one_process(model, call, alone, call_alone=alone.encode)


@row("uneven shards")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(1)
def test_a_world_of_one_rank_communicates_nothing(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    assert_trains_like_one_process(model, call, alone)
