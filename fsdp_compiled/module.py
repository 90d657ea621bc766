"""FSDPModule: what a user can ask of a sharded module. It checks arguments, finds the states and calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from .collectives import AllGather, ReduceScatter
from .expect import expect, expect_bool, shown, unexpected
from .hooks import custom_comms
from .hooks.copying import copied_units
from .hooks.root import FSDPStateContext, GradientReductionHandle
from .hooks.state import FSDPState, states_below
from .hooks.step import is_in_backward
from .hooks.unreduced import Unreduced, unreduced_gradients, zero_gradients
from .regions.block import COMPILED_IN_PLACE
from .regions.choose import set_default_regions
from .tracing.dynamo import with_code_of_its_own
from .tracing.sharded_module import MixinOrder, new_of_user_class


def unit_state(module: Any) -> FSDPState:
    """Return the state of the unit that ``module`` was given to ``fully_shard`` for; ValueError if to none."""
    expect("module", module, nn.Module, "a module given to fully_shard")
    state = module.__dict__.get("_fsdp_state")
    if state is None:
        raise unexpected(type(module).__name__, "a module given to fully_shard", "one without state")
    return state


class UnshardHandle(torch_fsdp.UnshardHandle):
    """Waits for an asynchronous :meth:`FSDPModule.unshard`."""

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState | None = state

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self) -> None:
        """Register the unsharded parameters once they are all-gathered; a second call does nothing."""
        if self._state is not None:
            self._state.wait_unshard()
            self._state = None


class FSDPModule(torch_fsdp.FSDPModule):
    """Mixin of every module given to ``fully_shard``; it comes first in the module's bases.

    Libraries know a sharded module by ``isinstance(module, torch.distributed.fsdp.FSDPModule)``, so this is a
    subclass of that. It overrides all of its methods: nothing of PyTorch's implementation runs.

    Every method raises TypeError for an argument of the wrong type, and ValueError for a number out of range or a
    module that ``fully_shard`` was not applied to. A setter with ``recurse`` configures the units below as well.
    Methods for the outermost unit raise RuntimeError on another.
    """

    _fsdp_order = MixinOrder.METHODS
    # Dynamo refuses a module that Transformers has marked as managed by FSDP without this, which FSDP2 sets, too.
    _fsdp_use_orig_params = True

    __new__ = new_of_user_class
    __deepcopy__ = copied_units

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return super(torch_fsdp.FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile this module in place, as ``nn.Module.compile`` does, with what ``torch.compile`` takes.

        The graph of an outermost unit has its collectives inside. Calls of any other unit from uncompiled code
        keep their hooks outside the graph, unless it is one of PyTorch's own modules, such as ``nn.Linear``, and
        Dynamo (2.15) begins before the hooks.
        """
        if not unit_state(self).is_root:
            super().compile(*args, **kwargs)  # type: ignore[misc]
            return
        # Dynamo begins at the first frame outside torch's own module code, so this one brings the hooks in.
        call = with_code_of_its_own(lambda module, args, kwargs: module._call_impl(*args, **kwargs))
        compiled = torch.compile(call, *args, **kwargs)
        set_default_regions(self)  # type: ignore[arg-type]  # a mixin of modules
        self.__dict__[COMPILED_IN_PLACE] = (call.__code__,)
        self._compiled_call_impl = lambda *args, **kwargs: compiled(self, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's unit (not the units below it); with ``async_op`` return a handle at once.

        Forward waits by itself if the handle was not waited for. That of a compiled model all-gathers it again if it
        reshards it; else it has no communication for it, and the end of backward reduces.
        """
        expect_bool("async_op", async_op)
        state = unit_state(self)
        state.launch_unshard()
        state.unit.keep()
        if async_op:
            return UnshardHandle(state)
        state.wait_unshard()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and register the sharded ones."""
        unit_state(self).reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in backward (True), or accumulate them unsharded in ``reduce_dtype`` (False).

        The next backward that ends with sync on reduces what was accumulated, whichever units it reaches itself.
        A compiled model has one graph for each setting; the setting at its forward chooses. After two backwards
        without sync, or if sync was ever set off between a forward and its backward, the end of backward reduces.
        """
        for state in _states(self, recurse, requires_gradient_sync=requires_gradient_sync):
            state.set_reduction(reduce_grads=requires_gradient_sync, all_reduce_grads=requires_gradient_sync)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free (True) or keep (False) unsharded parameters after forward; a change recompiles a compiled model."""
        states = _states(self, recurse, reshard_after_forward=reshard_after_forward)
        if not all(state.unit.config.trains for state in states):
            expected, got = "a model outside unsharded()", "one inside, whose end would undo it"
            raise unexpected("set_reshard_after_forward", expected, got, "call it outside the block", RuntimeError)
        for state in states:
            state.unit.configure(
                reshard_after_forward=reshard_after_forward, reshards_by_default=False, post_forward_size=0
            )

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free (True) or keep (False) unsharded parameters after backward; compiled if forward keeps them, too."""
        for state in _states(self, recurse, reshard_after_backward=reshard_after_backward):
            state.unit.configure(reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep an uncompiled unit's unsharded memory allocated after a reshard (True), at the same addresses."""
        for state in _states(self, recurse, keep=keep):
            state.unit.configure(keep_unsharded_storage=keep)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:  # type: ignore[override]
        """Start all-gathering these modules' units in this one's pre-forward hook; graphs are not affected."""
        unit_state(self).forward_prefetch = _states_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:  # type: ignore[override]
        """Start all-gathering these modules' units when this one's backward begins; graphs are not affected.

        The default is the unit before this one in forward order; an empty list turns prefetch off.
        """
        unit_state(self).backward_prefetch = _states_of("set_modules_to_backward_prefetch", modules)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce gradients over replicas too (True), or over the shard group only and accumulate that (False).

        For hybrid sharding with several micro-batches. The next backward with all-reduce on reduces what was
        accumulated, in ``reduce_dtype``, whichever units it reaches itself.
        """
        for state in _states(self, recurse, requires_all_reduce=requires_all_reduce):
            state.set_reduction(all_reduce_grads=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward ends the step; if not, it does not wait for its last reductions."""
        expect_bool("is_last_backward", is_last_backward)
        unit_state(self)._lazy_init().is_last_backward = is_last_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """All-gather this unit in an uncompiled backward (True), or not, as its backward reads no parameter (False).

        An embedding is such a unit. Compiled graphs all-gather only what they read and need no such hint.
        """
        expect_bool("unshard_in_backward", unshard_in_backward)
        unit_state(self).unit.configure(unshard_in_backward=unshard_in_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor``, a positive number, rather than by the number of ranks.

        A compiled model recompiles at its next call.
        """
        expect("factor", factor, int | float, "a number")
        if not 0 < factor < inf:
            raise unexpected("factor", "a positive, finite number", factor, "gradients are divided by it")
        unit_state(self).unit.configure(divide_factor=float(factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # the older name

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let this unit's gradients be summed by the collectives and divided by a kernel of its own."""
        expect_bool("enable", enable)
        unit_state(self).unit.configure(sum_only=enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Let trainable parameters that a backward does not reach get gradients of zeros (True) or none (False).

        With it, ranks that use different parameters in a step still make the same uncompiled reductions.
        """
        for state in _states(self, recurse, reduce_scatter_unused_params=reduce_scatter_unused_params):
            state.unit.configure(reduce_unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Allow reductions of at most this many units at once in an uncompiled backward; the default is 1.

        The largest number set on any unit of the model counts.
        """
        expect("max_input_buffers", max_input_buffers, int, "an int")
        if max_input_buffers < 1:
            raise unexpected("max_input_buffers", "at least 1", max_input_buffers)
        for state in _states(self, recurse):
            state.max_reducing = max_input_buffers
            if (context := state._context) is not None:
                context.comm.max_reducing = max(each.max_reducing for each in context.all_states)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give reduce-scatters a process group of their own, or take it away; call it on every rank.

        All-gathers and reduce-scatters of one NCCL communicator run one after the other. It raises ValueError where
        parameters are only replicated.
        """
        states = _states(self, recurse, enable=enable)
        for param in (param for state in states for param in state.params):
            if param.placement.mesh_info.shard_mesh_dim is None:
                raise unexpected(param.name, "a sharded parameter", "one that is only replicated")
        for state in states:
            state.unit.configure(separate_reduce_group=enable)

    def set_custom_all_gather(self, comm: AllGather) -> None:  # type: ignore[override]
        """All-gather by ``comm``, in graphs too: 1-D tensors, in order of rank; it returns work, or None if done."""
        custom_comms.use(unit_state(self), AllGather, comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:  # type: ignore[override]
        """Reduce over shards by ``comm``, in graphs too: 1-D tensors to each rank's part; it returns work or None."""
        custom_comms.use(unit_state(self), ReduceScatter, comm)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call ``hook`` on each flat buffer of this unit's reduced gradients, not divided yet, which it may change.

        It runs on ``stream``, by default the one that the reduction ends on, after the reduce-scatter and after the
        all-reduce over replicas if there are any. In compiled graphs a buffer may hold one parameter's gradient.
        """
        expect("hook", hook, Callable, "a function")
        if stream is not None and not hasattr(stream, "wait_stream"):
            raise unexpected("stream", "a torch.Stream or None", shown(stream), error=TypeError)
        custom_comms.use_hook(unit_state(self), hook, stream)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take this unit's buffers of all-gathers and reduce-scatters from the process group (True), or PyTorch.

        NCCL can then register them with the network. In graphs they are the outputs of opaque nodes.

        Raises:
            ValueError: the unit has communicators of its own.
            RuntimeError: the process group allocates no memory, as gloo.
        """
        expect_bool("enable", enable)
        custom_comms.use_process_group_memory(unit_state(self), enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """All-gather this unit's parameters through symmetric memory; units that do so share buffers.

        With ``backend`` "NCCL", NCCL all-gathers, by the copy engines if the process group's ``config.cta_policy``
        is zero; with "CUDA" each rank writes to the others by its own copy engines.

        Raises:
            ValueError: another backend, or the unit has communicators of its own.
            RuntimeError: no GPU.
        """
        if backend not in ("NCCL", "CUDA"):
            raise unexpected("backend", "'NCCL' or 'CUDA'", repr(backend))
        custom_comms.use_symmetric_memory(unit_state(self), backend)

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Let the root's next uncompiled forward wait for ``event`` before it all-gathers; None: for nothing.

        A CPU's streams record None, as nothing there is left to wait for.
        """
        if event is not None and not hasattr(event, "wait"):
            raise unexpected("event", "a torch.Event or None", shown(event), error=TypeError)
        unit_state(self)._lazy_init().post_optim_event = event

    def reset_iter_state(self) -> None:
        """Return to the state between two steps after an exception in forward or backward.

        Gradients in reduction and those accumulated without sync are dropped, and so is ``.grad``, as by the
        installed torch's FSDP2, since 2.15: a backward cut off has left it to some parameters only. An exception that
        leaves the uncompiled model's forward, or an uncompiled backward, does the same by itself, but keeps ``.grad``
        and what was accumulated without sync. Call it on the outermost unit.
        """
        _outermost("reset_iter_state", self).reset_iteration(drop_accumulated=True)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Leave the end of gradient reduction to :meth:`finalize_backward` (True) rather than to each backward.

        It takes the place of ``set_is_last_backward``. Call it on the outermost unit and outside backward, or it
        raises RuntimeError.
        """
        expect_bool("enabled", enabled)
        state = _outermost("set_manual_backward_finalization", self)
        if is_in_backward():
            raise RuntimeError("set_manual_backward_finalization: expected no backward under way; call it before")
        state._lazy_init().finalizes_manually = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the reduction of the gradients that backwards have left, with sync or, if it is on now, without.

        Call it on the outermost unit. With ``async_op`` it returns a handle at once, whose ``wait`` must come before
        the gradients are used.

        Raises:
            RuntimeError: a backward is running, ``set_manual_backward_finalization(True)`` was not called before, or
                the last handle was not waited for.
        """
        expect_bool("async_op", async_op)
        context = _outermost("finalize_backward", self)._lazy_init()
        if not context.finalizes_manually:
            raise RuntimeError("finalize_backward: call set_manual_backward_finalization(True) before forward")
        _check_between_backwards("finalize_backward", context)
        handle = context.finalize()
        if not async_op:
            handle.wait()
        return handle if async_op else None

    def synchronize_gradients(self) -> None:
        """Reduce the gradients that backwards have left unreduced in this module's units and those below, if any.

        They are those without sync, or over the shard group only; sync and all-reduce need not be on. It returns
        once they are in ``.grad``. Every rank has to call it.

        Raises:
            RuntimeError: a backward is running, or the handle of a finalization was not waited for.
        """
        context = unit_state(self)._lazy_init()
        _check_between_backwards("synchronize_gradients", context)
        context.synchronize(_states(self, recurse=True))

    def get_pending_gradients(self) -> dict[nn.Parameter, Unreduced]:
        """Return the gradients below this module that are not reduced yet, by sharded parameter.

        Each has two, of the dtype of the reduction: the sum of those without sync, unsharded (as the parameter is in
        compute: a DTensor under other parallelism, else a plain tensor), and the sum of those reduced over the shard
        group only, this rank's shard. None where there is no such sum. They are the tensors that a later reduction
        takes: a change in place counts.
        """
        return unreduced_gradients(self)  # type: ignore[arg-type]  # a mixin of modules

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients as ``nn.Module.zero_grad`` does, also those that are not reduced yet.

        An optimizer's ``zero_grad`` knows nothing of the latter, nor does that of a module around this one, such as
        the module that ``torch.compile`` returns.
        """
        super(torch_fsdp.FSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]
        zero_gradients(self, set_to_none)  # type: ignore[arg-type]

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept what FSDP2's users set: all-gathers here are always asynchronous operations."""
        expect_bool("async_op", async_op)

    _get_fsdp_state = unit_state  # type: ignore[assignment]


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several models share one bound on their running communication; for pipeline stages of one rank.

    Raises:
        TypeError: not a list.
        ValueError: ``fully_shard`` was not applied to one of them.
    """
    states = _states_of("share_comm_ctx", modules)
    for state in states[1:]:
        state._lazy_init().comm = states[0]._lazy_init().comm


def _outermost(method: str, module: FSDPModule) -> FSDPState:
    state = unit_state(module)
    if not state.is_root:
        do = f"call it on {state.outermost.unit.config.name}"
        raise unexpected(method, "the outermost unit", state.unit.config.name, do, RuntimeError)
    return state


def _check_between_backwards(method: str, context: FSDPStateContext) -> None:
    if is_in_backward():
        raise RuntimeError(f"{method}: expected no backward under way; call it afterwards")
    if context.step.finalizing is not None:
        raise RuntimeError(
            f"{method}: wait for the handle of the last finalization first; if an exception came instead of it, call "
            "reset_iter_state()"
        )


def _states(module: FSDPModule, recurse: bool, **flags: object) -> list[FSDPState]:
    """Return the states that a setter configures, once its ``flags`` are known to be bools."""
    for name, value in {**flags, "recurse": recurse}.items():
        expect_bool(name, value)
    return states_below([module]) if recurse else [unit_state(module)]  # type: ignore[list-item]


def _states_of(method: str, modules: Sequence[FSDPModule]) -> list[FSDPState]:
    expect(method, modules, list | tuple, "a list of modules")
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise unexpected(method, "modules given to fully_shard", type(module).__name__, "shard it first")
    return [unit_state(module) for module in modules]
