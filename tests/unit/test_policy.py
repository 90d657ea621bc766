from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch.torch_version import TorchVersion

from fsdp_compiled import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp_compiled.policy import resolved


def test_policies_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MixedPrecisionPolicy().param_dtype = torch.bfloat16


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: MixedPrecisionPolicy(param_dtype="bf16"),
            TypeError,
            "MixedPrecisionPolicy.param_dtype: expected torch.dtype or None, got 'bf16'",
        ),
        (
            lambda: MixedPrecisionPolicy(reduce_dtype=torch.int8),
            ValueError,
            "MixedPrecisionPolicy.reduce_dtype: expected a floating-point dtype, got torch.int8",
        ),
        (
            lambda: MixedPrecisionPolicy(cast_forward_inputs=1),
            TypeError,
            "MixedPrecisionPolicy.cast_forward_inputs: expected True or False, got 1 of int",
        ),
        (
            lambda: MixedPrecisionPolicy(param_dtype_override_fn=torch.float32),
            TypeError,
            "MixedPrecisionPolicy.param_dtype_override_fn: expected a function or None, got torch.float32",
        ),
        (
            lambda: CPUOffloadPolicy(pin_memory=None),
            TypeError,
            "CPUOffloadPolicy.pin_memory: expected True or False, got None",
        ),
    ],
)
def test_wrong_fields_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# What gradients of fp32 parameters under bf16 compute are reduced in, if nothing is said.
REDUCED_IN = torch.float32 if TorchVersion(torch.__version__) >= "2.15" else torch.bfloat16


def test_a_dtype_of_one_parameters_own():
    bf16, fp32, param = torch.bfloat16, torch.float32, torch.nn.Parameter(torch.ones(1))
    reduced = (bf16, REDUCED_IN, fp32)
    for returned, dtypes in ((None, reduced), (bf16, reduced), (fp32, (fp32, fp32, fp32))):
        policy = MixedPrecisionPolicy(bf16, param_dtype_override_fn=lambda param, returned=returned: returned)
        assert resolved(policy.for_param("w", param), fp32, fp32) == dtypes
    for returned, error in ((torch.float16, ValueError), ("bf16", TypeError)):
        policy = MixedPrecisionPolicy(bf16, param_dtype_override_fn=lambda param, returned=returned: returned)
        with pytest.raises(
            error, match="w: expected param_dtype_override_fn to return None, torch.float32 or torch.b"
        ):
            policy.for_param("w", param)


def test_dtypes_a_parameter_travels_in():
    bf16, fp32, int64 = torch.bfloat16, torch.float32, torch.int64
    for policy, dtypes in (
        ((None, None), (fp32, fp32, fp32)),
        ((bf16, None), (bf16, REDUCED_IN, fp32)),
        ((bf16, fp32), (bf16, fp32, fp32)),
        ((bf16, bf16), (bf16, bf16, fp32)),
    ):
        assert resolved(MixedPrecisionPolicy(*policy), fp32, fp32) == dtypes
    assert resolved(MixedPrecisionPolicy(bf16, fp32), int64, int64) == (int64, int64, int64)


def test_dtypes_where_that_of_gradients_is_set():
    bf16, fp32 = torch.bfloat16, torch.float32
    for policy, grad_dtype, dtypes in (
        ((None, None), fp32, (bf16, fp32, fp32)),
        ((None, bf16), fp32, (bf16, bf16, fp32)),
        ((None, None), None, (bf16, bf16, bf16)),
        ((None, fp32), None, (bf16, fp32, fp32)),
        ((fp32, None), None, (fp32, fp32, fp32)),
    ):
        assert resolved(MixedPrecisionPolicy(*policy), bf16, grad_dtype) == dtypes


def test_the_reduce_dtype_is_that_of_the_installed_torch(fake_group):
    """Against FSDP2 itself: the dtype in which each hands gradients to the reduction's hook."""
    found = []
    for shard, policy in ((fsdp2.fully_shard, fsdp2.MixedPrecisionPolicy), (fully_shard, MixedPrecisionPolicy)):
        model = torch.nn.Linear(4, 4)
        shard(model, mp_policy=policy(param_dtype=torch.bfloat16))
        model.set_all_reduce_hook(lambda grad: found.append(grad.dtype))
        model(torch.ones(2, 4)).sum().backward()
    assert found == [REDUCED_IN] * 2


def test_no_offload_policy_is_the_default_one(fake_group):
    """As verl and NeMo AutoModel give it to FSDP2."""
    for shard in (fsdp2.fully_shard, fully_shard):
        model = shard(torch.nn.Linear(4, 4), offload_policy=None)
        model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad.shape == (4, 4)
