"""FSDPModule: what a user can ask of a sharded module. It only finds the states and tells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .owner import TracedCall, rebase, with_code_of_its_own
from .policy import require_bool
from .state import FSDPState, state_of, states_below


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
        keep their hooks outside the graph.

        Args:
            args: given to ``torch.compile``, as are ``kwargs``.
        """
        if not _state(self).is_root:
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
        state = _state(self)
        state.launch_unshard()
        if async_op:
            return UnshardHandle(state)
        state.wait_unshard()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and register the sharded ones."""
        _state(self).reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in backward (True), or accumulate them unsharded in ``reduce_dtype`` (False).

        The next backward that ends with sync on reduces what was accumulated, whichever units it reaches itself.
        A compiled model has a graph for either setting; it takes the one that is set when its forward runs.

        Raises:
            TypeError: not a bool.
        """
        require_bool("requires_gradient_sync", requires_gradient_sync)
        for state in _states(self, recurse):
            state.set_reduce_grads(requires_gradient_sync)

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
            state.status.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Start gathering these modules' units in this one's pre-forward hook. Graphs are not affected.

        Raises:
            TypeError: not a list.
            ValueError: one of them was not given to ``fully_shard``.
        """
        _state(self).forward_prefetch = _states_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Start gathering these modules' units when this one's backward begins. Graphs are not affected.

        The default is the unit before this one in forward order; an empty list turns prefetch off.

        Raises:
            TypeError: not a list.
            ValueError: one of them was not given to ``fully_shard``.
        """
        _state(self).backward_prefetch = _states_of("set_modules_to_backward_prefetch", modules)

    def reset_iter_state(self) -> None:
        """Return to the state between two steps after an exception in forward or backward.

        Gradients under way and those accumulated without sync are dropped; ``.grad`` is left alone. An exception
        that leaves the uncompiled model's forward, or an uncompiled backward, does the same by itself, but for
        gradients accumulated without sync, which it keeps.

        Raises:
            RuntimeError: this is not the outermost unit.
        """
        state = _state(self)
        if not state.is_root:
            raise RuntimeError(
                f"reset_iter_state: expected the outermost unit, got {state.status.name}; "
                f"call it on {state.outermost.status.name}"
            )
        state.reset_iteration(drop_pending=True)

    def _get_fsdp_state(self) -> FSDPState:
        return _state(self)


def _call(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


_NOT_YET = (
    "finalize_backward",
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
    "set_post_optim_event",
    "set_reduce_scatter_divide_factor",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_requires_all_reduce",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
    "set_unshard_in_backward",
    "_set_unshard_async_op",
)


def _not_yet(name: str) -> Callable[..., None]:
    def refuse(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"FSDPModule.{name} is not implemented yet")

    refuse.__name__ = name
    refuse.__doc__ = "Not implemented yet: raises NotImplementedError."
    return refuse


for _name in _NOT_YET:
    setattr(FSDPModule, _name, _not_yet(_name))


def make_fsdp_module(module: nn.Module, state: FSDPState) -> None:
    """Give ``module`` its unit's state and the methods of FSDPModule."""
    module.__dict__["_fsdp_state"] = state
    rebase(module, add=(FSDPModule, TracedCall))


def _state(module: FSDPModule) -> FSDPState:
    state = state_of(module)  # type: ignore[arg-type]
    if state is None:
        raise ValueError(f"{type(module).__name__}: expected a module given to fully_shard, got one without state")
    return state


def _states(module: FSDPModule, recurse: bool) -> list[FSDPState]:
    return states_below([module]) if recurse else [_state(module)]  # type: ignore[list-item]


def _states_of(method: str, modules: Sequence[FSDPModule]) -> list[FSDPState]:
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"{method}: expected a list of modules, got {type(modules).__name__}")
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{method}: expected modules given to fully_shard, got {type(module).__name__}; shard it first"
            )
    return [_state(module) for module in modules]
