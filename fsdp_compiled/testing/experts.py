"""A model one part of which differs on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

from .interface import (
    DEVICEInitMode,
    FSDPInitMode,
    RankAndSize,
    mesh_of,
    seeded,
    shard_units,
)
from .nested import NestedWrappedModule


class MixtureOfExperts(NestedWrappedModule):
    """Four linears, ``[4, 8] -> [4, 8]``; the third is this rank's expert and is averaged over no other rank.

    Args:
        group: gives rank and size, and averages gradients of an unsharded model.
        wrap_fsdp: shard the second linear over ``group`` and the expert over this rank alone. The outermost module
            is no unit: give it to ``fully_shard`` to shard the rest.
        device_init_mode: when to move the model to the accelerator.
        delay_before_free_ms: sleep before the expert is resharded after forward; only an uncompiled one sleeps.
        deterministic: make the same parameters at every call, the expert's from the rank and others equal on all.
        fsdp_kwargs: given to ``fully_shard``.
    """

    def __init__(
        self,
        group: RankAndSize,
        wrap_fsdp: bool,
        device_init_mode: DEVICEInitMode,
        delay_before_free_ms: int,
        deterministic: bool,
        **fsdp_kwargs: Any,
    ) -> None:
        super().__init__(group, wrap_fsdp, device_init_mode, deterministic, **fsdp_kwargs)
        self.group = group
        self.delay_before_free_ms = delay_before_free_ms
        self.wrap_fsdp = wrap_fsdp

    def _layers(self, deterministic: bool) -> nn.Sequential:
        with seeded(42 + self.rank if deterministic else None):
            expert = nn.Linear(23, 12)
        self.num_expert_params = sum(param.numel() for param in expert.parameters())
        with seeded(0 if deterministic else None):
            return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 23), expert, nn.Linear(12, 8))

    @classmethod
    def init(  # type: ignore[override]
        cls,
        group: RankAndSize,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: Mapping[str, Any] | None = None,
        deterministic: bool = False,
        delay_before_free_ms: int = 0,
    ) -> nn.Module:
        """Make an instance, see :meth:`NestedWrappedModule.init` and the class."""
        delay = {"delay_before_free_ms": delay_before_free_ms}
        return super().init(group, fsdp_init_mode, device_init_mode, fsdp_kwargs, deterministic, **delay)

    @property
    def expert(self) -> nn.Module:
        """This rank's own part."""
        return self.module[2]

    def _shard(self, group: RankAndSize, fsdp_kwargs: Mapping[str, Any]) -> None:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        shard_units([self.expert], group, {**fsdp_kwargs, "mesh": mesh_of(alone)})
        shard_units([self.module[1]], group, fsdp_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.wrap_fsdp and self.delay_before_free_ms):
            return self.module(x)
        state = self.expert._get_fsdp_state()  # type: ignore[operator]
        with mock.patch.object(state, "reshard", delayed(state.reshard, self.delay_before_free_ms)):
            return self.module(x)

    def run_backward(self, loss: Tensor) -> None:
        """Run backward; without sharding, average the gradients of all but the expert over the group."""
        loss.backward()
        if self.wrap_fsdp:
            return
        own = set(self.expert.parameters())
        for param in self.parameters():
            if param not in own and param.grad is not None:
                dist.all_reduce(param.grad.div_(self.world_size), group=self.group)  # type: ignore[arg-type]


def delayed(call: Callable[..., Any], delay_ms: int) -> Callable[..., Any]:
    """Return ``call`` preceded by a sleep of the host."""

    def run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(delay_ms / 1000)
        return call(*args, **kwargs)

    return run
