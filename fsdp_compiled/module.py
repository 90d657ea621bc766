"""FSDPModule: what a user can ask of a sharded module. It only finds the states and tells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .collectives import AllGather, Hook, ReduceScatter
from .hooks.context import GradientReductionHandle, is_in_backward, states_below
from .hooks.lookup import unit_state
from .hooks.state import FSDPState
from .param.properties import with_code_of_its_own
from .policy import require_bool


class UnshardHandle:
    """Waits for an asynchronous :meth:`FSDPModule.unshard`."""

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState | None = state

    def wait(self) -> None:
        """Register the unsharded parameters once they are gathered; a second call does nothing."""
        if self._state is not None:
            self._state.wait_unshard()
            self._state = None


class FSDPModule:
    """Mixin of every module given to ``fully_shard``; it comes first in the module's bases."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Code such as nn.Sequential.__getitem__ makes type(self)(...): that is a plain module again.
        user_cls = cls._fsdp_user_class  # type: ignore[attr-defined]
        made = user_cls.__new__(user_cls)
        made.__init__(*args, **kwargs)
        return made

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile this module in place, as ``nn.Module.compile`` does.

        The graph of an outermost unit has its collectives inside. Calls of any other unit from uncompiled code
        keep their hooks outside the graph, unless it is one of PyTorch's own modules, such as ``nn.Linear``, and
        Dynamo (2.15) begins before the hooks.

        Args:
            args: given to ``torch.compile``, as are ``kwargs``.
        """
        if not unit_state(self).is_root:
            super().compile(*args, **kwargs)  # type: ignore[misc]
            return
        # Dynamo begins at the first frame outside torch's own module code, so this one brings the hooks in.
        whole = torch.compile(with_code_of_its_own(_call), *args, **kwargs)
        self._compiled_call_impl = lambda *args, **kwargs: whole(self, args, kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's unit (not the units below it).

        Args:
            async_op: return a handle at once; forward waits by itself if the handle was not waited for.

        Raises:
            TypeError: ``async_op`` is no bool.
        """
        require_bool("async_op", async_op)
        state = unit_state(self)
        state.launch_unshard()
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
        A compiled model has a graph for either setting; it takes the one that is set when its forward runs.

        Raises:
            TypeError: not a bool.
        """
        require_bool("requires_gradient_sync", requires_gradient_sync)
        for state in _states(self, recurse):
            state.set_reduction(reduce_grads=requires_gradient_sync, all_reduce_grads=requires_gradient_sync)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free (True) or keep (False) unsharded parameters between forward and backward.

        A compiled model recompiles at its next call if that changes anything.

        Raises:
            TypeError: not a bool.
        """
        require_bool("reshard_after_forward", reshard_after_forward)
        for state in _states(self, recurse):
            state.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free (True) or keep (False) unsharded parameters after an uncompiled backward.

        Raises:
            TypeError: not a bool.
        """
        require_bool("reshard_after_backward", reshard_after_backward)
        for state in _states(self, recurse):
            state.configure(reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Leave the unsharded parameters' memory allocated after a reshard (True), at the same addresses.

        Only uncompiled units have such memory; a graph's belongs to the graph.

        Raises:
            TypeError: not a bool.
        """
        require_bool("keep", keep)
        for state in _states(self, recurse):
            state.configure(keep_unsharded_storage=keep)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Start gathering these modules' units in this one's pre-forward hook. Graphs are not affected.

        Raises:
            TypeError: not a list.
            ValueError: one of them was not given to ``fully_shard``.
        """
        unit_state(self).forward_prefetch = _states_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Start gathering these modules' units when this one's backward begins. Graphs are not affected.

        The default is the unit before this one in forward order; an empty list turns prefetch off.

        Raises:
            TypeError: not a list.
            ValueError: one of them was not given to ``fully_shard``.
        """
        unit_state(self).backward_prefetch = _states_of("set_modules_to_backward_prefetch", modules)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce gradients over replicas too (True), or over the shard group only and accumulate that (False).

        For hybrid sharding with several micro-batches. The next backward with all-reduce on reduces what was
        accumulated, in ``reduce_dtype``, whichever units it reaches itself.

        Raises:
            TypeError: not a bool.
        """
        require_bool("requires_all_reduce", requires_all_reduce)
        for state in _states(self, recurse):
            state.set_reduction(all_reduce_grads=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward ends the step; if not, it does not wait for its last reductions.

        Raises:
            TypeError: not a bool.
        """
        require_bool("is_last_backward", is_last_backward)
        unit_state(self)._lazy_init().is_last_backward = is_last_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Gather this unit in an uncompiled backward (True), or not, since its backward reads no parameter (False).

        An embedding is such a unit. Compiled graphs gather only what they read and need no such hint.

        Raises:
            TypeError: not a bool.
        """
        require_bool("unshard_in_backward", unshard_in_backward)
        unit_state(self).configure(unshard_in_backward=unshard_in_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` rather than by the number of ranks.

        A compiled model recompiles at its next call.

        Raises:
            TypeError: not a number.
            ValueError: not positive.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise TypeError(f"factor: expected a number, got {factor!r} of {type(factor).__name__}")
        if not factor > 0:
            raise ValueError(f"factor: expected a positive number, got {factor}; gradients are divided by it")
        unit_state(self).configure(divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what :meth:`set_gradient_divide_factor` does, under its older name."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let this unit's gradients be summed by the collectives and divided by a kernel of its own.

        Raises:
            TypeError: not a bool.
        """
        require_bool("enable", enable)
        unit_state(self).configure(sum_only=enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Let trainable parameters that a backward does not reach get gradients of zeros (True) or none (False).

        With it, ranks that use different parameters in a step still make the same uncompiled reductions.

        Raises:
            TypeError: not a bool.
        """
        require_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for state in _states(self, recurse):
            state.configure(reduce_unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Let reductions of so many units be under way at a time in an uncompiled backward; the default is 1.

        The largest number that any unit of the model was given holds.

        Raises:
            TypeError: not an int.
            ValueError: less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers: expected an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers: expected at least 1, got {max_input_buffers}")
        for state in _states(self, recurse):
            state.set_max_reducing(max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give reduce-scatters a process group of their own, or take it away; call it on every rank.

        All-gathers and reduce-scatters of one NCCL communicator run one after the other.

        Raises:
            TypeError: not a bool.
            ValueError: parameters are only replicated.
        """
        require_bool("enable", enable)
        for state in _states(self, recurse):
            state.set_separate_reduce_group(enable)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit's parameters by ``comm``, in graphs too, where it is an opaque node.

        Raises:
            TypeError: not an AllGather.
        """
        unit_state(self).custom.set_all_gather(_checked("comm", comm, AllGather))

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this unit's gradients over shards by ``comm``, in graphs too, where it is an opaque node.

        Raises:
            TypeError: not a ReduceScatter.
        """
        unit_state(self).custom.set_reduce_scatter(_checked("comm", comm, ReduceScatter))

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call ``hook`` on each reduced, flat, not yet divided gradient row of this unit, which it may change.

        It runs after the reduce-scatter, and after the all-reduce over replicas if there are any. A compiled graph
        may put several parameters of the unit in one row, or one.

        Args:
            hook: the function.
            stream: of the accelerator, for the hook to run on; None for the one that the reduction ends on.

        Raises:
            TypeError: not callable, or not a stream.
        """
        if not callable(hook):
            raise TypeError(f"hook: expected a function, got {hook!r}")
        if stream is not None and not hasattr(stream, "wait_stream"):
            raise TypeError(f"stream: expected a torch.Stream or None, got {stream!r} of {type(stream).__name__}")
        unit_state(self).custom.set_reduce_hook(Hook(hook, stream))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take this unit's buffers of all-gathers and reduce-scatters from the process group (True), or PyTorch.

        NCCL can then register them with the network. In graphs they are the outputs of opaque nodes.

        Raises:
            TypeError: not a bool.
            ValueError: the unit has communicators of its own.
            RuntimeError: the process group allocates no memory, as gloo.
        """
        require_bool("enable", enable)
        state = unit_state(self)
        if enable:
            state.custom.use_process_group_memory(state.shard_groups, state.device, state.unit.config.name)
        else:
            state.custom.leave_process_group_memory()

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather this unit's parameters through symmetric memory; units that do so share buffers.

        Args:
            backend: of symmetric memory. "NCCL" gathers by NCCL, which uses the copy engines if the process group's
                ``config.cta_policy`` is zero; with "CUDA" each rank writes to the others by its own copy engines.

        Raises:
            ValueError: another backend, or the unit has communicators of its own.
            RuntimeError: no GPU.
        """
        if backend not in ("NCCL", "CUDA"):
            raise ValueError(f"backend: expected 'NCCL' or 'CUDA', got {backend!r}")
        state = unit_state(self)
        state.custom.use_symmetric_memory(state.shard_groups, state.device, backend, state.unit.config.name)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the root's next uncompiled forward wait for ``event`` before it gathers.

        Raises:
            TypeError: not a torch.Event.
        """
        if not hasattr(event, "wait"):
            raise TypeError(f"event: expected a torch.Event, got {event!r}")
        unit_state(self)._lazy_init().post_optim_event = event

    def reset_iter_state(self) -> None:
        """Return to the state between two steps after an exception in forward or backward.

        Gradients under way and those accumulated without sync are dropped; ``.grad`` is left alone. An exception
        that leaves the uncompiled model's forward, or an uncompiled backward, does the same by itself, but for
        gradients accumulated without sync, which it keeps.

        Raises:
            RuntimeError: this is not the outermost unit.
        """
        _outermost("reset_iter_state", self).reset_iteration(drop_accumulated=True)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Leave the end of gradient reduction to :meth:`finalize_backward` (True) rather than to each backward.

        It takes the place of ``set_is_last_backward``.

        Raises:
            TypeError: not a bool.
            RuntimeError: this is not the outermost unit, or a backward is under way.
        """
        require_bool("enabled", enabled)
        state = _outermost("set_manual_backward_finalization", self)
        if is_in_backward():
            raise RuntimeError("set_manual_backward_finalization: expected no backward under way; call it before")
        state._lazy_init().finalizes_manually = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the reduction of the gradients that backwards have left, with sync or, if it is on now, without.

        Args:
            async_op: return a handle at once; its ``wait`` must come before the gradients are used.

        Raises:
            TypeError: not a bool.
            RuntimeError: this is not the outermost unit, a backward is under way,
                ``set_manual_backward_finalization(True)`` was not called before, or the last handle was not waited
                for.
        """
        require_bool("async_op", async_op)
        context = _outermost("finalize_backward", self)._lazy_init()
        if not context.finalizes_manually:
            raise RuntimeError("finalize_backward: call set_manual_backward_finalization(True) before forward")
        if is_in_backward():
            raise RuntimeError("finalize_backward: expected no backward under way; call it afterwards")
        if context.finalizing is not None:
            raise RuntimeError("finalize_backward: wait for the handle of the last finalization first")
        handle = context.finalize()
        if async_op:
            return handle
        handle.wait()
        return None

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept what FSDP2's users set: all-gathers here are always asynchronous operations."""
        require_bool("async_op", async_op)

    def _get_fsdp_state(self) -> FSDPState:
        return unit_state(self)


def _call(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several models share what bounds the communication under way; for pipeline stages of one rank.

    Raises:
        TypeError: not a list.
        ValueError: one of them was not given to ``fully_shard``.
    """
    states = _states_of("share_comm_ctx", modules)
    for state in states[1:]:
        state._lazy_init().comm = states[0]._lazy_init().comm


def _outermost(method: str, module: FSDPModule) -> FSDPState:
    state = unit_state(module)
    if not state.is_root:
        raise RuntimeError(
            f"{method}: expected the outermost unit, got {state.unit.config.name}; "
            f"call it on {state.outermost.unit.config.name}"
        )
    return state


def _checked(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected an {kind.__name__}, got {value!r} of {type(value).__name__}")
    return value


def _states(module: FSDPModule, recurse: bool) -> list[FSDPState]:
    return states_below([module]) if recurse else [unit_state(module)]  # type: ignore[list-item]


def _states_of(method: str, modules: Sequence[FSDPModule]) -> list[FSDPState]:
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"{method}: expected a list of modules, got {type(modules).__name__}")
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{method}: expected modules given to fully_shard, got {type(module).__name__}; shard it first"
            )
    return [unit_state(module) for module in modules]
