"""Dtypes: of parameters, of what travels, of inputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_compiled import MixedPrecisionPolicy, fully_shard
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    MODES,
    WITH_REGIONS,
    assert_trains_like_one_process,
    batches,
    compiled,
    full,
    my_part,
    shard,
)

each_with_regions = pytest.mark.parametrize("mode", WITH_REGIONS)
each_mode = pytest.mark.parametrize("mode", MODES)


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
