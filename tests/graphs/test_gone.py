"""What a compiled model leaves in memory once it is gone: what torch keeps of an unsharded one too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.support.training import MLP, compiled, shard

pytestmark = pytest.mark.usefixtures("fake_group", "nothing_older")


def _train(mode, with_backward):
    model = MLP(layers=3)
    call = shard(model, mode) if mode else compiled(model)
    for _ in range(2):
        out = call(torch.ones(2, 10)).sum()
        if with_backward:
            out.backward()
    return [weakref.ref(tensor) for tensor in (model, *model.parameters())]


def _tensors():
    gc.collect()
    return [weakref.ref(found) for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def _left_behind(mode, with_backward):
    """How many tensors a third model leaves, after two have filled what is made once."""
    for _ in range(2):
        before = _tensors()
        gone = _train(mode, with_backward)
        torch._dynamo.reset()
        gc.collect()
        assert not any(ref() is not None for ref in gone)
    alive = {id(ref()) for ref in before}
    return [type(ref()).__name__ for ref in _tensors() if id(ref()) not in alive]


@pytest.mark.parametrize("with_backward", [True, False])  # torch keeps the trace of a graph whose backward never ran
@pytest.mark.parametrize("mode", ["full", "regions"])
def test_a_compiled_model_that_is_gone_leaves_no_more_than_an_unsharded_one(mode, with_backward):
    unsharded = _left_behind(None, with_backward)
    assert len(_left_behind(mode, with_backward)) <= len(unsharded)
