"""The record of a step's phase: who may write it, and what a reset leaves of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fsdp_compiled.hooks.step import Step, TrainingState, UnitInStep
from fsdp_compiled.param.unit import UnitConfig


class FakeState:
    """A unit that notes what it is asked to do."""

    def __init__(self, name: str = "model") -> None:
        self.unit, self.params, self.device = UnitInStep(UnitConfig(name)), [], torch.device("cpu")
        self.asked: list[str] = []

    def __getattr__(self, name: str):
        return lambda *args: self.asked.append(name)


def test_a_unit_goes_through_a_step():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    unit = UnitInStep(UnitConfig("list"))
    unit.begin_forward([first, second])
    assert unit.training_state is TrainingState.FORWARD and not unit.end_module(first)
    unit.begin_forward([first, second])  # of the second module
    assert unit.end_module(second)
    unit.end_forward()
    assert unit.training_state is TrainingState.IDLE
    assert unit.begin_backward() and not unit.begin_backward() and unit.is_recomputing
    unit.end_backward()
    assert unit.training_state is TrainingState.POST_BACKWARD
    unit.end_step()
    assert unit.training_state is TrainingState.IDLE


class FakeParam:
    """A parameter that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def follow_config(self, respec: bool) -> None:
        self.told.append(f"config {respec}")

    def follow_hold(self) -> None:
        self.told.append("hold")

    def follow_call(self, in_call: bool) -> None:
        self.told.append(f"call {in_call}")


def test_parameters_are_told_of_every_change():
    unit, param = UnitInStep(UnitConfig("unit")), FakeParam()
    unit.followers.append(param)
    unit.hold(True)
    unit.hold(True)  # no change
    unit.call(True)
    unit.configure(reduce_grads=False)
    assert param.told == ["hold", "call True", "config False"]
    unit.configure(name="model.unit")
    assert param.told[3:] == ["config True"] and unit.config == UnitConfig("model.unit", reduce_grads=False)


def test_a_reset_leaves_a_unit_as_a_new_one_but_for_its_configuration():
    unit, param = UnitInStep(UnitConfig("unit")), FakeParam()
    new = dict(vars(unit))
    unit.followers.append(param)
    unit.begin_forward([nn.Linear(1, 1)])
    unit.hold(True)
    unit.call(True)
    unit.begin_backward()
    unit.note_compiled_gradients()
    param.told.clear()
    unit.reset()
    assert dict(vars(unit)) == new and param.told == ["hold"]


def test_units_are_all_gathered_ahead_in_the_order_of_the_last_forward():
    step, (a, b, c) = Step(), map(FakeState, "abc")
    for each in (a, b, c):
        step.enter_forward(each)
    assert not a.asked + b.asked + c.asked
    step.begin_forward()
    step.enter_forward(a)
    assert b.asked == ["launch_unshard"]
    step.enter_forward(c)  # another order
    assert b.asked == ["launch_unshard", "drop_unshard"] and not c.asked and step.ahead is None


def test_the_unit_before_is_the_one_whose_backward_comes_next():
    step, (a, b, c) = Step(), map(FakeState, "abc")
    for each in (a, b, c):
        step.end_forward(each)
    assert step.before(b) == [a] and step.post_forward_order == [a]
    step.begin_forward()  # a second forward, before the backward of both
    for each in (b, c):
        step.end_forward(each)
    assert step.before(c) == [b] and step.before(b) == []
    assert step.before(a) == [] and not step.post_forward_order
    step.end_forward(a)
    step.end_reductions()
    assert not step.post_forward_order


def test_units_that_returned_an_object_are_known_until_the_backwards_of_their_forwards_have_ended():
    step, (a, b) = Step(), map(FakeState, "ab")
    step.begin_forward()
    step.left.add(a)
    step.end_forward(b)
    step.begin_forward()
    assert step.left == {a}
    step.end_reductions()
    step.begin_forward()
    assert not step.left


def test_forwards_without_a_backward_are_forgotten_in_time():
    step, a = Step(), FakeState("a")
    for _ in range(20_000):
        step.begin_forward()
        step.end_forward(a)
    assert len(step.post_forward_order) < 20_000


def test_one_thread_at_a_time_is_in_a_step():
    step, states, errors = Step(), [FakeState()], []

    def enter():
        try:
            step.enter_thread(states)
        except RuntimeError as error:
            errors.append(str(error))

    step.enter_thread(states)
    states[0].unit.begin_forward([nn.Linear(1, 1)])
    other = threading.Thread(target=enter)
    other.start()
    other.join()
    assert "expected one thread at a time" in errors.pop()
    states[0].unit.end_forward()
    other = threading.Thread(target=enter)
    other.start()
    other.join()
    assert not errors and not step.is_used_here


def test_the_end_of_a_backward_is_called_once():
    step, root, ended = Step(), FakeState(), []

    def at_end():
        ended.append(step.in_backward)
        step.end_backward([root])

    def begin(grad):
        step.begin_backward(root, at_end)
        step.call_in_backward([root])
        assert root.unit.in_call

    x = torch.ones(2, requires_grad=True)
    for factor in (2, 3):
        y = x * factor
        y.register_hook(begin)
        (y + y.detach()).sum().backward()
    assert ended == [True, True] and not step.in_backward and not root.unit.in_call


@pytest.mark.parametrize("phase", ["a backward", "a reset", "a forward", "a gradient"])
def test_what_an_exception_has_cut_off(phase):
    step, root = Step(), FakeState()
    assert not step.was_cut_off([root], begins_step=True)
    if phase == "a backward":
        step.in_backward = True
    elif phase == "a reset":
        step.begin_reset()
    elif phase == "a forward":
        root.unit.begin_forward([nn.Linear(1, 1)])
    else:
        root.params.append(SimpleNamespace(gradients=SimpleNamespace(leaf=SimpleNamespace(grad=torch.ones(1)))))
    assert step.was_cut_off([root], begins_step=True)
    assert step.was_cut_off([root], begins_step=False) is (phase in ("a backward", "a reset"))
