"""A model of two layers, and what each test of a refused ``fully_shard`` asserts."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_compiled import fully_shard


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 8)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def sharded_model():
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def assert_refused(error, message, model=None, target=None, **kwargs):
    """``fully_shard(target)`` raises, and leaves ``model`` as it was."""
    model = Model() if model is None else model
    target = model if target is None else target
    before = {name: id(p) for name, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(error, match=message):
        fully_shard(target, **kwargs)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert [type(m) for m in model.modules()] == classes
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
