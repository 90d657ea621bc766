"""What the units of one model share: communication under way, the order of forward, the end of a backward.

It knows units only by what they can be asked; it must not know hooks or parameters' storage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from threading import get_ident
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from ..expect import unexpected
from ..param.param import FSDPParam
from .backward import outside_functorch, without_grad


class TrainingState(Enum):
    """Where a unit is in an eager step.

    IDLE: outside forward and backward.
    FORWARD: between its pre-forward and post-forward hooks.
    PRE_BACKWARD: from its first output gradient until its gradients are reduced; forward hooks that run now
        belong to a recomputation under activation checkpointing.
    POST_BACKWARD: its gradients were handed to the reduction in this backward.
    """

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


UnitState = Any  # an FSDPState, whose file imports this one


def states_below(modules: Sequence[nn.Module]) -> list[UnitState]:
    """Return the states of ``modules`` and of all modules below them, outermost first."""
    found = {id(s): s for root in modules for m in root.modules() if (s := m.__dict__.get("_fsdp_state")) is not None}
    return list(found.values())


@dataclass(eq=False)
class FSDPCommContext:
    """Communication under way among the units of one model, or of several that share it."""

    max_reducing: int = 1  # units whose reductions may be under way at a time; each holds its gradients meanwhile
    reducing: deque[UnitState] = field(default_factory=deque)  # these units, the oldest first

    def start_reduce(self, state: UnitState) -> None:
        """Launch a unit's reductions, after finishing the oldest of too many before it."""
        while len(self.reducing) >= self.max_reducing:
            self._finish_oldest()
        for group in state.groups:
            group.launch_reduce()
        self.reducing.append(state)

    def finish_reduce(self) -> None:
        """Wait for the reductions under way and accumulate their gradients."""
        while self.reducing:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for group in self.reducing.popleft().groups:
            group.wait_reduce()


@dataclass
class ForwardOrder:
    """The order in which units begin their forward, which the next one is expected to repeat."""

    expected: list[UnitState] = field(default_factory=list)  # the last forward's
    begun: list[UnitState] = field(default_factory=list)  # this forward's so far
    _holds: bool = True

    def restart(self) -> None:
        """Begin another forward."""
        self.expected, self.begun, self._holds = self.begun, [], True

    def enter(self, state: UnitState) -> UnitState | None:
        """Note that a unit's forward begins; return the unit expected next, if the order has held so far."""
        place = len(self.begun)
        self.begun.append(state)
        self._holds &= place < len(self.expected) and self.expected[place] is state
        return self.expected[place + 1] if self._holds and place + 1 < len(self.expected) else None


def _second_thread(root: UnitState) -> Exception:
    """Return the error for threads that use one model at a time."""
    do = "use a model for each thread or a lock around its step, and reset_iter_state() if the other one failed"
    expected = "one thread at a time in the model's forward or backward"
    return unexpected(root.unit.config.name, expected, "a second", do, RuntimeError)


def is_in_backward() -> bool:
    """Tell whether the autograd engine is running a backward on this thread."""
    # Checked on torch 2.11.0, 2.13.0 and 2.15.0.
    return torch._C._current_graph_task_id() != -1


_TorchHandle: Any = getattr(torch_fsdp, "GradientReductionHandle", object)  # since torch 2.15


class GradientReductionHandle(_TorchHandle):
    """Waits for what ``FSDPModule.finalize_backward(async_op=True)`` has begun."""

    def __init__(self, context: FSDPStateContext) -> None:
        self._context: FSDPStateContext | None = context

    def wait(self) -> None:
        """Accumulate the gradients; a second call does nothing. RuntimeError if a reset has dropped them."""
        context = self._context
        if context is None:
            return
        if context.finalizing is not self:
            self._context = None
            where, got = "GradientReductionHandle.wait", "one that a reset has dropped"
            raise unexpected(where, "a reduction under way", got, "run the step again", RuntimeError)
        context.finish_finalizing()
        self._context = None


@dataclass(eq=False)
class FSDPStateContext:
    """What the units below one root share."""

    states: list[UnitState]  # the root's unit and all below it, outermost first
    tree: Any = None  # the ModuleTree that they were found in
    comm: FSDPCommContext = field(default_factory=FSDPCommContext)
    forward_order: ForwardOrder = field(default_factory=ForwardOrder)  # by which units are all-gathered ahead of use
    ahead: UnitState | None = None  # the unit whose all-gather was started by that order and has not been used
    # Units whose forward ended in this step and whose backward has not begun.
    post_forward_order: list[UnitState] = field(default_factory=list)
    looked: bool = False  # the outermost unit has looked for changes since the last backward; traced calls do not
    callback_queued: bool = False  # the autograd engine will call finish_backward when this backward ends
    leaves_mirror: bool = False  # while the outermost module is called, see FSDPParam
    frozen: list[FSDPParam] = field(default_factory=list)  # whose leaves require no gradient meanwhile
    leaves_mirror_in_backward: bool = False  # the backward under way lets leaves mirror, and ends that
    is_last_backward: bool = True  # that call waits for all reductions, or leaves them to a later backward
    finalizes_manually: bool = False  # it leaves that to finalize in any case
    finalizing: GradientReductionHandle | None = None  # of a finalization that was started and not waited for
    is_resetting: bool = False  # a reset is under way, or was when an exception came
    thread: int | None = None  # that began the last forward
    backward_thread: int | None = None  # that began the last backward
    post_optim_event: torch.Event | None = None  # what the root's next forward waits for before it all-gathers

    @property
    def all_states(self) -> list[UnitState]:
        """``states`` by FSDP2's name for it, which ``torch.distributed.pipelining`` reads."""
        return self.states

    @property
    def _ends_with_backward(self) -> bool:
        """Whether the next backward's end is the end of the step's."""
        return self.is_last_backward and not self.finalizes_manually

    def enter_thread(self) -> None:
        """Note that this thread begins a forward; RuntimeError if another one is in forward or backward."""
        if is_in_backward():
            return  # a recomputation, on a GPU in a thread of the autograd engine
        if self.thread not in (None, get_ident()) and self._is_running:
            raise _second_thread(self.states[0])
        self.thread = get_ident()

    @property
    def _is_running(self) -> bool:
        is_called = self.callback_queued or self.leaves_mirror
        return is_called or any(state.training_state is not TrainingState.IDLE for state in self.states)

    def look(self) -> None:
        """Look for what the user has changed in the parameters since the last call of the outermost unit."""
        self.enter_thread()
        self.tree.check_untouched()
        self.looked = True

    def mirror_leaves(self, mirror: bool) -> None:
        """Let the leaves of all parameters require gradients as these do, or wherever they can."""
        params = [param for state in self.states for param in state.params]
        self.leaves_mirror = mirror
        for param in params:
            param.mirror_leaf(mirror)
        for param in self.frozen:
            param.leaf.requires_grad = param.is_differentiable
        self.frozen = [param for param in params if mirror and not param.sharded_param.requires_grad]
        for param in self.frozen:
            param.leaf.requires_grad = False

    def begin_forward(self) -> None:
        """Forget the order of the last forward, and wait for the optimizer's event if one was given."""
        if self._ends_with_backward:
            self.post_forward_order.clear()
        self.forward_order.restart()
        self._drop_ahead()
        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None

    def enter_forward(self, state: UnitState) -> None:
        """Start all-gathering the unit that is expected after ``state``, whose own parameters are unsharded."""
        if self.ahead is not state:
            self._drop_ahead()
        self.ahead = self.forward_order.enter(state)
        if self.ahead is not None:
            self.ahead.launch_unshard()

    def before(self, state: UnitState) -> list[UnitState]:
        """Return the unit that came before ``state`` in forward, if any; those after it have had their backward."""
        order = self.post_forward_order
        while order and order.pop() is not state:
            pass  # units that no gradient reached
        return order[-1:]

    def _drop_ahead(self) -> None:
        ahead, self.ahead = self.ahead, None
        if ahead is not None and not ahead.unit.hooked:
            ahead.drop_unshard()

    def queue_finish(self) -> None:
        """Have the autograd engine call ``finish_backward`` when the backward under way ends."""
        if self.callback_queued:
            # On a GPU, threads of the autograd engine run a backward.
            if self.backward_thread != get_ident() and self.states[0].device.type == "cpu":
                raise _second_thread(self.states[0])
        else:
            self.callback_queued, self.backward_thread = True, get_ident()
            self.states[0].note("backward")
            # Checked on torch 2.11.0, 2.13.0 and 2.15.0; there is no public way to run code after a backward.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)

    @outside_functorch
    def finish_backward(self) -> None:
        """Reduce the gradients that no hook has reduced, then wait for all reductions.

        These are units whose inputs needed no gradient, and gradients that were accumulated while sync was off and
        that no eager unit has reduced with its own. Every rank finds the same, since all ran the same program.
        """
        self._accumulate_compiled()
        if not self.looked:
            self.states[0].follow_tree().look()
        self.looked = False
        self._start_reductions()
        if self._ends_with_backward:
            self._finish_reductions()
        else:
            self._accumulate_on_host()
        for state in self.states:
            state.end_backward()
        if self.leaves_mirror_in_backward:
            self.leaves_mirror_in_backward = False
            self.mirror_leaves(False)
        self.callback_queued = False

    @without_grad
    def _accumulate_compiled(self) -> None:
        for state in self.states:
            if state.unit.has_compiled_gradients:
                for param in state.params:
                    param.accumulate_leaf_grad()

    def finalize(self) -> GradientReductionHandle:
        """Reduce what backwards have left; the handle's ``wait`` accumulates the gradients."""
        self._start_reductions()
        for state in self.states:
            if state.unit.config.reshard_after_backward:  # which pipelining sets between the last backward and this
                state.reshard()
        self.finalizing = GradientReductionHandle(self)
        return self.finalizing

    def finish_finalizing(self) -> None:
        """Accumulate the gradients whose reduction :meth:`finalize` has started."""
        self._finish_reductions()
        self.finalizing = None

    def _start_reductions(self) -> None:
        for state in reversed(self.states):
            if state.training_state is TrainingState.PRE_BACKWARD:
                state.post_backward()
            elif state.has_gradients:
                self.comm.start_reduce(state)

    def _finish_reductions(self) -> None:
        self.comm.finish_reduce()
        groups = [group for state in self.states for group in state.groups]
        for group in groups:
            group.launch_replica_reduce()
        for group in groups:
            group.wait_reduce()
        self._accumulate_on_host()
        self.post_forward_order.clear()

    def _accumulate_on_host(self) -> None:
        for state in self.states:
            for group in state.groups:
                group.wait_on_host()

    def reset(self, drop_accumulated: bool) -> None:
        """Return to the state between two steps after an exception; gradients accumulated without sync may stay."""
        self.is_resetting = True  # an exception may cut this off, too
        for state in (*self.comm.reducing, *self.states):
            for group in state.groups:
                group.drop_reduce()
        self.comm.reducing.clear()
        for state in self.states:
            state.reset(drop_accumulated)
        self.post_forward_order.clear()
        self.forward_order, self.ahead = ForwardOrder(), None
        self.mirror_leaves(False)
        self.callback_queued = self.leaves_mirror_in_backward = self.looked = False
        self.finalizing = None
        self.is_resetting = False

    def recover(self, begins_step: bool = False) -> None:
        """Reset what an exception has cut off, unless backward is under way; forward is not if this begins a step."""
        is_left = self.callback_queued or self.is_resetting  # a backward that died never calls back
        if begins_step:
            is_left |= any(state.training_state is not TrainingState.IDLE for state in self.states)
            is_left |= any(param.leaf.grad is not None for state in self.states for param in state.params)
        if is_left and not is_in_backward():
            self.reset(drop_accumulated=False)
