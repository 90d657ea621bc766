"""What a compiled model leaves in memory once it is gone: what torch keeps of an unsharded one too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.support.training import MLP, compiled, shard

pytestmark = pytest.mark.usefixtures("fake_group", "nothing_older")


def _train(sharded):
    model = MLP(layers=2)
    call = shard(model, "full") if sharded else compiled(model)
    for _ in range(2):
        call(torch.ones(2, 10)).sum().backward()
    return [weakref.ref(tensor) for tensor in (model, *model.parameters())]


def _tensors():
    gc.collect()
    return [weakref.ref(found) for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def _left_behind(sharded):
    """How many tensors a third model leaves, after two have filled what is made once."""
    for _ in range(2):
        before = _tensors()
        gone = _train(sharded)
        torch._dynamo.reset()
        gc.collect()
        assert not any(ref() is not None for ref in gone)
    alive = {id(ref()) for ref in before}
    return [type(ref()).__name__ for ref in _tensors() if id(ref()) not in alive]


def test_a_compiled_model_that_is_gone_leaves_no_more_than_an_unsharded_one():
    unsharded = _left_behind(sharded=False)
    assert len(_left_behind(sharded=True)) <= len(unsharded)
