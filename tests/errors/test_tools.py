"""compile, options, explain, capture, step_on_shards, pickling: called with what they cannot take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdp_compiled
from fsdp_compiled import fully_shard_with_compiled_compute, step_on_shards
from fsdp_compiled.inspect import capture, explain
from tests.errors.models import Model, sharded_model

pytestmark = pytest.mark.usefixtures("fake_group")

X = torch.ones(2, 8)


def muon(count=2):
    optimizer = torch.optim.Muon([nn.Parameter(torch.ones(3, 4))])
    if count > 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return optimizer


@pytest.mark.parametrize(
    ("model", "kwargs", "error", "message"),
    [
        (3, {}, TypeError, "model: expected a module or a function that calls one, got 3"),
        (None, {}, TypeError, "model: expected a module or a function that calls one, got None"),
        (
            print,
            {"schedule": "unit"},
            TypeError,
            "schedule: expected a SchedulePolicy or None, got 'unit' of str; use for",
        ),
        (print, {"backend": "eager"}, ValueError, "backend: expected 'inductor', got 'eager'; only Inductor runs"),
        (print, {"options": [1]}, TypeError, r"options: expected a mapping of Inductor's options or None, got \[1\]"),
        (
            print,
            {"mode": "default", "options": {"max_autotune": True}},
            ValueError,
            "mode: expected None beside options, got 'default'; put what the mode sets into options",
        ),
        (print, {"mode": "fastest"}, RuntimeError, "Unrecognized mode=fastest, should be one of"),
        (print, {"fullgraf": True}, TypeError, "unexpected keyword argument 'fullgraf'"),
        (
            print,
            {"regions": []},
            ValueError,
            r"regions: expected 'auto' or 'off' for a function, got \[\] of list; compile the model",
        ),
    ],
)
def test_compile(model, kwargs, error, message):
    with pytest.raises(error, match=message):
        fsdp_compiled.compile(model, **kwargs)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: fsdp_compiled.options("unit"),
            TypeError,
            "schedule: expected a SchedulePolicy or None, got 'unit' of str",
        ),
        (lambda: explain(3), TypeError, "model: expected an nn.Module given to fully_shard, got 3 of int"),
        (
            lambda: explain(nn.Linear(2, 2)),
            ValueError,
            "Linear: expected a sharded model, got one without any unit; call",
        ),
        (
            lambda: explain(sharded_model(), schedule=3),
            TypeError,
            "schedule: expected a SchedulePolicy or None, got 3 of int",
        ),
        (
            lambda: capture(3, X),
            TypeError,
            "model: expected an nn.Module, got 3 of int; give the module, not its result",
        ),
        (lambda: capture(Model(), X), ValueError, "Model: expected a sharded model, got one without any unit; call"),
        (
            lambda: capture(sharded_model(), X, schedule="unit"),
            TypeError,
            "schedule: expected a SchedulePolicy or None, got 'unit' of str; use for example",
        ),
        (lambda: capture(sharded_model(), X, loss=3), TypeError, "loss: expected a function or None, got 3 of int"),
        (
            lambda: capture(sharded_model(), X, loss=lambda y: y, code=False),
            ValueError,
            r"loss: expected a function that returns a tensor of one element, got a tensor \[2, ",
        ),
        (
            lambda: capture(sharded_model(), X, optimizer=torch.optim.SGD(Model().parameters())),
            ValueError,
            "optimizer: expected one of adamw, .*, muon, got SGD$",
        ),
        (
            lambda: capture(sharded_model(), X, code=False).save("page.html", beside="other.html"),
            TypeError,
            "beside: expected another capture, got 'other.html' of str",
        ),
        (
            lambda: capture(sharded_model(), X, code=False).save("page.html", measured="run.json"),
            TypeError,
            "measured: expected what compare returned, got 'run.json' of str",
        ),
        (lambda: step_on_shards(3), TypeError, "optimizer: expected a torch.optim.Optimizer, got 3 of int"),
        (
            lambda: step_on_shards(torch.optim.SGD),
            TypeError,
            "optimizer: expected a torch.optim.Optimizer, got <class .* of type",
        ),
        (
            lambda: step_on_shards(torch.optim.LBFGS(sharded_model().parameters())),
            ValueError,
            "LBFGS: expected an elementwise optimizer, got one whose update of an element depends on others",
        ),
        (
            lambda: step_on_shards(torch.optim.Adafactor(sharded_model().parameters())),
            ValueError,
            "Adafactor: expected an elementwise optimizer, got one whose update of an element depends on others",
        ),
        (
            lambda: step_on_shards(muon()),
            ValueError,
            r"param_groups\[1\]\['params'\]\[0\]: expected a real matrix, or a stack of matrices, got torch.float32 "
            r"of shape \(3,\); give it to another optimizer",
        ),
        (
            lambda: step_on_shards(muon(1), blocks={nn.Parameter(X): (1, 2)}),
            ValueError,
            "blocks: expected parameters of the optimizer, got Parameter",
        ),
        (
            lambda: step_on_shards(wide := muon(1), blocks={wide.param_groups[0]["params"][0]: (1, 3)}),
            ValueError,
            r"blocks of param_groups\[0\]\['params'\]\[0\]: expected rows that sum up to 3, got \(1, 3\) of tuple",
        ),
        (
            lambda: step_on_shards(muon(1), blocks=3),
            TypeError,
            "blocks: expected a mapping of parameters to .*, got 3",
        ),
        (
            lambda: step_on_shards(muon(1), newton_schulz=3),
            TypeError,
            "newton_schulz: expected a function or None, got 3 of int",
        ),
        (
            lambda: step_on_shards(torch.optim.SGD(Model().parameters()), blocks={}),
            ValueError,
            "blocks: expected None, got a value; SGD has no matrices",
        ),
        (
            lambda: fully_shard_with_compiled_compute(Model),
            TypeError,
            "module: expected one nn.Module, got <class .* of type; call it on each module",
        ),
        (
            lambda: fully_shard_with_compiled_compute(Model(), compile_kwargs=3),
            TypeError,
            "compile_kwargs: expected a mapping of torch.compile's arguments, got 3",
        ),
        (
            lambda: sharded_model().to("meta")(X),
            RuntimeError,
            r"layers\.0\.weight: expected a parameter with storage, got one on the meta device; call model.to_empty",
        ),
    ],
)
def test_functions(call, error, message):
    with pytest.raises(error, match=message):
        call()
