"""What PyTorch's own tools and other libraries read of a unit's state, by the names that FSDP2's state has.

Until torch 2.13, ``torch.distributed.pipelining`` ends a step through ``_state_ctx``, ``_fsdp_param_group`` or
``_fsdp_param_groups``, and ``_root_post_backward_final_callback``; ``torch.distributed.fsdp.share_comm_ctx`` assigns
``_comm_ctx``, and ``register_fsdp_forward_method`` calls ``_pre_forward`` and ``_post_forward``. Models that cast as
their unit will read ``_mp_policy``. Checked on torch 2.11.0, 2.13.0 and 2.15.0. It must not know what a unit does.
"""

from __future__ import annotations

from typing import Any


class _Group:
    """Stands for a unit's groups of parameters where a tool wants to end each one's backward."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def post_backward(self) -> None:
        """Called for the last unit, finish the backward of all: OLMo-core's stages make no callback afterwards."""
        context = self._state._lazy_init()
        if self._state is context.all_states[-1]:
            context.finish_backward()
            context.finished_by_groups = context.step.at_end


class TorchNames:
    """Mixin of ``FSDPState``, which gives the hooks and ``_lazy_init``, the context."""

    @property
    def _pre_forward(self: Any) -> Any:
        return self.pre_forward.hook

    @property
    def _post_forward(self: Any) -> Any:
        return self.post_forward.hook

    @property
    def _fsdp_param_group(self: Any) -> _Group:
        return _Group(self)

    @property
    def _fsdp_param_groups(self: Any) -> tuple[_Group]:
        return (_Group(self),)

    @property
    def _state_ctx(self: Any) -> Any:
        return self._lazy_init()

    def _root_post_backward_final_callback(self: Any) -> None:
        context = self._lazy_init()
        if context.finished_by_groups is None or context.finished_by_groups is not context.step.at_end:
            context.finish_backward()

    @property
    def _comm_ctx(self: Any) -> Any:
        return self._lazy_init().comm

    @_comm_ctx.setter
    def _comm_ctx(self: Any, comm: Any) -> None:
        self._lazy_init().comm = comm

    @property
    def _pre_forward_hook_handle(self: Any) -> Any:
        raise NotImplementedError(
            "torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker replaces the hooks of FSDP2 by its own, which "
            "is not implemented for units of fsdp_compiled; for a compiled model's memory use "
            "fsdp_compiled.inspect.capture, and for an uncompiled one torch.distributed._tools.mem_tracker.MemTracker"
        )
