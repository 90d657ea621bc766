"""One unit's hooks.

They decide when an uncompiled unit is all-gathered, resharded and reduced. While Dynamo traces, hooks only cast: the
reads of parameters bring the all-gathers into the graph. This file must not know how a collective is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..agreement import note, number_in
from ..collectives import Comm, Hook, streams
from ..expect import unexpected
from ..param.param import FSDPParam
from ..param.placement import ParamPlacement
from ..param.unit import Unit
from ..regions.block import without_failing_regions
from ..torch_fsdp.state_names import TorchNames
from .backward import after_backward, before_backward, hook
from .context import FSDPCommContext, FSDPStateContext, TrainingState, is_in_backward, states_below
from .forward import PostForward, PreForward
from .group import FSDPParamGroup, group_params
from .optimizers import watch_optimizers
from .tree import ModuleTree, adopt_units_below, check_all_sharded, check_materialized


class FSDPState(TorchNames[FSDPCommContext]):
    """The state of one unit: the modules of one ``fully_shard`` call."""

    pre_forward: PreForward
    post_forward: PostForward
    run = staticmethod(without_failing_regions)  # a call of the outermost unit, see TracedCall

    def __init__(
        self, modules: Sequence[nn.Module], params: Sequence[FSDPParam], default: ParamPlacement, unit: Unit
    ) -> None:
        self.modules = tuple(modules)
        self.params = list(params)
        self.shared: list[tuple[FSDPState, FSDPParam]] = []  # parameters that other units have sharded
        self.ignored: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # names of parameters left alone
        self.mp_policy = default.mp_policy
        self.unit = unit  # what the parameters read
        self.device = default.device  # where compute runs
        self.mesh, self.number = default.mesh_info.mesh, number_in(default.mesh_info.mesh)
        self.outermost = self  # until an outer fully_shard adopts this unit
        self.pre_forward, self.post_forward = PreForward(self, self.device), PostForward(self)
        self.training_state = TrainingState.IDLE
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] | None = None  # None: the unit before in forward order
        self._context: FSDPStateContext | None = None
        self._to_run: set[nn.Module] = set()  # modules of a list unit whose forward is still to come
        self.max_reducing = 1
        self.custom: dict[type, Comm | Hook] = {}  # what the user has put in place of the unit's collectives
        unit.on_compiled_gradient = self._on_compiled_gradient
        self.regroup()
        watch_optimizers(self.params)
        for module in self.modules:
            module.register_forward_pre_hook(self.pre_forward.hook, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward.hook)

    # ---- configuration ----

    @property
    def is_root(self) -> bool:
        """Whether no outer ``fully_shard`` has adopted this unit."""
        return self.outermost is self

    @property
    def is_used_elsewhere(self) -> bool:
        """Whether another thread called the model last."""
        return self._context is not None and self._context.thread not in (None, get_ident())

    def regroup(self) -> None:
        """Divide the parameters into groups anew, after dtypes, devices or sharing changed."""
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

    def adopt(self, outer: FSDPState, name: str, param_names: dict[FSDPParam, str]) -> None:
        """Take the names that an outer ``fully_shard`` gives; this unit is no root from now on."""
        self.pre_forward.device = None
        self._context = None
        for param, param_name in param_names.items():
            param.name = param_name
        reshard = self.unit.config.reshards_by_default or self.unit.config.reshard_after_forward
        self.configure(name=f"{outer.unit.config.name}.{name}", reshard_after_forward=reshard)
        self.outermost = outer  # at last: by it, an adoption that an exception cut off is taken up again

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """Reshard (True) or keep (False) after forward, whether or not this is the root."""
        self.configure(reshard_after_forward=reshard, reshards_by_default=False, post_forward_size=0)

    def configure(self, **changes: Any) -> None:
        """Replace fields of :class:`UnitConfig` and let parameters and traced reads see it."""
        self.unit.config = replace(self.unit.config, **changes)
        for param in self.params:
            param.refresh()

    def set_reduction(self, **changes: Any) -> None:
        """Change how far backward reduces gradients: ``reduce_grads``, ``all_reduce_grads``.

        Unlike :meth:`configure` it leaves the parameters' specs, which do not depend on this: users call it in every
        step.
        """
        if self._context is not None:
            self._context.recover()
        self.unit.config = replace(self.unit.config, **changes)
        for param in self.params:
            param.prepare_to_accumulate()

    def set_max_reducing(self, count: int) -> None:
        """Let reductions of ``count`` units be under way at a time."""
        self.max_reducing = count
        if self._context is not None:
            self._context.comm.max_reducing = max(state.max_reducing for state in self._context.states)

    def set_separate_reduce_group(self, enable: bool) -> None:
        """Give reduce-scatters process groups of their own, or take them away; every rank must call it."""
        for param in self.params:
            if param.placement.mesh_info.shard_mesh_dim is None:
                raise unexpected(param.name, "a sharded parameter", "one that is only replicated")
        for param in self.params:
            param.use_separate_reduce_scatter_group(enable)

    # ---- unshard and reshard ----

    def launch_unshard(self) -> None:
        """Start the unit's all-gathers."""
        if self._context is None:
            self.take_over()
        for group in self.groups:
            group.launch_unshard()

    def wait_unshard(self) -> None:
        """Finish them and register the unsharded parameters."""
        for group in self.groups:
            group.wait_unshard()

    def unshard(self) -> None:
        """All-gather the unit now."""
        self.launch_unshard()
        self.wait_unshard()

    def drop_unshard(self) -> None:
        """Drop all-gathers under way."""
        for group in self.groups:
            group.drop_unshard()

    def reshard(self) -> None:
        """Free the unsharded parameters; the hooks no longer hold them."""
        self._hold(False)
        for group in self.groups:
            group.reshard()

    def _hold(self, hooked: bool) -> None:
        """Note whether the hooks hold the unsharded parameters."""
        if self.unit.hooked is not hooked:
            self.unit.hooked = hooked
            for param in (*self.params, *(param for _, param in self.shared)):
                param.follow_hooks()

    # ---- forward ----

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @hook("pre_forward")
    def enter_forward(self, module: nn.Module) -> None:
        """All-gather the unit before its module's forward."""
        context = self._lazy_init()
        context.enter_thread()
        context.recover()
        if self.training_state is TrainingState.PRE_BACKWARD:
            self.unshard()
            return
        for param in self.params:
            param.check_untouched()
        if not self._to_run:
            self._to_run = set(self.modules)
            self.training_state = TrainingState.FORWARD
        if self.is_root and not context.callback_queued:
            self.follow_tree().begin_forward()
        self.unshard()
        self._hold(True)
        for state in self.forward_prefetch:
            state.launch_unshard()
        if not self.forward_prefetch and streams.streams_of(self.device) is not None:
            context.enter_forward(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments so that the unit hears of the end of its backward."""
        if not torch.is_grad_enabled() or self.training_state is TrainingState.PRE_BACKWARD:
            return args, kwargs
        watched: tuple[Any, Any] = after_backward(self, (args, kwargs))
        return watched

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watch_output(self, module: nn.Module, output: Any) -> Any:
        """End the module's forward; return its output so that the unit hears of the beginning of its backward."""
        if self.training_state is TrainingState.PRE_BACKWARD or not self.unit.hooked:
            return output
        self._leave_forward(module)
        return before_backward(self, output) if torch.is_grad_enabled() else output

    @hook("post_forward")
    def _leave_forward(self, module: nn.Module) -> None:
        self._to_run.discard(module)
        if not self._to_run:
            self._complete_forward()
        elif self.outermost.training_state is not TrainingState.FORWARD:
            self.complete_list_unit()  # no outer forward is under way whose end could complete it
        if self.is_root:
            for state in self._lazy_init().states:
                state.complete_list_unit()

    def _complete_forward(self) -> None:
        self._hold(False)
        self.training_state = TrainingState.IDLE
        # Without a backward to come, an unsharded root would hold stale values after the next optimizer step, and an
        # optimizer that is made next would see unsharded parameters.
        config = self.unit.config
        if not torch.is_grad_enabled() and (config.reshards_by_default or config.reshard_after_forward):
            self.reshard()
        elif config.reshard_after_forward:
            for group in self.groups:
                group.reshard_post_forward()
        if torch.is_grad_enabled() and self._context is not None:
            self._context.post_forward_order.append(self)

    def complete_list_unit(self) -> None:
        """End the forward of a list unit some of whose modules were not called in this step."""
        if self._to_run and self.training_state is TrainingState.FORWARD:
            self._to_run.clear()
            self._complete_forward()

    # ---- backward ----

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @hook("pre_backward")
    def pre_backward(self) -> None:
        """All-gather the unit again when the first output gradient arrives."""
        context = self._lazy_init()
        context.queue_finish()
        if not context.leaves_mirror:  # a recomputation of compiled code must find the leaves as forward did
            context.mirror_leaves(True)
            context.leaves_mirror_in_backward = True
        if self.training_state is not TrainingState.PRE_BACKWARD:
            self.training_state = TrainingState.PRE_BACKWARD
            if self.unit.config.unshard_in_backward:
                self.unshard()
                self._hold(True)
            self._prefetch_backward(context)

    def _prefetch_backward(self, context: FSDPStateContext) -> None:
        for state in context.before(self) if self.backward_prefetch is None else self.backward_prefetch:
            if state.unit.config.unshard_in_backward:
                state.launch_unshard()

    @hook("post_backward")
    def post_backward(self) -> None:
        """Start reducing the unit's gradients and free its unsharded parameters."""
        self.training_state = TrainingState.POST_BACKWARD
        if self.unit.config.reshard_after_backward:
            self.reshard()
        self._hold(False)
        self._lazy_init().comm.start_reduce(self)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait to be reduced, or zeros take part in their place."""
        if not self.unit.config.reduce_grads:
            return False
        is_idle = self.training_state is TrainingState.IDLE
        if is_idle and self.unit.config.reduce_unused and not self.unit.has_compiled_gradients:
            return True
        return any(group.has_gradients for group in self.groups)

    def end_backward(self) -> None:
        """Return to idle; an all-gather prefetched for a unit that backward did not reach is dropped."""
        self.training_state = TrainingState.IDLE
        self._to_run.clear()
        if self.unit.has_compiled_gradients and self.unit.config.reduce_unused and self.unit.config.reduce_grads:
            for param in self.params:
                param.accumulate_zeros()
        if self.unit.config.reshard_after_backward or self.unit.has_compiled_gradients:
            self.reshard()  # what an eager forward left is stale after the next optimizer step
        self.unit.has_compiled_gradients = False

    def _on_compiled_gradient(self) -> None:
        self._lazy_init().queue_finish()

    def reset(self, drop_accumulated: bool) -> None:
        """Forget what an interrupted step left."""
        for param in self.params:
            param.take_eager_grad()
            param.leaf.grad = None
            if drop_accumulated:
                param.unsharded_grad.take()
                param.partial_grad.take()
        self._hold(not self.unit.hooked)  # so that no parameter is left out
        self.reshard()
        self.training_state = TrainingState.IDLE
        self._to_run.clear()
        self.unit.has_compiled_gradients = False

    # ---- the root ----

    def _lazy_init(self) -> FSDPStateContext:
        """Return the context that all units below the outermost share; the first call makes it."""
        return self._context or self.outermost._collect(FSDPStateContext([]))

    def follow_tree(self) -> FSDPStateContext:
        """Return the context of the outermost unit after looking whether modules below it were added or swapped."""
        context = self._lazy_init()
        return self._collect(context) if context.tree.has_changed else context

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin_call(self) -> None:
        """Prepare for a call of the outermost unit, which Dynamo may trace."""
        context = self._lazy_init()
        context.enter_thread()
        context.recover(begins_step=not context.leaves_mirror)
        context = self.follow_tree()
        context.look()
        context.mirror_leaves(True)
        self.note("forward")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end_call(self) -> None:
        """Undo that."""
        self._lazy_init().mirror_leaves(False)
        note(self.mesh, "call", "")

    def note(self, what: str) -> None:
        """Note for other ranks which model the next collective is of."""
        note(self.mesh, "call", f", in {what} of {self.unit.config.name} (unit {self.number})")

    def _collect(self, context: FSDPStateContext) -> FSDPStateContext:
        """Let all units below share ``context``; an error leaves them as they were."""
        states: list[FSDPState] = states_below(self.modules)
        check_all_sharded(self.modules, states)
        for state in states:
            state.take_over()
            check_materialized(state.params)
        adopt_units_below(self)
        for left in set(context.states).difference(states):
            left.outermost, left._context = left, None
            left.pre_forward.device = left.device
        context.states = states
        context.tree = ModuleTree(self.modules, [param for state in states for param in state.params])
        context.comm.max_reducing = max(state.max_reducing for state in states)
        for state in reversed(states):  # this one at last: while it has none, the next step collects again
            state._context = context
        return context

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else an error here would hide the one that led here
    def reset_iteration(self, drop_accumulated: bool) -> None:
        """Return all units to the state between two steps, after an exception in forward or backward."""
        if self._context is not None:
            self._context.reset(drop_accumulated)

    def take_over(self) -> None:
        """Follow what the user has put in place of parameters; RuntimeError if a compiled forward had others."""
        replaced = [param.name for param in self.params if param.take_over()]
        if replaced and is_in_backward():
            got = "one that the compiled forward has not seen"
            do = "assign it, or call the model once before it is compiled inside a function"
            raise unexpected(replaced[0], "a replacement by assignment, module.name = ...", got, do, RuntimeError)
        if replaced:
            self.drop_unshard()
            self.regroup()
