"""Noticing what took a sharded parameter's place."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from fsdp_compiled import fully_shard
from fsdp_compiled.param.replaced import Registered


def _linear() -> tuple[nn.Linear, Registered]:
    model = nn.Linear(4, 6)
    fully_shard(model)
    params = list(model._fsdp_params.values())
    return model, Registered(params)


def test_what_was_not_touched_is_still_registered(fake_group):
    model, registered = _linear()
    assert registered.still()
    with torch.no_grad():
        model.weight.mul_(2)
    gc.collect()
    assert registered.still()


def test_another_storage_is_noticed(fake_group):
    model, registered = _linear()
    model.weight.data = model.weight.detach().clone()
    assert not registered.still()


def test_another_parameter_is_noticed_and_the_old_one_is_freed(fake_group):
    model, registered = _linear()
    old = weakref.ref(model.weight)
    model.weight = nn.Parameter(model.weight.detach().clone())
    gc.collect()
    assert old() is None
    assert not registered.still()
    del model._parameters["weight"]
    assert not registered.still()
