"""What a user may put in place of the collectives: the interfaces, and how operators find the user's objects.

A graph holds only strings and numbers, so an object that the user gave is found by the name that ``register``
returned. The names count the objects of this process, so that ranks that run one program agree on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# Checked on torch 2.11.0, 2.13.0 and 2.15.0; there is no public name for FSDP2's interfaces.
from torch.distributed.fsdp._fully_shard import _fsdp_api as torch_api

from ..errors import FSDPError

RedOp = dist.ReduceOp.RedOpType


class Comm(ABC):
    """A collective that allocates its own output."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of ``size`` for the collective's output."""


class AllGather(Comm):
    """An all-gather; give one to ``FSDPModule.set_custom_all_gather``."""

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather 1-D ``input_tensor`` of every rank into ``output_tensor``, in order of rank.

        Returns:
            The work to wait for, or None if the output is complete (or in order on the current stream).
        """


class ReduceScatter(Comm):
    """A reduce-scatter; give one to ``FSDPModule.set_custom_reduce_scatter``."""

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: RedOp, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce 1-D ``input_tensor`` over the ranks and leave this rank's part in ``output_tensor``.

        Returns:
            The work to wait for, or None if the output is complete (or in order on the current stream).
        """


# What implements FSDP2's interfaces has these methods, and serves here as well.
AllGather.register(torch_api.AllGather)  # type: ignore[type-abstract]
ReduceScatter.register(torch_api.ReduceScatter)  # type: ignore[type-abstract]


class Hook:
    """A function on reduced, packed gradients, as an object that can be referred to weakly."""

    def __init__(self, run: Callable[[Tensor], None], stream: torch.Stream | None = None) -> None:
        self._run = run
        self._stream = stream  # where it runs; None for the stream on which the reduction ends

    def __call__(self, packed: Tensor) -> None:
        """Run the function between what came before and what comes after."""
        if self._stream is None:
            self._run(packed)
            return
        around = torch.accelerator.current_stream(packed.device)
        self._stream.wait_stream(around)
        with self._stream:
            self._run(packed)
        around.wait_stream(self._stream)


class _Registered(WeakValueDictionary[str, "Comm | Hook"]):
    """Objects by name. No name is given twice: a graph that was compiled for an object now gone finds nothing."""

    given = 0

    def name(self, value: Comm | Hook) -> str:
        known = next((name for name, each in self.items() if each is value), None)
        if known is None:
            known, self.given = str(self.given), self.given + 1
            self[known] = value
        return known


_registered = _Registered()  # the callers own the objects


def register(value: Comm | Hook) -> str:
    """Return the name by which operators find ``value`` as long as the caller keeps it; always the same one."""
    return _registered.name(value)


def registered(name: str, kind: type) -> Any:
    """Return the object of this name; FSDPError if there is none, or none of this kind."""
    found = _registered.get(name)
    if not isinstance(found, kind):
        raise FSDPError(f"custom communication {name!r}: expected {kind.__name__}, found {found!r}; compile again")
    return found
