"""What one group of parameters does: unshard, reshard, reduce."""

from __future__ import annotations

from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from fsdp_compiled import MixedPrecisionPolicy, fully_shard
from fsdp_compiled.collectives import Pending, launch_all_gather
from fsdp_compiled.hooks.group import FSDPParamGroup
from fsdp_compiled.param.param import FSDPParam
from fsdp_compiled.param.placement import ShardedState

GROUP = "fsdp_compiled.hooks.group"
pytestmark = pytest.mark.usefixtures("fake_group")


def group_of(**options) -> FSDPParamGroup:
    module = nn.Linear(4, 8)
    fully_shard(module, **options)
    (group,) = module._get_fsdp_state().groups
    return group


def states(group: FSDPParamGroup) -> set[ShardedState]:
    return {param.state for param in group.params}


def test_parameters_of_a_dtype_share_a_group():
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4).bfloat16(), nn.Linear(4, 8))
    fully_shard(module)
    groups = module._get_fsdp_state().groups
    assert [[param.name for param in group.params] for group in groups] == [
        ["0.weight", "0.bias", "2.weight", "2.bias"],
        ["1.weight", "1.bias"],
    ]


def test_unshard_and_reshard():
    group = group_of(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    group.launch_unshard()
    assert states(group) == {ShardedState.SHARDED}
    group.launch_unshard()  # under way
    group.wait_unshard()
    assert group.is_unsharded and {p.unsharded.param.dtype for p in group.params} == {torch.bfloat16}
    group.reshard()
    assert states(group) == {ShardedState.SHARDED}
    assert not any(p.unsharded.param.untyped_storage().nbytes() for p in group.params)


def test_parameters_that_hooks_hold_are_not_resharded():
    group = group_of()
    group.launch_unshard()
    group.wait_unshard()
    group.unit.hold(True)
    group.reshard()
    assert group.is_unsharded
    group.unit.hold(False)
    group.reshard()
    assert not group.is_unsharded


def test_shards_over_a_smaller_group_are_kept():
    group = group_of(reshard_after_forward=2)
    group.launch_unshard()
    group.wait_unshard()
    group.reshard_post_forward()
    assert states(group) == {ShardedState.SHARDED_POST_FORWARD}
    inputs, specs = group.params[0].all_gather_inputs()
    assert inputs[0].shape == (4, 4) and specs[0].all_gather.group.world == 2
    group.reshard()
    assert states(group) == {ShardedState.SHARDED}


def test_an_all_gather_whose_wait_was_cut_off_keeps_its_memory():
    group = group_of()
    group.launch_unshard()
    for param in group.params:
        param.allocate([param.spec])
    storages = [param.unsharded.param.untyped_storage() for param in group.params]
    with pytest.raises(KeyboardInterrupt), patch.object(Pending, "wait", side_effect=KeyboardInterrupt):
        group.wait_unshard()
    group.reshard()
    assert all(storage.nbytes() for storage in storages)


def extended(sent, join) -> FSDPParamGroup:
    module = nn.Linear(4, 8, bias=False)
    fully_shard(module)
    local = module.weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: (sent(local.detach()), None)
    local.fsdp_post_all_gather = lambda outputs, *_, out=None: None if out is not None else join(outputs)
    (group,) = module._get_fsdp_state().groups
    group.params[0].adopt_replacement()
    return group


def test_a_parameter_whose_extension_sends_nothing():
    made = torch.ones(8, 4)
    group = extended(lambda shard: (), lambda outputs: (made, ()))
    for _ in range(2):
        group.launch_unshard()
        group.wait_unshard()
        assert group.is_unsharded and group.params[0].unsharded.param.data_ptr() == made.data_ptr()
        group.reshard()


def test_one_of_several_all_gathers_stays_lost_until_all_are_dropped():
    group = extended(lambda shard: (shard, shard.bfloat16()), lambda outputs: (outputs[0], outputs))
    group.launch_unshard()
    group.wait_unshard()
    group.reshard()
    given = [launch_all_gather, Mock(side_effect=KeyboardInterrupt)]  # the second dtype's is cut off
    with pytest.raises(KeyboardInterrupt), patch(f"{GROUP}.launch_all_gather", lambda *args: given.pop(0)(*args)):
        group.launch_unshard()
    with pytest.raises(KeyboardInterrupt), patch.object(FSDPParam, "drop_unsharded", side_effect=KeyboardInterrupt):
        group.reshard()
    with patch.object(FSDPParam, "drop_unsharded", autospec=True) as dropped:
        group.reshard()
    dropped.assert_called_once_with(group.params[0], True)


def backward(group: FSDPParamGroup) -> None:
    group.launch_unshard()
    group.wait_unshard()
    for param in group.params:
        param.unsharded.param.grad = torch.ones_like(param.unsharded.param)
    group.reshard()


def test_a_reduction_leaves_sharded_gradients():
    group = group_of()
    backward(group)
    assert group.has_gradients
    group.launch_reduce()
    assert not group.has_gradients
    group.wait_reduce()
    assert [tuple(param.sharded_param.grad.to_local().shape) for param in group.params] == [(2, 4), (2,)]


def test_without_sync_gradients_accumulate():
    group = group_of(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    group.unit.configure(reduce_grads=False)
    for _ in range(2):
        backward(group)
        group.launch_reduce()
    grads = [param.gradients.unsharded.grad for param in group.params]
    assert all(grad.eq(2).all() and grad.dtype == torch.float32 for grad in grads) and group.has_gradients
    assert all(param.sharded_param.grad is None for param in group.params)


def test_a_dropped_reduction_leaves_no_gradient():
    group = group_of()
    backward(group)
    group.launch_reduce()
    group.drop_reduce()
    group.wait_reduce()
    assert all(param.sharded_param.grad is None for param in group.params)


def test_unused_parameters_take_part_with_zeros():
    group = group_of()
    group.unit.configure(reduce_unused=True)
    group.params[1].sharded_param.requires_grad_(False)
    group.launch_reduce()
    group.wait_reduce()
    assert [param.sharded_param.grad is None for param in group.params] == [False, True]
