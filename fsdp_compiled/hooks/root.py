"""What the units of one model share: pending communication, the step's phase, and the tree of their modules."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from ..collectives.operators import meta_parameter
from ..expect import unexpected
from ..param.param import FSDPParam, Registered
from ..torch_fsdp.registry import applied
from ..tracing.sharded_module import is_managed
from .backward import outside_modes, without_grad
from .step import Step, TrainingState, UnitState


@dataclass(eq=False)
class FSDPCommContext:
    """Communication under way among the units of one model, or of several that share it."""

    max_reducing: int = 1  # units whose reductions may be under way at a time; each holds its gradients meanwhile
    reducing: deque[UnitState] = field(default_factory=deque)  # these units, the oldest first

    def start_reduce(self, state: UnitState) -> None:
        """Launch a unit's reductions, after finishing the oldest of too many before it."""
        self.finish_reduce(self.max_reducing - 1)
        for group in state.groups:
            group.launch_reduce()
        self.reducing.append(state)

    def finish_reduce(self, left: int = 0) -> None:
        """Wait for the oldest reductions and accumulate their gradients, until those of ``left`` units are left."""
        while len(self.reducing) > left:
            for group in self.reducing.popleft().groups:
                group.wait_reduce()


_TorchHandle: Any = getattr(torch_fsdp, "GradientReductionHandle", object)  # since torch 2.15


class GradientReductionHandle(_TorchHandle):
    """Waits for what ``FSDPModule.finalize_backward(async_op=True)`` has begun."""

    def __init__(self, context: FSDPStateContext) -> None:
        self._context: FSDPStateContext | None = context

    def wait(self) -> None:
        """Accumulate the gradients; a second call does nothing. RuntimeError if a reset has dropped them."""
        if (context := self._context) is None:
            return
        if context.step.finalizing is not self:
            self._context = None
            where, got = "GradientReductionHandle.wait", "one that a reset has dropped"
            raise unexpected(where, "a reduction under way", got, "run the step again", RuntimeError)
        context.finish_reductions(context.all_states)
        context.step.end_finalizing()
        self._context = None


@dataclass(eq=False)
class FSDPStateContext:
    all_states: Sequence[UnitState]  # the root's and all below it, outermost first; pipelining reads this name
    tree: ModuleTree  # that they were found in
    comm: FSDPCommContext = field(default_factory=FSDPCommContext)
    step: Step = field(default_factory=Step)
    is_last_backward: bool = True  # each backward waits for all reductions, or leaves them to a later one
    finalizes_manually: bool = False  # it leaves that to finalize in any case
    finished_by_groups: object | None = None  # the end of the backward after which a pipeline has finished the step
    post_optim_event: torch.Event | None = None  # what the root's next forward waits for before it all-gathers

    @property
    def ends_with_backward(self) -> bool:
        """Whether the next backward's end is the end of the step's."""
        return self.is_last_backward and not self.finalizes_manually

    def begin_call(self) -> None:
        """Begin a call of the outermost module; all-gather what was resharded within ``unsharded()`` before it."""
        for group in (group for state in self.all_states for group in state.groups):
            group.keep_changes()  # graphs read the shards
        self.step.call(self.all_states, True)
        for state in self.all_states:
            if not state.unit.config.trains:
                state.unshard()
                state.unit.hold(True)

    def begin_forward(self) -> None:
        """Begin the order of a forward, and wait for the optimizer's event if one was given."""
        self.step.begin_forward()
        self.step.drop_ahead()
        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None

    def begin_backward(self) -> None:
        """Begin the backward of a unit; the first of a backward has it end with :meth:`finish_backward`."""
        self.step.begin_backward(self.all_states[0], self.finish_backward)

    @outside_modes
    def finish_backward(self) -> None:
        """Reduce the gradients that no hook has reduced, then wait for all reductions.

        These are units whose inputs needed no gradient, and gradients that were accumulated while sync was off and
        that no eager unit has reduced with its own. Every rank finds the same, since all ran the same program.
        A backward within forward that has left no gradients, as one of inputs alone, leaves those where they are.
        """
        if not self.step.is_checked:
            self.all_states[0].check_parameters()
        ended = [state for state in self.all_states if not _goes_on(state)]
        has_left_any = bool(self.comm.reducing) or any(map(_has_new_gradients, self.all_states))
        reduces = has_left_any or not self._is_in_forward
        self._start_reductions(self.all_states, reduces)
        if reduces and self.ends_with_backward:
            self.finish_reductions(self.all_states)
        else:
            self._wait_on_host()
        self._accumulate_compiled()
        for state in ended:
            state.end_step()
        self.step.end_backward(self.all_states)

    @without_grad
    def _accumulate_compiled(self) -> None:
        for state in self.all_states:
            if state.unit.has_compiled_gradients:
                is_reduced = any(param.gradients.leaf.grad is not None for param in state.params)
                for param in state.params:
                    param.gradients.accumulate()
                state.unit.note_compiled_backward(is_reduced)

    def finalize(self) -> GradientReductionHandle:
        """Reduce what backwards have left; the handle's ``wait`` accumulates the gradients."""
        self._start_reductions(self.all_states)
        for state in self.all_states:
            if state.unit.config.reshard_after_backward:  # which pipelining sets between the last backward and this
                state.reshard()
        handle = GradientReductionHandle(self)
        self.step.begin_finalizing(handle)
        return handle

    @outside_modes
    def synchronize(self, states: Sequence[UnitState]) -> None:
        """Reduce what backwards have left unreduced in ``states``, whatever their settings of sync and all-reduce."""
        self.recover()
        settings = [(state, state.unit.config.reduce_grads, state.unit.config.all_reduce_grads) for state in states]
        try:
            for state in states:
                state.unit.configure(reduce_grads=True, all_reduce_grads=True)
            self._start_reductions(states)
            self.finish_reductions(states)
        finally:
            for state, reduce_grads, all_reduce_grads in settings:
                state.unit.configure(reduce_grads=reduce_grads, all_reduce_grads=all_reduce_grads)

    @property
    def _is_in_forward(self) -> bool:
        return self.all_states[0].unit.training_state is TrainingState.FORWARD

    def start_reduce(self, state: UnitState) -> None:
        """Launch the reductions of a unit whose backward has ended, even of sums alone, as other ranks do.

        But one within a forward, or that is differentiated itself, may be of inputs, and leaves sums to a later one.
        """
        is_inner = self._is_in_forward or torch.is_grad_enabled()
        if not is_inner or _has_new_gradients(state) or state.unit.config.reduce_unused:
            self.comm.start_reduce(state)

    def _start_reductions(self, states: Sequence[UnitState], reduces: bool = True) -> None:
        for state in reversed(states):
            if state.unit.is_recomputing:
                state.post_backward()
            if reduces and _has_gradients(state):
                self.comm.start_reduce(state)

    def _wait_on_host(self) -> None:
        for group in (group for state in self.all_states for group in state.groups):
            group.wait_on_host()

    @outside_modes
    def complete_reductions(self) -> None:
        """Accumulate gradients that are being reduced, or drop those of a step that an exception cut off."""
        self.recover()
        self.comm.finish_reduce()
        self._wait_on_host()

    def finish_reductions(self, states: Sequence[UnitState]) -> None:
        """Reduce over replicas what ``states`` have reduced over shards only, wait for all, accumulate gradients."""
        self.comm.finish_reduce()
        groups = [group for state in states for group in state.groups]
        for group in groups:
            group.launch_replica_reduce()
        for group in groups:
            group.wait_reduce()
        self._wait_on_host()
        self.step.end_reductions()

    @outside_modes
    def reset(self, drop_accumulated: bool) -> None:
        """Return to the state between two steps after an exception; gradients accumulated without sync may stay."""
        self.step.begin_reset()
        for state in self.all_states:
            for group in state.groups:
                group.drop_reduce()
                group.forget_changes()  # ranks may have got further than others
        others = [state for state in self.comm.reducing if state not in self.all_states]  # of models that share it
        self.comm.reducing = deque(others)
        for state in self.all_states:
            state.reset(drop_accumulated)
        self.step = Step()

    def recover(self, begins_step: bool = False) -> None:
        """Reset what an exception has cut off, unless backward is under way; forward is not if this begins a step."""
        if self.step.was_cut_off(self.all_states, begins_step):
            self.reset(drop_accumulated=False)


def _goes_on(state: UnitState) -> bool:
    """Tell whether a backward within a unit's forward has left it no gradients, as one that computes forces."""
    return state.unit.training_state is TrainingState.FORWARD and not _has_new_gradients(state)


def _has_new_gradients(state: UnitState) -> bool:
    """Tell whether the running backward has left the unit gradients that its hooks have not reduced."""
    is_eager = any(p.unsharded.grad is not None for group in state.groups for p in group.params)
    return is_eager or state.unit.has_compiled_gradients


def _has_gradients(state: UnitState) -> bool:
    """Tell whether gradients wait to be reduced, or zeros take part in their place."""
    unit, config = state.unit, state.unit.config
    is_unused = unit.training_state is TrainingState.IDLE and not unit.has_compiled_gradients
    takes_zeros = config.reduce_unused and is_unused
    return config.reduce_grads and (takes_zeros or any(group.has_gradients for group in state.groups))


class ModuleTree:
    """What lies below an outermost unit, to notice in every step whether the user has changed it since."""

    def __init__(self, roots: Sequence[nn.Module], params: Sequence[FSDPParam]) -> None:
        self._params = params
        self._registered: Registered | None = None
        below = (module for root in roots for module in root.modules())
        modules = {module: None for module in below if not isinstance(module, torch.jit.ScriptModule)}
        self._parents: list[dict[str, nn.Module | None]] = [m._modules for m in modules if m._modules]
        self._dicts: list[dict[str, Any]] = [d for m in modules for d in (m._modules, m._parameters)]
        self._expected = self._now()

    def _now(self) -> tuple[list[int], list[tuple[nn.Module | None, ...]]]:
        # Parameters themselves are swapped in every step.
        return list(map(len, self._dicts)), list(map(tuple, map(dict.values, self._parents)))

    @property
    def has_changed(self) -> bool:
        """Whether a module or a parameter was added, removed or, a module, swapped."""
        return self._now() != self._expected

    def forget_params(self) -> None:
        """Let go of parameters that may have been replaced, so that their memory is not kept until the next step."""
        self._registered = None

    def check_untouched(self) -> None:
        """Raise RuntimeError if a parameter was replaced past its module."""
        if self._registered is None or not self._registered.still():
            for param in self._params:
                param.check_untouched()
            self._registered = Registered(self._params)


def check_all_sharded(roots: Sequence[nn.Module], ignored: Iterable[Mapping[nn.Module, set[str]]]) -> None:
    """Raise ValueError if a trainable parameter below ``roots`` belongs to no unit and is not ``ignored``."""
    left = {(module, name) for each in ignored for module, names in each.items() for name in names}
    for prefix, module in modules_outside_replicate(roots):
        for name, param in module._parameters.items():
            if param is None or not param.requires_grad or is_managed(module, name) or (module, name) in left:
                continue
            where = f"{prefix.removesuffix('.')} ({type(module).__name__})" if prefix else type(module).__name__
            is_sharded = "_fsdp_units" in module.__dict__ or "_fsdp_state" in module.__dict__
            do = "add it before fully_shard" if is_sharded else f"call fully_shard on {where} first"
            got = "one that was added to the model afterwards and would train unsharded, without communication"
            expected = "a parameter that fully_shard has seen"
            raise unexpected(f"{prefix}{name}", expected, got, f"{do}, or freeze it")


def check_materialized(params: Iterable[FSDPParam]) -> None:
    """Raise RuntimeError if a parameter is on the meta device, or not on the CPU where it is offloaded."""
    for param in params:
        device = param.leaf.device
        if device.type == "meta":
            raise RuntimeError(meta_parameter(param.name))
        if param.placement.offload is not None and device.type != "cpu":
            expected, got = "a shard on the CPU, as offload_policy says", f"one on {device}"
            do = "load it there, or move the model with model.cpu()"
            raise unexpected(param.name, expected, got, do, RuntimeError)


def modules_outside_replicate(
    roots: Sequence[nn.Module], skipped: type | tuple[()] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name prefix, module), but for modules under ``replicate`` or of class ``skipped`` and all below them."""
    seen = set[nn.Module]()
    stack = [(f"{index}." if len(roots) > 1 else "", root) for index, root in reversed([*enumerate(roots)])]
    while stack:
        prefix, module = stack.pop()
        if module in seen or isinstance(module, skipped) or "replicate" in applied(module):
            continue
        seen.add(module)
        yield prefix, module
        stack += reversed([(f"{prefix}{name}.", child) for name, child in module.named_children()])
