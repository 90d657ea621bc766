"""One unit's hooks: names, phases and what they leave, over collectives that carry nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_compiled import fully_shard
from fsdp_compiled.hooks.state import FSDPState, states_below
from fsdp_compiled.hooks.step import TrainingState

pytestmark = pytest.mark.usefixtures("fake_group")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.blocks(x))


def sharded() -> tuple[Model, list[FSDPState]]:
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, states_below([model])


def phases(states: list[FSDPState]) -> list[TrainingState]:
    return [state.unit.training_state for state in states]


def test_an_outer_unit_gives_names():
    _, states = sharded()
    assert [state.unit.config.name for state in states] == ["Model", "Model.blocks.0", "Model.blocks.1"]
    assert [state.is_root for state in states] == [True, False, False]
    assert [param.spec.param.name for param in states[2].params] == ["blocks.1.weight", "blocks.1.bias"]
    assert [state.unit.config.reshard_after_forward for state in states] == [False, True, True]


def test_the_phases_of_a_step():
    model, states = sharded()
    seen = []
    model.head.register_forward_hook(lambda *_: seen.append(phases(states)))
    out = model(torch.ones(2, 4))
    assert seen == [[TrainingState.FORWARD, TrainingState.IDLE, TrainingState.IDLE]]
    assert not any(state.unit.hooked for state in states)
    assert [state.groups[0].is_unsharded for state in states] == [True, False, False]
    step = states[0]._lazy_init().step
    assert step.post_forward_order == [states[1], states[2], states[0]] and not step.in_call
    out.register_hook(lambda _: seen.append(step.in_backward))
    out.sum().backward()
    assert seen[1:] == [True] and not step.in_backward
    assert set(phases(states)) == {TrainingState.IDLE} and not step.post_forward_order
    assert not any(state.groups[0].is_unsharded for state in states)
    assert all(param.grad is not None for param in model.parameters())


def test_backward_gathers_ahead_in_each_of_two_forwards(monkeypatch):
    model, (_, first, second) = sharded()
    x = torch.ones(2, 4, requires_grad=True)
    loss = model(x).sum() + model(x).sum()
    seen = []
    for name in ("launch_unshard", "post_backward"):
        original = getattr(FSDPState, name)
        monkeypatch.setattr(FSDPState, name, lambda s, n=name, o=original: (seen.append((s, n)), o(s))[1])
    loss.backward()
    half = seen.index((first, "post_backward")) + 1  # the second forward's backward ends here
    for part in (seen[:half], seen[half:]):
        assert part.index((first, "launch_unshard")) < part.index((second, "post_backward"))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_all_units_between_two_steps(where):
    model, states = sharded()

    def fail(*_):
        raise ZeroDivisionError

    if where == "forward":
        handle = model.head.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 4))
    else:
        handle = model.blocks.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 4)).sum().backward()
        assert states[0]._lazy_init().step.in_backward  # the engine does not call back
        model.reset_iter_state()
    step = states[0]._lazy_init().step
    assert set(phases(states)) == {TrainingState.IDLE} and not step.in_backward and not step.in_call
    assert not any(state.unit.hooked or state.groups[0].is_unsharded for state in states)
    handle.remove()
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_a_reset_sums_nothing_over_tensor_parallel_ranks():
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Replicate()]))
    fully_shard(model, mesh=mesh["dp"])
    model(DTensor.from_local(torch.ones(2, 4), mesh["tp"], [Shard(0)]))
    unsharded = model.weight
    unsharded.grad = DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()])
    with CommDebugMode() as communication:
        model.reset_iter_state()
    assert communication.get_total_counts() == 0 and unsharded.grad is None


def test_a_list_unit_ends_its_forward_with_its_last_module():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard([first, second])
    state = first._get_fsdp_state()
    model = nn.Sequential(first, second)
    fully_shard(model)
    seen = []
    first.register_forward_hook(lambda *_: seen.append((state.unit.training_state, state.unit.to_run)))
    model(torch.ones(2, 4))
    assert seen[0][0] is TrainingState.FORWARD and state.unit.training_state is TrainingState.IDLE
    first(torch.ones(2, 4))  # alone: no outer forward will end it
    assert state.unit.training_state is TrainingState.IDLE and not state.unit.to_run


def test_without_sync_gradients_stay_with_the_parameters():
    model, states = sharded()
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    assert all(param.gradients.unsharded.grad is not None for state in states for param in state.params)
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_a_unit_that_was_taken_out_is_outermost_again():
    model, states = sharded()
    model(torch.ones(2, 4))
    block = model.blocks[1]
    model.blocks[1] = nn.Identity()
    model(torch.ones(2, 4))
    assert states_below([model]) == states[:2] and block._get_fsdp_state().is_root
    block(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in block.parameters())
