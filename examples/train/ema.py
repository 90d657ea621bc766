"""An exponential moving average of a sharded model's parameters, without a copy of the model.

The average is one more shard of each parameter on each rank. It is updated by local arithmetic, without
communication, and swapped with the parameters while it is used. For an average that can be called while the model
trains, ``torch.optim.swa_utils.AveragedModel(model)`` makes a second sharded model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class EMA:
    """The average of a model's parameters over its steps.

    Args:
        model: sharded or not; its parameters keep their identity.
        decay: what remains of the average in each step.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        self._params = dict(model.named_parameters())
        self._decay = decay
        self.average = {name: param.detach().clone() for name, param in self._params.items()}  # DTensors, for DCP

    @torch.no_grad()
    def update(self) -> None:
        """Take in the present parameters; call it after the optimizer's step."""
        torch._foreach_lerp_(local(self.average.values()), local(self._params.values()), 1 - self._decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model compute with the average, to evaluate (without gradients) or export it."""
        own = [shard.clone() for shard in local(self._params.values())]
        self._put(local(self.average.values()))
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, shards: list[Tensor]) -> None:
        torch._foreach_copy_(local(self._params.values()), shards)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shards, in the memory of the tensors."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]
