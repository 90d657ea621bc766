"""One model compiled and uncompiled, trained and evaluated, in turn."""

from __future__ import annotations

import pytest
import torch

from fsdp_compiled import fully_shard
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    MODES,
    assert_close,
    assert_trains_like_one_process,
    batches,
    compiled,
    full_params,
    my_part,
    shard,
    square_loss,
)

each_mode = pytest.mark.parametrize("mode", MODES)


@row("switching", mode=("eager", "full"))
@on_ranks(2)
def test_eager_then_compiled_then_eager():
    alone, model = MLP(), MLP()
    call = shard(model, "full")
    data = batches(3, 8, 10)
    for turn in (model, call, model, call):
        assert_trains_like_one_process(model, turn, alone, data)
        with torch.no_grad():  # leaves the root unsharded: the next training step must not use old values
            square_loss(model, my_part(data[0]))


@row("optimizers and evaluation")
@each_mode
@on_ranks(2)
def test_evaluation_between_steps(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    x = batches(1, 8, 10)[0]
    for context in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(call(x), alone(x))
        assert_trains_like_one_process(model, call, alone)


@row("switching", mode="eager")
@on_ranks(2)
def test_uncompiled_pieces_of_a_compiled_unit_gather_by_themselves():
    class Opaque(MLP):
        def forward(self, x):
            x = x * self.scale
            return self._rest(x)

        @torch.compiler.disable
        def _rest(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    alone, model = Opaque(), Opaque()
    fully_shard(model)  # one unit, part of whose modules run outside every graph and hook
    assert_trains_like_one_process(model, compiled(model, fullgraph=False), alone)


@row("switching", "optimizers and evaluation", mode="full")
@on_ranks(2)
def test_what_eager_left_unsharded_does_not_grow_old_while_compiled_steps_train():
    alone, model = MLP(), MLP()
    call = shard(model, "full")
    data = batches(3, 8, 10)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    model(my_part(data[0]))  # a forward with gradients and no backward keeps the root unsharded
    model.blocks[0].unshard(async_op=True)
    for x in data:
        square_loss(alone, x).backward()
        square_loss(call, my_part(x)).backward()
        for m in (alone, model):
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(data[0]), alone(data[0]))
    assert_close(full_params(model), full_params(alone))
