"""Names, parameters and defaults against torch.distributed.fsdp of the installed torch."""

from __future__ import annotations

import gc
import inspect
import weakref
from dataclasses import fields

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp_compiled
from fsdp_compiled import fully_shard

FUNCTIONS = ("fully_shard", "register_fsdp_forward_method")
POLICIES = ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy")


def _public(cls: type) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_same_parameters(name):
    ours = inspect.signature(getattr(fsdp_compiled, name)).parameters
    theirs = inspect.signature(getattr(torch_fsdp, name)).parameters
    for parameter in theirs.values():
        mine = ours[parameter.name]
        assert mine.kind == parameter.kind
        if parameter.name.endswith("policy"):
            assert type(mine.default).__name__ == type(parameter.default).__name__
        else:
            assert mine.default == parameter.default


@pytest.mark.parametrize("name", POLICIES)
def test_policies_have_the_same_fields_and_defaults(name):
    ours, theirs = (
        [(f.name, f.default) for f in fields(getattr(module, name))] for module in (fsdp_compiled, torch_fsdp)
    )
    assert ours[: len(theirs)] == theirs  # a newer torch may have added fields at the end, which refuse here


@pytest.mark.parametrize("name", _public(torch_fsdp.FSDPModule))
def test_every_method_exists_with_the_same_parameters(name):
    mine = getattr(fsdp_compiled.FSDPModule, name)
    theirs = inspect.signature(getattr(torch_fsdp.FSDPModule, name)).parameters
    ours = inspect.signature(mine).parameters
    for parameter in theirs.values():
        assert ours[parameter.name].kind == parameter.kind
        assert repr(ours[parameter.name].default) == repr(parameter.default)


def test_the_handle_waits():
    assert _public(torch_fsdp.UnshardHandle) == ["wait"]
    assert _public(fsdp_compiled.UnshardHandle) == ["wait"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_nobody_holds_is_freed(fake_group, compiled):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        call(torch.randn(2, 4)).sum().backward()
    gone = weakref.ref(model)
    del model, call
    torch.compiler.reset()
    gc.collect()
    assert gone() is None
