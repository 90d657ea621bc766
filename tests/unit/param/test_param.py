"""One parameter's states, and what it derives for traced reads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compiled import FSDPError, fully_shard
from fsdp_compiled.param.param import HELD, FSDPParam
from fsdp_compiled.param.placement import ShardedState

pytestmark = pytest.mark.usefixtures("fake_group")


def sharded(hidden: int = 7, replicas: int = 1) -> tuple[nn.Module, FSDPParam]:
    """Return a module whose weight of shape [hidden, 4] is sharded over 4 ranks or fewer, and its parameter."""
    module = nn.Linear(4, hidden, bias=False)
    fully_shard(
        module, mesh=init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
    )
    (param,) = module._get_fsdp_state().params
    return module, param


def all_gathered(param: FSDPParam) -> nn.Parameter:
    _, specs = param.all_gather_inputs()
    for output in param.allocate(specs):
        output.fill_(1)
    param.to_unsharded()
    return param.unsharded.param


def test_the_leaf_is_the_padded_shard_in_which_the_dtensor_lies():
    module, param = sharded()
    assert module.weight is param.sharded_param and isinstance(module.weight, DTensor)
    assert param.leaf.shape == (2, 4) and module.weight.to_local().shape == (2, 4)
    with torch.no_grad():
        module.weight.fill_(3)
    assert param.leaf.eq(3).all()


def test_states_change_what_is_registered_and_what_holds_memory():
    module, param = sharded()
    with pytest.raises(FSDPError, match="unsharded before it was all-gathered"):
        param.to_unsharded()
    unsharded = all_gathered(param)
    assert param.state is ShardedState.UNSHARDED and module.weight is unsharded and unsharded.eq(1).all()
    param.to_sharded()
    assert param.state is ShardedState.SHARDED and module.weight is param.sharded_param
    assert unsharded.untyped_storage().nbytes() == 0
    assert all_gathered(param) is unsharded  # the same object, as autograd has saved it


def test_memory_of_a_lost_all_gather_is_left_to_it():
    _, param = sharded()
    unsharded = all_gathered(param)
    param.to_sharded()
    param.allocate([param.spec])
    param.drop_unsharded(is_lost=True)
    assert unsharded.untyped_storage().nbytes() and param.unsharded.param is None
    param.allocate([param.spec])
    param.drop_unsharded(is_lost=False)
    assert param.unsharded.param is not unsharded and param.unsharded.param.untyped_storage().nbytes() == 0


def test_one_attribute_tells_a_traced_read_all():
    _, param = sharded(replicas=2)
    unit = param.unit

    def read():
        return param.local_spec, param.local_spec_without_grad

    assert read() == (None, None)
    unit.call(True)
    assert read() == (param.spec_text, param.spec_text)
    unit.configure(reduce_grads=False)
    assert read() == (None, param.spec_text) and param.gradients.unsharded_leaf is not None
    unit.configure(reduce_grads=True, all_reduce_grads=False)
    assert read() == (None, param.spec_text) and param.gradients.shard_leaf.shape == (4, 4)
    unit.hold(True)
    assert read() == (HELD, HELD) and param.is_held
    unit.hold(False)
    unit.configure(all_reduce_grads=True)
    assert read() == (param.spec_text, param.spec_text) and param.gradients.shard_leaf is None
    unit.call(False)
    assert read() == (None, None)


def test_a_parameter_is_held_while_any_unit_that_shares_it_holds_it():
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    for module in tied:
        fully_shard(module)
    (param,) = tied[0]._get_fsdp_state().params
    first, second = param.users
    second.hold(True)
    assert param.is_held and param.local_spec == HELD
    first.hold(True)
    second.hold(False)
    assert param.is_held
    first.hold(False)
    assert not param.is_held and param.local_spec is None


def test_the_leaf_copies_requires_grad_during_calls_alone():
    module, param = sharded()
    module.weight.requires_grad_(False)
    assert param.leaf.requires_grad
    param.unit.call(True)
    assert not param.leaf.requires_grad
    module.weight.requires_grad_(True)
    param.unit.configure(sum_only=True)
    assert not param.leaf.requires_grad  # a recomputation must find it as forward did
    param.unit.call(False)
    param.unit.call(True)
    assert param.leaf.requires_grad


def test_the_spec_follows_the_configuration():
    _, param = sharded()
    spec = param.spec
    param.unit.configure(reduce_grads=False)
    param.unit.configure(unshard_in_backward=False)
    assert param.spec is spec  # nothing that a collective depends on
    param.unit.configure(divide_factor=3.0)
    assert param.spec.reduction.scaling.post_divide == 3.0 and "3.0" in param.spec_text


def test_a_replacement_keeps_what_is_accumulated():
    module, param = sharded()
    old = module.weight
    param.gradients.unsharded.add(torch.ones(7, 4))
    new = nn.Parameter(old.detach() * 2)
    module.weight = new
    assert module.weight is new and param.sharded_param is new
    assert param.gradients.unsharded.grad.eq(1).all()
    assert torch.equal(param.leaf, param.storage.local)  # this rank's shard needs no padding


def test_a_wrong_replacement_leaves_the_parameter():
    module, param = sharded()
    with pytest.raises(TypeError, match=r"^weight: expected a sharded DTensor, got a Parameter"):
        module.weight = nn.Parameter(torch.zeros(7, 4))
    assert module.weight is param.sharded_param


def test_a_module_with_a_setattr_of_its_own_sees_what_is_registered():
    class Watching(nn.Linear):
        def __setattr__(self, name, value):
            self.__dict__.setdefault("seen", []).append(name)
            super().__setattr__(name, value)

    module = Watching(4, 8, bias=False)
    fully_shard(module)
    (param,) = module._get_fsdp_state().params
    module.seen.clear()
    unsharded = all_gathered(param)
    assert module.seen == ["weight"] and module.weight is unsharded


def test_a_copy_has_a_shard_a_leaf_and_a_unit_of_its_own():
    module, param = sharded()
    module.set_separate_reduce_scatter_group(False)
    param.unit.call(True)
    copied = copy.deepcopy(module)
    (other,) = copied._get_fsdp_state().params
    assert other.unit is not param.unit and other.users == [other.unit] and not other.unit.in_call
    assert other.leaf.data_ptr() != param.leaf.data_ptr() and torch.equal(other.leaf, param.leaf)
    other.unit.hold(True)
    assert other.local_spec == HELD and param.local_spec == param.spec_text
