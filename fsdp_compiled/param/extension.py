"""What a tensor subclass may do around the all-gather of its parameter: quantise it, and make the result.

A parameter's local tensor takes part if its class has both methods of the protocol that PyTorch's FSDP2 defines:

* ``fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)``, or with ``mesh`` alone, returns
  ``(inputs, metadata)``: what this rank sends, each with the shard's dimension 0 first, and anything;
* ``fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)`` returns ``(unsharded, inner tensors)``,
  or fills ``out``, which it returned before. Under tensor parallelism all of these are this rank's part.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(tensor: Tensor) -> bool:
    """Tell whether the class of ``tensor`` extends the all-gather."""
    return hasattr(tensor, PRE) or hasattr(tensor, POST)


def check_extension(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless ``tensor`` has both methods or none, and the first takes 1 or 5 arguments."""
    found = [method for method in (PRE, POST) if hasattr(tensor, method)]
    if len(found) == 1:
        raise ValueError(
            f"{name}: expected {type(tensor).__name__} to define both {PRE} and {POST}, got only {found[0]}"
        )
    if found and _pre_arguments(tensor) not in (1, 5):
        raise ValueError(
            f"{name}: expected {type(tensor).__name__}.{PRE} to take (mesh) or (mesh, outer_size, outer_stride, "
            f"module, mp_policy), got {inspect.signature(getattr(tensor, PRE))}"
        )


def _pre_arguments(tensor: Tensor) -> int:
    return len(inspect.signature(getattr(tensor, PRE)).parameters)


@dataclass(eq=False)
class AllGatherExtension:
    """The two methods of one parameter's class, and what passes between them."""

    shard: Tensor  # this rank's, padded
    arguments: InitVar[tuple[Any, ...]]  # the five of the first method, which may take the mesh alone
    dtype: torch.dtype  # of compute
    device: torch.device  # of compute

    def __post_init__(self, arguments: tuple[Any, ...]) -> None:
        # Functions rather than bound methods, which Dynamo does not trace.
        self._pre, self._post = getattr(type(self.shard), PRE), getattr(type(self.shard), POST)
        self._arguments = arguments[: _pre_arguments(self.shard)]
        self._metadata: Any = None

    def split(self) -> tuple[Sequence[Tensor], Any]:
        """Return (what this rank sends, metadata for :meth:`join`); Dynamo traces this."""
        with torch.no_grad():
            shard = self.shard
            if shard.device.type != self.device.type:
                shard = shard.to(self.device, non_blocking=True)
            return self._pre(shard, *self._arguments)

    def join(self, outputs: Sequence[Tensor], metadata: Any, out: Tensor | None = None) -> Any:
        """Return (unsharded parameter, tensors that hold its memory); with ``out``, fill that and return None."""
        into = {} if out is None else {"out": out}
        with torch.no_grad():
            return self._post(self.shard, tuple(outputs), metadata, self.dtype, **into)

    def launch(self) -> Sequence[Tensor]:
        """Return what this rank sends, and keep the metadata until :meth:`finish`."""
        sent, self._metadata = self.split()
        return sent

    def finish(self, outputs: Sequence[Tensor], out: Tensor | None = None) -> Any:
        """Do what :meth:`join` does for the last launch."""
        return self.join(outputs, self._metadata, out)
