"""The call of an outermost unit, in which Dynamo begins before the unit's hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import fx, nn

from ..agreement import peers
from ..agreement.ledger import register_callbacks
from ..passes import log
from .dynamo import callback_handler, comptime, is_skipped, skipped, with_code_of_its_own
from .frames import with_room_for_callees
from .reads import check_not_frozen
from .sharded_module import MixinOrder, UnitOfModule


def watch_compiles() -> None:
    """Log compilations and report them to other ranks; again when a forward begins, as torch's reset forgets it."""
    for begin, end in (log.callbacks, peers.callbacks):
        if begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(begin)
            callback_handler.register_end_callback(end)


def ignore_compiles() -> None:
    for begin, end in (log.callbacks, peers.callbacks):
        if begin in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)


def _begin_trace(context: Any) -> None:
    """Check the outermost unit, and tell other ranks that this one goes on: torch's reset drops callbacks."""
    check_not_frozen(context)
    peers.withdraw_report()
    watch_compiles()  # from the next compilation on: nothing may end the beats of this one, as in torch.export


class TracedCall:
    """Mixin of the outermost unit: ``torch.compile(model)`` traces its hooks and not only its forward.

    Dynamo begins at the first frame that it does not skip. For a plain module that is ``forward``, after its hooks;
    for this one it is ``_fsdp_call``, and ``__call__`` runs before guards are evaluated. Units inside are traced with
    their caller.
    """

    _fsdp_order = MixinOrder.ROOT_CALL
    _fsdp_state: UnitOfModule
    _fsdp_call: Callable[..., Any]

    @skipped
    @with_room_for_callees
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return TracedCall._fsdp_traced(self, *args, **kwargs)
        if not self._fsdp_state.unit.config.has_hooks and not torch.is_grad_enabled():
            return self._fsdp_state.run(self, self._fsdp_call, *args, **kwargs)
        self._fsdp_state.enter_thread()  # first: other ranks need not know of a second thread's error
        grad_mode = torch.is_grad_enabled()
        try:
            register_callbacks()
            watch_compiles()
            self._fsdp_state.begin_call()
        except BaseException as error:
            peers.report_failure(error)
            raise
        try:
            return self._fsdp_state.run(self, self._fsdp_call, *args, **kwargs)
        except BaseException as error:
            torch.set_grad_enabled(grad_mode)  # an interrupt of torch's own code may have left another
            if peers.is_failure(error):
                peers.report_failure(error)
                self._fsdp_state.reset_iteration(drop_accumulated=False)
            raise
        finally:
            self._fsdp_state.end_call()

    def _fsdp_traced(self, *args: Any, **kwargs: Any) -> Any:
        comptime(_begin_trace)
        if isinstance(self, fx.GraphModule) and torch.compiler.is_compiling():
            return nn.Module.__call__(self, *args, **kwargs)  # Dynamo skips its own, which explains errors
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    @staticmethod
    def _fsdp_class_body(user_cls: Any) -> dict[str, Any]:
        @wraps(user_cls.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return user_cls.forward(self, *args, **kwargs)  # no super(): the user may keep it until this is no root

        body: dict[str, Any] = {"_fsdp_call": with_code_of_its_own(TracedCall._fsdp_traced)}
        # torch.compile would trace __call__, too, where forward is torch's own code, as nn.Sequential's is
        return body | {"forward": forward} if is_skipped(user_cls.forward) else body
