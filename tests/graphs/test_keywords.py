"""Inputs that a model takes by keyword, whatever their names are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdp_compiled
from fsdp_compiled import fully_shard, register_fsdp_forward_method


class Scaled(nn.Linear):
    def __init__(self, width, cls=None):
        super().__init__(width, width)

    def forward(self, x, **scales):
        for scale in scales.values():
            x = x * scale
        return super().forward(x)

    def other(self, x, **scales):
        return self.forward(x, **scales)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("compiled", [torch.compile, fsdp_compiled.compile])
def test_inputs_that_are_called_as_arguments_of_ours_are(compiled):
    x, names = torch.ones(2, 8), ("model", "run", "module", "method", "args", "backend")
    model = fully_shard(Scaled(8))
    register_fsdp_forward_method(model, "other")
    names = dict.fromkeys(names, 2.0)
    assert model.other(x, **names).shape == (2, 8)
    assert compiled(model)(x, **names).shape == (2, 8)
    assert type(type(model)(8, cls=3)) is Scaled
