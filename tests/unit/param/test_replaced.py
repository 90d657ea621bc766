"""Noticing what took a sharded parameter's place."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from fsdp_compiled import fully_shard
from fsdp_compiled.param.param import Registered


def _linear() -> nn.Linear:
    model = nn.Linear(4, 6)
    fully_shard(model)
    return model


def _registered(model: nn.Linear) -> Registered:
    return Registered(list(model._fsdp_params.values()))


def test_what_was_not_touched_is_still_registered(fake_group):
    model = _linear()
    registered = _registered(model)
    assert registered.still()
    with torch.no_grad():
        model.weight.mul_(2)
    gc.collect()
    assert registered.still()


def test_another_storage_is_noticed(fake_group):
    model = _linear()
    registered = _registered(model)
    model.weight.data = model.weight.detach().clone()
    assert not registered.still()


def test_another_parameter_is_noticed(fake_group):
    model = _linear()
    registered = _registered(model)
    model.weight = nn.Parameter(model.weight.detach().clone())
    assert not registered.still()
    del model._parameters["weight"]
    assert not registered.still()


def test_a_replaced_parameter_is_freed(fake_group):
    model = _linear()
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    old = weakref.ref(model.weight)
    model.weight = nn.Parameter(model.weight.detach().clone())
    gc.collect()
    assert old() is None


def test_parameters_of_a_model_that_has_run_can_be_swapped(fake_group):
    model = _linear()
    model(torch.ones(2, 4))
    model.to(torch.float64)  # which swaps tensors
    assert model(torch.ones(2, 4, dtype=torch.float64)).dtype == torch.float64
