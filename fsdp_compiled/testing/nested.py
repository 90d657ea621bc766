"""Linears in nested units, some of them frozen in one variant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .interface import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTestModel,
    RankAndSize,
    checked_mode,
    default_device,
    random_input,
    seeded,
    shard_units,
)


class NestedWrappedModule(FSDPTestModel):
    """Five linears, ``[4, 8] -> [4, 8]``; some are units, one of them inside another, the outermost module is none.

    Args:
        group: gives rank and size; units are sharded over it unless ``fsdp_kwargs`` has a mesh.
        wrap_fsdp: shard the units.
        device_init_mode: when to move the model to the accelerator.
        deterministic: make equal parameters on every rank and at every call.
        fsdp_kwargs: given to ``fully_shard``.
    """

    def __init__(
        self,
        group: RankAndSize,
        wrap_fsdp: bool,
        device_init_mode: DEVICEInitMode,
        deterministic: bool,
        **fsdp_kwargs: Any,
    ) -> None:
        super().__init__()
        self.rank = group.rank()
        self.world_size = group.size()
        self.module = self._layers(deterministic)
        if device_init_mode is DEVICEInitMode.DEVICE_BEFORE:
            self.to(default_device())
        if wrap_fsdp:
            self._shard(group, fsdp_kwargs)
        if device_init_mode is DEVICEInitMode.DEVICE_AFTER:
            self.to(default_device())

    def _layers(self, deterministic: bool) -> nn.Sequential:
        with seeded(0 if deterministic else None):
            return nn.Sequential(
                nn.Linear(8, 4),
                nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16)),
                nn.Linear(16, 4),
                nn.Linear(4, 8),
            )

    def _shard(self, group: RankAndSize, fsdp_kwargs: Mapping[str, Any]) -> None:
        nested: Any = self.module[1]
        shard_units([nested[0], nested, self.module[2]], group, fsdp_kwargs)

    def get_input(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return ``([4, 8],)`` in float32, of this rank."""
        return (random_input(self.rank, 4, 8, device=device),)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def get_loss(self, input: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the sum of the output."""
        return output.sum()

    @classmethod
    def init(  # type: ignore[override]
        cls,
        group: RankAndSize,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: Mapping[str, Any] | None = None,
        deterministic: bool = False,
        **kwargs: Any,
    ) -> nn.Module:
        """Make an instance, whose units are sharded if the mode is RECURSIVE.

        Args:
            group: see the class, as for ``device_init_mode`` and ``deterministic``.
            fsdp_init_mode: whether to shard the units.
            fsdp_kwargs: given to ``fully_shard``.
            kwargs: what a subclass takes besides.

        Raises:
            TypeError: ``fsdp_init_mode`` is none, or a group to shard over is no process group.
        """
        wrap = checked_mode(fsdp_init_mode)
        return cls(
            group,
            wrap_fsdp=wrap,
            device_init_mode=device_init_mode,
            deterministic=deterministic,
            **kwargs,
            **((fsdp_kwargs or {}) if wrap else {}),
        )


class AlwaysWrapNestedWrappedModule(NestedWrappedModule):
    """The same linears, but every module is a unit, the outermost too."""

    def _shard(self, group: RankAndSize, fsdp_kwargs: Mapping[str, Any]) -> None:
        shard_units(list(self.modules())[::-1], group, fsdp_kwargs)


class NonUniformReqGradNWM(NestedWrappedModule):
    """The same linears, the last two in one unit, and all frozen but the last."""

    _TRAINED = re.compile(r"module\.2\.1\.")

    def _layers(self, deterministic: bool) -> nn.Sequential:
        first, nested, third, last = super()._layers(deterministic)
        return nn.Sequential(first, nested, nn.Sequential(third, last))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, param in self.named_parameters():
            param.requires_grad_(self._TRAINED.match(name) is not None)
