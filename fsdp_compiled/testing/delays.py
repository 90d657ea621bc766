"""Models that are slow at chosen moments, so that an operation ordered wrongly shows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .. import FSDPModule
from .experts import delayed
from .interface import DEVICEInitMode, FSDPInitMode, FSDPTestModel, RankAndSize
from .nested import NestedWrappedModule


class ModuleWithDelay(FSDPTestModel):
    """A test model whose host sleeps after the loss, before each unit's gradients are reduced, or both.

    Args:
        module: the model.
        delay_after_loss_ms: how long to sleep once the loss is computed.
        delay_before_reduction_ms: how long to sleep before each unit's reduction in an uncompiled backward; a
            compiled one does not sleep.
    """

    def __init__(self, module: FSDPTestModel, delay_after_loss_ms: int, delay_before_reduction_ms: int) -> None:
        super().__init__()
        self.module = module
        self.delay_after_loss_ms = delay_after_loss_ms
        self.delay_before_reduction_ms = delay_before_reduction_ms

    def get_input(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the model's input."""
        return self.module.get_input(device)

    def forward(self, *args: Tensor) -> Any:
        return self.module(*args)

    def get_loss(self, input: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the model's loss, then sleep."""
        loss = self.module.get_loss(input, output)
        time.sleep(self.delay_after_loss_ms / 1000)
        return loss

    def run_backward(self, loss: Tensor) -> None:
        """Run the model's backward with the delay before reductions."""
        with ExitStack() as stack:
            for unit in self.modules():
                if isinstance(unit, FSDPModule) and self.delay_before_reduction_ms:
                    state = unit._get_fsdp_state()
                    slow = delayed(state.post_backward, self.delay_before_reduction_ms)
                    stack.enter_context(mock.patch.object(state, "post_backward", slow))
            self.module.run_backward(loss)

    @staticmethod
    def init(
        module_class: type[FSDPTestModel],
        *model_args: Any,
        delay_after_loss_ms: int,
        delay_before_reduction_ms: int,
        **model_kwargs: Any,
    ) -> ModuleWithDelay:
        """Make ``module_class.init(*model_args, **model_kwargs)`` with delays, see the class."""
        module: Any = module_class.init(*model_args, **model_kwargs)
        return ModuleWithDelay(module, delay_after_loss_ms, delay_before_reduction_ms)


class NestedWrappedModuleWithDelay(ModuleWithDelay):
    """:class:`NestedWrappedModule` with delays."""

    @staticmethod
    def init(  # type: ignore[override]
        group: RankAndSize,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode = DEVICEInitMode.DEVICE_AFTER,
        fsdp_kwargs: Mapping[str, Any] | None = None,
        deterministic: bool = False,
        delay_after_loss_ms: int = 0,
        delay_before_reduction_ms: int = 0,
    ) -> ModuleWithDelay:
        """Make one; the arguments are those of :meth:`NestedWrappedModule.init` and :class:`ModuleWithDelay`."""
        return ModuleWithDelay.init(
            NestedWrappedModule,
            group,
            fsdp_init_mode,
            device_init_mode,
            fsdp_kwargs,
            deterministic,
            delay_after_loss_ms=delay_after_loss_ms,
            delay_before_reduction_ms=delay_before_reduction_ms,
        )
