"""One unit's hooks, which decide when an uncompiled unit is all-gathered, resharded and reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..agreement.ledger import note, number_in
from ..collectives import Comm, Hook, streams
from ..expect import expect, unexpected
from ..param.param import FSDPParam
from ..param.placement import ParamPlacement
from ..policy import RESET_DROPS_GRADIENTS
from ..torch_fsdp.state_names import TorchNames
from ..tracing.dynamo import renew_compiled
from ..tracing.root_call import TracedCall
from ..tracing.sharded_module import rebase
from .backward import after_backward, before_backward, copy_own, hook
from .forward import PostForward, PreForward
from .group import FSDPParamGroup, group_params
from .held import begin_by_gradients, run_call
from .optimizers import watch_optimizers
from .root import FSDPStateContext, ModuleTree, check_all_sharded, check_materialized
from .step import TrainingState, UnitInStep, UnitState, is_in_backward


def states_below(modules: Sequence[nn.Module]) -> list[FSDPState]:
    """Return the states of ``modules`` and of all modules below them, outermost first."""
    found = {id(s): s for root in modules for m in root.modules() if (s := m.__dict__.get("_fsdp_state")) is not None}
    return list(found.values())


def states_of(model: nn.Module) -> list[FSDPState]:
    """Return the states below a user's ``model``; TypeError if it is no module, ValueError if it has no unit."""
    expect("model", model, nn.Module, "an nn.Module")
    states = states_below([model])
    if not states:
        got, do = "one without any unit", "call fully_shard on its layers, then on it"
        raise unexpected(type(model).__name__, "a sharded model", got, do)
    return states


class FSDPState(TorchNames):
    """The state of one unit: the modules of one ``fully_shard`` call."""

    run = staticmethod(run_call)  # a call of the outermost unit, see TracedCall
    begin_by_gradients = begin_by_gradients

    def __init__(
        self, modules: Sequence[nn.Module], params: Sequence[FSDPParam], default: ParamPlacement, unit: UnitInStep
    ) -> None:
        self.modules = tuple(modules)
        self.params = list(params)
        self.shared: list[tuple[FSDPState, FSDPParam]] = []  # parameters that other units have sharded
        self.ignored: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # names of parameters left alone
        self._mp_policy = policy = default.mp_policy
        self.unit = unit  # its configuration and phase, which the parameters see
        self.device = default.device  # where compute runs
        self.mesh, self.number = default.mesh_info.mesh, number_in(default.mesh_info.mesh)
        self.outermost = self  # until an outer fully_shard adopts this unit
        inputs_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.pre_forward = PreForward(self, self.device, inputs_dtype)
        self.post_forward = PostForward(self, policy.output_dtype)
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] | None = None  # None: the unit before in forward order
        self._context: FSDPStateContext | None = None
        self.max_reducing = 1
        self.custom: dict[type, Comm | Hook] = {}  # what the user has put in place of the unit's collectives
        unit.on_compiled_gradient = self._on_compiled_gradient
        self.regroup()
        watch_optimizers(self.params)
        for module in self.modules:
            module.register_forward_pre_hook(self.pre_forward.hook, with_kwargs=True)
            hooks = module._forward_pre_hooks
            for earlier in list(hooks)[:-1]:  # behind ours, also for torch 2.11's Dynamo, which overlooks ``prepend``
                hooks[earlier] = hooks.pop(earlier)
            module.register_forward_hook(self.post_forward.hook)

    # ---- configuration ----

    @property
    def is_root(self) -> bool:
        """Whether no outer ``fully_shard`` has adopted this unit."""
        return self.outermost is self

    @property
    def can_reshard(self) -> bool:
        """Whether that takes nothing from what runs: a call or backward whose hooks hold it, or another thread."""
        if self._context is None or not self._context.step.is_used_here:
            return False
        return not (self.unit.hooked and self.unit.config.has_hooks and self._context.step.is_running)

    def regroup(self) -> None:
        """Divide the parameters into groups anew, after dtypes, devices or sharing changed."""
        if self._context is not None and self._context.comm.reducing:
            self._context.complete_reductions()
        self._groups: list[FSDPParamGroup] = group_params(self.params, self.unit)
        if self._context is not None:
            self._context.tree.forget_params()

    @property
    def groups(self) -> list[FSDPParamGroup]:
        """The unit's parameters, and those of other units that it shares, by what shares a collective."""
        shared = [group for owner, param in self.shared for group in owner._groups if param in group.params]
        return [*self._groups, *shared]

    def share(self, owner: FSDPState, param: FSDPParam, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Let this unit's modules share a parameter that ``owner`` has sharded."""
        param.share(places, self.unit)
        owner.regroup()
        self.shared.append((owner, param))

    def adopt_units_below(self) -> None:
        """Give the units below their full names, if this is not their outermost one yet."""
        names: dict[nn.Module, str] = {}  # beginning with a number if the unit is of several modules
        for index, root in enumerate(self.modules):
            for name, module in root.named_modules(prefix=str(index) if len(self.modules) > 1 else ""):
                names.setdefault(module, name)
        new = [each for each in states_below(self.modules) if each is not self and each.outermost is not self]
        for module in (module for below in new for module in below.modules):
            rebase(module, drop=TracedCall)
        for module in names if new else ():
            renew_compiled(module)
        for below in new:
            below.pre_forward.device, below._context = None, None
            for param in below.params:
                module, attribute = param.places[0]
                param.name = f"{names[module]}.{attribute}"
            config, name = below.unit.config, f"{self.unit.config.name}.{names[below.modules[0]]}"
            reshard = config.reshards_by_default or config.reshard_after_forward
            below.unit.configure(name=name, reshard_after_forward=reshard)
            below.outermost = self  # at last: by it, an adoption that an exception cut off is taken up again

    def set_reduction(self, **changes: bool) -> None:
        """Change how far backward reduces gradients: ``reduce_grads``, ``all_reduce_grads``."""
        if self._context is not None:
            self._context.recover()
        self.unit.configure(**changes)

    # ---- unshard and reshard ----

    def launch_unshard(self) -> None:
        if self._context is None:
            self.adopt_replacements()
        for group in self.groups:
            group.launch_unshard()

    def wait_unshard(self) -> None:
        for group in self.groups:
            group.wait_unshard()

    def unshard(self) -> None:
        self.launch_unshard()
        self.wait_unshard()

    def drop_unshard(self) -> None:
        for group in self.groups:
            group.drop_unshard()

    def reshard(self) -> None:
        """Free the unsharded parameters; the hooks no longer hold them."""
        self.unit.release()
        for unit in (self.unit, self.outermost.unit):
            if not unit.config.has_hooks:  # within unsharded(): the next call all-gathers again
                unit.configure(has_hooks=True)
        for group in self.groups:
            group.reshard()

    # ---- forward ----

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter_forward(self, module: nn.Module, given: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """All-gather the unit; return the arguments so that the end of its backward calls :meth:`post_backward`."""
        self._begin_forward()
        if self.unit.is_recomputing:  # which torch may cut off before its end
            return args, kwargs
        is_watched = torch.is_grad_enabled() and not self.unit.is_nested and not self.unit.inputs
        got = after_backward(self, (args, kwargs)) if is_watched else (args, kwargs)
        self.unit.inputs.begin(module, given, got)
        return got

    @hook("pre_forward")
    def _begin_forward(self) -> None:
        """All-gather the unit before its module's forward."""
        context = self._lazy_init()
        self.unit.check_trains()
        context.step.enter_thread(context.all_states)
        context.recover()
        if self.unit.is_recomputing:
            self.unshard()
            return
        for param in self.params:
            param.check_untouched()
        self.unit.begin_forward(self.modules)
        if self.is_root and not context.step.in_backward:
            self.follow_tree().begin_forward()
        for group in self.groups:
            group.drop_stale()
        self.unshard()
        self.unit.hold(True)
        for state in self.forward_prefetch:
            state.launch_unshard()
        if not self.forward_prefetch and streams.streams_of(self.device) is not None:
            context.step.enter_forward(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watch_output(self, module: nn.Module, output: Any) -> Any:
        """End the module's forward; return its output so that its backward begins with :meth:`pre_backward`."""
        if self.unit.is_recomputing:
            return output
        if (added := self.unit.inputs.end(module)) and torch.is_grad_enabled():
            before_backward(self, added)
        if not self.unit.hooked and self.unit.training_state is not TrainingState.FORWARD:
            return output
        if not self.unit.is_nested:
            if self.unit.config.ends_forward_sharded:
                output = copy_own([param for each in self.groups for param in each.params], output)
            self._leave_forward(module)
        return before_backward(self, output) if torch.is_grad_enabled() else output

    @hook("post_forward")
    def _leave_forward(self, module: nn.Module) -> None:
        if self.unit.end_module(module):
            self._complete_forward()
        elif self.outermost.unit.training_state is not TrainingState.FORWARD:
            self.complete_list_unit()  # no outer forward is under way whose end could complete it
        if self.is_root and not self.unit.inputs:  # a root that calls itself goes on
            for state in self._lazy_init().all_states:
                state.complete_list_unit()
                state.unit.inputs.clear()  # to forwards that failed

    def _complete_forward(self) -> None:
        self.unit.end_forward()
        for group in self.groups:
            group.keep_changes()
        ends_sharded, has_grad = self.unit.config.ends_forward_sharded, torch.is_grad_enabled()
        if ends_sharded and not has_grad:
            self.reshard()
        elif ends_sharded:
            for group in self.groups:
                group.reshard_post_forward()
        if has_grad and self._context is not None:
            self._context.step.end_forward(self)

    def complete_list_unit(self) -> None:
        """End the forward of a list unit some of whose modules were not called in this step."""
        if self.unit.to_run and self.unit.training_state is TrainingState.FORWARD:
            self._complete_forward()

    # ---- backward ----

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @hook("pre_backward")
    def pre_backward(self) -> None:
        """All-gather the unit again when the first output gradient arrives."""
        context = self._lazy_init()
        if context.step.backward_has_died:  # this is one through another graph
            context.reset(drop_accumulated=False)
        context.begin_backward()
        context.step.call_in_backward(context.all_states)
        if self.unit.begin_backward():
            if self.unit.config.unshard_in_backward:
                self.unshard()
                self.unit.hold(True)
            ahead: Sequence[UnitState] | None = self.backward_prefetch
            for state in context.step.before(self) if ahead is None else ahead:
                if state.unit.config.unshard_in_backward and state not in context.step.left:
                    state.launch_unshard()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @hook("post_backward")
    def post_backward(self) -> None:
        """Start reducing the unit's gradients and free its unsharded parameters."""
        if self.unit.training_state is TrainingState.FORWARD:
            return  # a backward within its forward, which goes on, has reached its inputs
        if self.unit.training_state is TrainingState.IDLE:  # it returned an object, and no parameter has its gradient
            self._lazy_init().begin_backward()
        self.unit.end_backward()
        if self.unit.config.reshard_after_backward:
            self.reshard()
        self.unit.hold(False)
        self._lazy_init().start_reduce(self)

    def end_step(self) -> None:
        """Return to idle; an all-gather prefetched for a unit that backward did not reach is dropped."""
        config, is_compiled = self.unit.config, self.unit.has_compiled_gradients
        self.unit.end_step()
        if is_compiled and config.reduce_unused and config.reduce_grads:
            for param in self.params:
                param.gradients.accumulate_zeros()
        if is_compiled or config.reshard_after_backward:
            self.reshard()  # what an eager forward left is stale after the next optimizer step

    def _on_compiled_gradient(self) -> None:
        if not self.unit.has_compiled_gradients:
            self._lazy_init().begin_backward()
            self.unit.note_compiled_gradients()

    def reset(self, drop_accumulated: bool) -> None:
        """Forget what an interrupted step left."""
        for param in self.params:
            param.unsharded.drop_grad()
            param.gradients.leaf.grad = None
            if drop_accumulated:
                param.gradients.unsharded.take()
                param.gradients.partial.take()
                if RESET_DROPS_GRADIENTS:
                    param.sharded_param.grad = None
        self.unit.reset()
        if self.unit.config.trains:
            self.reshard()

    # ---- the root ----

    def _lazy_init(self) -> FSDPStateContext:
        """Return the context that all units below the outermost share; the first call makes it."""
        return self._context or self.outermost._collect(None)

    def follow_tree(self) -> FSDPStateContext:
        """Return the context of the outermost unit after looking whether modules below it were added or swapped."""
        context = self._lazy_init()
        return self._collect(context) if context.tree.has_changed else context

    def check_parameters(self) -> None:
        """Check that the user has put nothing in the parameters' place, nor added or swapped modules unnoticed."""
        context = self.follow_tree()
        context.step.enter_thread(context.all_states)
        context.tree.check_untouched()
        context.step.note_check()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter_thread(self) -> None:
        """Note that this thread calls the outermost unit; RuntimeError if another one is in forward or backward."""
        context = self._lazy_init()
        context.step.enter_thread(context.all_states)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin_call(self) -> None:
        """Prepare for a call of the outermost unit, which Dynamo may trace."""
        self.unit.check_trains()
        context = self._lazy_init()
        context.recover(begins_step=not context.step.in_call and not self.unit.is_nested)
        self.check_parameters()
        self.note("forward")
        self._lazy_init().begin_call()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end_call(self) -> None:
        context = self._lazy_init()
        context.step.call(context.all_states, False)
        note(self.mesh, "call", "")

    def note(self, what: str) -> None:
        """Note for other ranks which model the next collective is of."""
        note(self.mesh, "call", f", in {what} of {self.unit.config.name} (unit {self.number})")

    def _collect(self, context: FSDPStateContext | None) -> FSDPStateContext:
        """Let all units below share ``context``, or a new one; an error leaves them as they were."""
        states = states_below(self.modules)
        check_all_sharded(self.modules, [state.ignored for state in states])
        for state in states:
            state.adopt_replacements()
            check_materialized(state.params)
        self.adopt_units_below()
        tree = ModuleTree(self.modules, [param for state in states for param in state.params])
        if context is None:
            context = FSDPStateContext(states, tree)
        for left in set(context.all_states).difference(states):
            left.leave()
        context.all_states, context.tree = states, tree
        context.comm.max_reducing = max(state.max_reducing for state in states)
        for state in reversed(states):  # this one at last: while it has none, the next step collects again
            state._context = context
        return context

    def leave(self) -> None:
        """Be the outermost unit again, after the user has taken it out of a model."""
        self.outermost, self._context = self, None
        self.pre_forward.device = self.device

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else an error here would hide the one that led here
    def reset_iteration(self, drop_accumulated: bool) -> None:
        """Return all units to the state between two steps, after an exception in forward or backward."""
        if self._context is not None:
            self._context.reset(drop_accumulated)

    def adopt_replacements(self) -> None:
        """Follow what the user has put in place of parameters; RuntimeError if a compiled forward had others."""
        replaced = [param.name for param in self.params if param.adopt_replacement()]
        if replaced and is_in_backward():
            got = "one that the compiled forward has not seen"
            do = "assign it, or call the model once before it is compiled inside a function"
            raise unexpected(replaced[0], "a replacement by assignment, module.name = ...", got, do, RuntimeError)
        if replaced:
            self.drop_unshard()
            self.regroup()
