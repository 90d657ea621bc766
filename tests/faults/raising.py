"""An operator that does, when it runs, what a test asks for; compiled graphs run it as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.faults.steps import Model

do: dict[str, Callable[[], None]] = {}  # in "forward", "backward" or "hook"


@torch.library.custom_op("faults::act", mutates_args=())
def act(x: Tensor, place: str) -> Tensor:
    do.get(place, lambda: None)()
    return x.clone()


act.register_fake(lambda x, place: torch.empty_like(x))
act.register_autograd(lambda ctx, grad: (act(grad, "backward"), None))


class RaisingModel(Model):
    """Layers with the operator after the second."""

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x).tanh()
            if index == 1:
                x = act(x, "forward")
        return x


def raising(error: BaseException) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


def user_hook(module: object, args: object, output: Tensor) -> Tensor:
    """What a user may register on a module."""
    return act(output, "hook")
