"""The phase of a step: of each unit, and of the model that the units make up. Only this file writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from threading import get_ident
from typing import Protocol
from weakref import ReferenceType, ref

import torch
from torch import nn

from ..agreement.peers import at_end_of_backward, backward_task
from ..expect import unexpected
from ..param.param import FSDPParam
from ..param.unit import Unit
from ..tracing.dynamo import compiled_autograd
from .forward import EagerHooks
from .group import FSDPParamGroup
from .inputs import InputCopies


class TrainingState(Enum):
    """Where a unit is in an eager step."""

    IDLE = auto()  # outside forward and backward
    FORWARD = auto()  # between its pre-forward and post-forward hooks
    # From its first output gradient until its gradients are reduced; forward hooks that run now belong to a
    # recomputation under activation checkpointing.
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()  # its gradients were handed to the reduction in this backward


@dataclass(eq=False)
class UnitInStep(Unit):
    """One unit and its phase in the step."""

    training_state: TrainingState = TrainingState.IDLE
    to_run: set[nn.Module] = field(default_factory=set)  # modules of a list unit whose forward is still to come
    inputs: InputCopies = field(default_factory=InputCopies)  # of its forwards
    # A backward through an earlier one ends at its end: operations of that one that lead to no input, as where a loss
    # is linear, may come after those of forward; on a GPU they do, recorded by another thread.
    is_differentiated: bool = False  # the next backward goes through an earlier one
    ends_late: bool = False  # the running one does
    has_compiled_gradients: bool = False  # a compiled backward that has not ended has left some of the unit
    in_method: bool = False  # while a forward method of the user's runs, or a compiled call that finds it unsharded
    kept: bool = False  # the user has unsharded it, and nobody has resharded it since
    # What compiled backwards teach, where the user tells of sync between forward and backward.
    is_unsynced: bool = False  # the last backward was without sync
    reduces_late: bool = False  # a graph has reduced though sync was off in its backward: forward was told otherwise
    kept_between: bool = False  # the user has kept it unsharded between the backwards of a step

    @property
    def is_recomputing(self) -> bool:
        return self.training_state is TrainingState.PRE_BACKWARD

    @property
    def is_nested(self) -> bool:
        """Whether a forward that begins or ends now is part of that of a forward method, or of the outermost unit."""
        return self.in_method and self.training_state is TrainingState.FORWARD

    @property
    def is_kept(self) -> bool:
        """Whether calls of a compiled model find it unsharded, if forward does not reshard it."""
        return self.kept or self.kept_between

    def check_trains(self) -> None:
        """Raise RuntimeError for a forward with gradients while :func:`unsharded` keeps the parameters."""
        if torch.is_grad_enabled() and not self.config.trains:
            where, got = f"{self.config.name} in unsharded()", "one with gradients"
            do = "leave the block to train"
            raise unexpected(where, "a forward without gradients", got, do, RuntimeError)

    def keep(self) -> None:
        self.kept = True

    def release(self) -> None:
        """Let go of it: hooks do not hold it, nor does the user keep it."""
        self.kept = False
        self.hold(False)

    @contextmanager
    def method(self) -> Iterator[None]:
        """Let forwards within the block be nested."""
        before, self.in_method = self.in_method, True
        try:
            yield
        finally:
            self.in_method = before

    def begin_forward(self, modules: Iterable[nn.Module]) -> None:
        """Begin the forward of the first of the unit's modules; that of another one changes nothing."""
        if not self.to_run:
            self.to_run = set(modules)
            self.training_state = TrainingState.FORWARD

    def end_module(self, module: nn.Module) -> bool:
        """End the forward of one module; return whether it was the last."""
        self.to_run.discard(module)
        return not self.to_run

    def end_forward(self) -> None:
        """End the unit's forward, though some of its modules were not called."""
        self.to_run.clear()
        self.hold(False)
        self.training_state = TrainingState.IDLE

    def begin_backward(self) -> bool:
        """Begin the unit's backward; return whether this is its first output gradient."""
        is_first = self.training_state is not TrainingState.PRE_BACKWARD
        self.training_state = TrainingState.PRE_BACKWARD
        self.ends_late, self.is_differentiated = self.ends_late or self.is_differentiated, False
        return is_first

    def note_differentiated(self) -> None:
        self.is_differentiated = True

    def begin_kept(self) -> None:
        """Begin a call of the outermost unit that finds it unsharded; uncompiled forwards within are part of it."""
        self.begin_forward(())
        self.in_method = True
        self.hold(True)

    def end_kept(self) -> None:
        self.in_method = False
        self.end_forward()

    def end_backward(self) -> None:
        """Hand the unit's gradients to the reduction."""
        self.training_state = TrainingState.POST_BACKWARD

    def note_compiled_gradients(self) -> None:
        self.has_compiled_gradients = True

    def note_compiled_backward(self, is_reduced: bool) -> None:
        """Note whether the graph of a backward has reduced gradients."""
        if not self.config.reduce_grads:
            self.kept_between |= not self.config.reshard_after_backward
            self.reduces_late |= is_reduced

    def end_step(self) -> None:
        """Return to idle; hooks may still hold the unit."""
        self.training_state = TrainingState.IDLE
        self.to_run.clear()
        self.has_compiled_gradients = self.ends_late = False
        if self.config.reduce_grads and not self.is_unsynced:  # the step was of one backward
            self.reduces_late = self.kept_between = False
        self.is_unsynced = not self.config.reduce_grads
        if self.config.reduces_in_hooks is not self.reduces_late:
            self.configure(reduces_in_hooks=self.reduces_late)

    def reset(self) -> None:
        """Return to between two steps, after an exception that may have cut off any other change."""
        self.end_step()
        self.hooked = self.in_call = self.is_differentiated = False
        self.inputs.clear()
        for param in self.followers:
            param.follow_hold()


class UnitState(EagerHooks, Protocol):
    """What the hooks' other files ask of ``FSDPState``, whose file imports them."""

    unit: UnitInStep
    params: list[FSDPParam]
    device: torch.device
    max_reducing: int

    @property
    def groups(self) -> list[FSDPParamGroup]: ...
    def launch_unshard(self) -> None: ...
    def unshard(self) -> None: ...
    def drop_unshard(self) -> None: ...
    def reshard(self) -> None: ...
    def complete_list_unit(self) -> None: ...
    def end_step(self) -> None: ...
    def reset(self, drop_accumulated: bool) -> None: ...
    def check_parameters(self) -> None: ...
    def leave(self) -> None: ...
    def note(self, what: str) -> None: ...


def is_in_backward() -> bool:
    """Tell whether the autograd engine is running a backward on this thread."""
    return backward_task() != -1


def _second_thread(root: UnitState) -> Exception:
    do = "use a model for each thread or a lock around its step, and reset_iter_state() if the other one failed"
    expected = "one thread at a time in the model's forward or backward"
    return unexpected(root.unit.config.name, expected, "a second", do, RuntimeError)


@dataclass(eq=False)
class Step:
    """The phase of the steps of one model. After an exception a new one takes its place."""

    in_call: bool = False  # the outermost module is called, or an eager backward runs: leaves copy requires_grad
    is_checked: bool = False  # the parameters were checked since the last backward; traced calls do not check them
    in_backward: bool = False  # until the callback that the autograd engine calls when this backward ends
    at_end: ReferenceType[Callable[[], None]] | None = None  # that callback, which the engine holds until then
    calls_in_backward: bool = False  # this backward has set in_call, and its end unsets it
    is_resetting: bool = False  # a reset is under way, or was when an exception came
    finalizing: object | None = None  # the handle of a finalization that was started and not waited for
    thread: int | None = None  # that began the last forward
    backward_thread: int | None = None  # that began the last backward
    begun: list[UnitState] = field(default_factory=list)  # units in the order in which this forward began theirs
    to_come: list[UnitState] = field(default_factory=list)  # those of the last forward, while this one repeats it
    ahead: UnitState | None = None  # the unit that is all-gathered ahead by that order and has not been used
    # Units whose forward ended in this step and whose backward has not begun; None between two forwards.
    post_forward_order: list[UnitState | None] = field(default_factory=list)
    # Units that are not all-gathered ahead of their backward: what may use them first would not wait.
    left: set[UnitState] = field(default_factory=set)

    def call(self, states: Iterable[UnitState], in_call: bool) -> None:
        """Begin or end a call of the outermost module."""
        self.in_call = in_call
        for state in states:
            state.unit.call(in_call)

    def enter_thread(self, states: Sequence[UnitState]) -> None:
        """Note that this thread begins a forward; RuntimeError if another one is in forward or backward."""
        if is_in_backward():
            return  # a recomputation, on a GPU in a thread of the autograd engine
        is_used_elsewhere = self.thread not in (None, get_ident())
        if is_used_elsewhere and (self.in_backward or self.in_call or not _are_idle(states)):
            raise _second_thread(states[0])
        self.thread = get_ident()

    @property
    def is_used_here(self) -> bool:
        """Whether this thread called the model last."""
        return self.thread == get_ident()

    @property
    def is_running(self) -> bool:
        """Whether the outermost module is called, or an eager backward runs that no exception has ended."""
        return self.in_call and not self.backward_has_died

    def note_check(self) -> None:
        self.is_checked = True

    def begin_forward(self) -> None:
        """Begin a forward, perhaps after others whose backward is to come; of very many the oldest are forgotten."""
        del self.post_forward_order[:-10_000]  # evaluation with gradients on, without a backward
        if self.post_forward_order:
            self.post_forward_order.append(None)  # what was before may have been on one rank alone
        else:
            self.left.clear()
        self.to_come, self.begun = self.begun, []

    def enter_forward(self, state: UnitState) -> None:
        """Start all-gathering the unit that is expected after ``state``, whose own parameters are unsharded."""
        if self.ahead is not state:
            self.drop_ahead()
        self.begun.append(state)
        self.to_come = self.to_come[1:] if self.to_come[:1] == [state] else []
        self.ahead = next(iter(self.to_come), None)
        if self.ahead is not None:
            self.ahead.launch_unshard()

    def end_forward(self, state: UnitState) -> None:
        """Note that a unit's forward has ended whose backward is to come."""
        self.post_forward_order.append(state)

    def drop_ahead(self) -> None:
        """Drop the all-gather of a unit that was expected and did not come."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None and not ahead.unit.hooked:
            ahead.drop_unshard()

    def before(self, state: UnitState) -> list[UnitState]:
        """Return the unit before ``state`` in its forward, if any; those after it have had their backward."""
        order = self.post_forward_order
        while order and order.pop() is not state:
            pass  # units that no gradient reached
        return [each for each in order[-1:] if each is not None]

    def begin_backward(self, root: UnitState, at_end: Callable[[], None]) -> None:
        """Have the autograd engine call ``at_end`` when the running backward ends.

        NotImplementedError under compiled autograd, which stands in for the engine and would not call it.
        """
        if compiled_autograd.in_compiled_autograd_region:
            do = "compile without it: the backward of a compiled model is a graph already"
            setting = "torch._dynamo.config.compiled_autograd"
            raise unexpected(setting, "False", "True in a backward", do, NotImplementedError)
        if self.in_backward:
            # On a GPU, threads of the autograd engine run a backward.
            if self.backward_thread != get_ident() and root.device.type == "cpu":
                raise _second_thread(root)
        else:
            callback = partial(at_end)  # the engine's alone
            at_end_of_backward(callback)
            self.in_backward, self.backward_thread, self.at_end = True, get_ident(), ref(callback)
            root.note("backward")

    @property
    def backward_has_died(self) -> bool:
        """Whether an exception has ended the last backward: the engine has dropped what it would have called."""
        return self.in_backward and self.at_end is not None and self.at_end() is None

    def call_in_backward(self, states: Iterable[UnitState]) -> None:
        """Let leaves be as forward had them, as a recomputation of compiled code must find them."""
        if not self.in_call:
            self.call(states, True)
            self.calls_in_backward = True

    def end_backward(self, states: Iterable[UnitState]) -> None:
        if self.calls_in_backward:
            self.calls_in_backward = False
            self.call(states, False)
        self.in_backward = self.is_checked = False

    def begin_finalizing(self, handle: object) -> None:
        self.finalizing = handle

    def end_finalizing(self) -> None:
        self.finalizing = None

    def end_reductions(self) -> None:
        """Note that all gradients of the step are reduced."""
        self.post_forward_order.clear()

    def begin_reset(self) -> None:
        """Note that a reset is under way, which an exception may cut off, too."""
        self.is_resetting = True

    def was_cut_off(self, states: Iterable[UnitState], begins_step: bool) -> bool:
        """Tell whether an exception has cut off a backward or a reset; a forward too, if a step begins now."""
        is_left = self.in_backward or self.is_resetting  # a backward that died never calls back
        if begins_step:
            is_left |= not _are_idle(states)
            is_left |= any(
                [each for each in state.params if each.gradients.leaf.grad is not None] for state in states
            )
        return is_left and not is_in_backward()


def _are_idle(states: Iterable[UnitState]) -> bool:
    return all(state.unit.training_state is TrainingState.IDLE for state in states)
