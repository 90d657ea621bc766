"""Parameters that stay unsharded over many calls."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compiled import fully_shard, step_on_shards, stream_parameters, unsharded
from tests.support.collectives import counted
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    batches,
    compiled,
    each_mode,
    eager_and_full,
    full_params,
    my_part,
    shard,
    square_loss,
    train,
)
from tests.support.variants import thorough


def _counted(run):
    """How many collectives ``run`` starts."""
    with counted() as counts:
        run()
    return counts.total()


def _is_sharded(model):
    return all(isinstance(param, DTensor) for param in model.parameters())


@row("optimizers and evaluation")
@each_mode
@on_ranks(2)
def test_ranks_make_as_many_calls_as_they_like(mode):
    model = MLP()
    call, alone, x = shard(model, mode), MLP(), batches(1, 4, 10)[0]
    with torch.no_grad():
        want = alone(x)
    data = batches(2, 8, 10)
    train(alone, alone, data[:1], square_loss, sharded=False)
    train(model, call, data[:1], square_loss)
    with torch.no_grad():
        want = alone(x)

    def calls():
        for _ in range(1 + 3 * dist.get_rank()):
            torch.testing.assert_close(call(x), want)

    with unsharded(model):
        assert not _is_sharded(model)
        assert _counted(calls) == 0
    assert _is_sharded(model)
    train(alone, alone, data[1:], square_loss, sharded=False)
    train(model, call, data[1:], square_loss)
    for name, param in full_params(model).items():
        torch.testing.assert_close(param, dict(alone.named_parameters())[name].detach())


@on_ranks(2)
def test_what_a_forward_has_left_unsharded_before_an_optimizer_step_is_all_gathered_again():
    model, (x,) = MLP(), batches(1, 4, 10)
    shard(model, "eager", reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square_loss(model, x).backward()
    with torch.no_grad():
        model(x)
    optimizer.step()
    with unsharded(model):
        found = model(x)
    torch.testing.assert_close(found, model(x), rtol=0, atol=0)


@on_ranks(2)
def test_one_rank_alone_calls_a_unit_that_stays_unsharded():
    """Its backward never comes, and that of the model's forward all-gathers nothing ahead for it."""
    model, alone, data = MLP(), MLP(), batches(2, 8, 10)
    shard(model, "eager")
    optimizer, last = torch.optim.SGD(model.parameters(), lr=0.1), model.blocks[-1]
    last.set_reshard_after_forward(False)
    last.unshard()
    if dist.get_rank() == 0:
        last(data[0])
    train(alone, alone, data, square_loss, sharded=False)
    train(model, model, data, square_loss, optimizer=optimizer)
    assert_close(full_params(model), full_params(alone))


@on_ranks(2)
def test_as_many_bytes_as_given():
    model, x = MLP(), batches(1, 4, 10)[0]
    shard(model, "eager")
    needed = sum(p.numel() for p in model.blocks[0].parameters()) * 4

    def call():
        model(x)

    with torch.no_grad():
        everything = _counted(call)
    with unsharded(model, max_bytes=needed + 64):
        assert not _is_sharded(model.blocks[0]) or not _is_sharded(model)
        assert 0 < _counted(call) < everything
    assert _is_sharded(model)
    with unsharded(model, max_bytes=0):
        assert _is_sharded(model) and _counted(call) == everything


@row("optimizers and evaluation", mode="eager")
@on_ranks(2)
def test_an_exception_leaves_a_sharded_model_that_trains():
    model, alone = MLP(), MLP()
    shard(model, "eager")
    x = batches(1, 4, 10)[0]
    with pytest.raises(ZeroDivisionError), unsharded(model):
        model(x)
        raise ZeroDivisionError
    assert _is_sharded(model) and torch.is_grad_enabled()
    with unsharded(model):
        with (
            mock.patch.object(model.blocks[1], "forward", side_effect=ZeroDivisionError),
            pytest.raises(ZeroDivisionError),
        ):
            model(x)
        assert dist.get_rank() == 1 or _counted(lambda: model(x)) == 0  # a rank alone goes on
    assert _is_sharded(model)
    data = batches(2, 8, 10)
    torch.testing.assert_close(
        train(model, model, data, square_loss), train(alone, alone, data, square_loss, sharded=False)
    )


@eager_and_full
@on_ranks(2)
def test_nothing_trains_inside(mode):
    model, x = MLP(), my_part(batches(1, 8, 10)[0])
    call = shard(model, mode)
    message = (
        "in unsharded\\(\\): expected a forward without gradients, got one with gradients; leave the block to train"
    )
    with unsharded(model), torch.enable_grad(), pytest.raises(RuntimeError, match=message):
        call(x)
    assert _is_sharded(model)
    message = "unsharded: expected a model between two steps, got one in another such block of MLP"
    with unsharded(model), pytest.raises(RuntimeError, match=message), unsharded(model):
        pass
    assert _is_sharded(model)
    square_loss(model, x).backward()
    hook = model.blocks[0].register_forward_hook(lambda *_: unsharded(model).__enter__())
    with pytest.raises(RuntimeError, match="unsharded: expected a model between two steps, got one in forward"):
        model(x)
    hook.remove()


@each_mode
@pytest.mark.parametrize("is_trained", [True, False])
@thorough(when=lambda mode, is_trained: not is_trained and mode == "regional")
@on_ranks(2)
def test_state_dicts_inside(mode, is_trained):
    """The next call all-gathers, and no other."""
    model, alone, x = MLP(), MLP(), batches(1, 4, 10)[0]
    call = shard(model, mode)
    if is_trained:
        square_loss(call, x).backward()
    with unsharded(model):
        call(x)
        for take in (model.blocks[0].state_dict, model.state_dict, lambda: dict(stream_parameters(model))):
            take()
            call(x)
            assert _counted(lambda: torch.testing.assert_close(call(x), alone(x))) == 0
        model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
        alone.load_state_dict({name: tensor * 2 for name, tensor in alone.state_dict().items()})
        torch.testing.assert_close(call(x), alone(x))
        assert dist.get_rank() == 1 or _counted(lambda: call(x)) == 0
    assert _is_sharded(model)


@pytest.mark.parametrize("on_shards", [True, False])
@on_ranks(2)
def test_no_optimizer_steps_inside(on_shards):
    model, x = MLP(), my_part(batches(1, 8, 10)[0])
    shard(model, "eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if on_shards:
        optimizer = step_on_shards(optimizer)
    square_loss(model, x).backward()
    before = model.state_dict()["blocks.0.0.weight"].to_local().clone()
    message = "scale in unsharded\\(\\): expected no optimizer's step, got one of .*SGD; leave the block"
    with unsharded(model), pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert torch.equal(model.state_dict()["blocks.0.0.weight"].to_local(), before)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with unsharded(model):
        other.step()
    optimizer.step()
    assert not torch.equal(model.state_dict()["blocks.0.0.weight"].to_local(), before)


@on_ranks(2)
def test_what_would_be_undone_at_the_end_is_refused():
    model = MLP()
    shard(model, "eager")
    message = "set_reshard_after_forward: expected a model outside unsharded\\(\\), got one inside"
    for module in (model, model.blocks[0]):
        with unsharded(model), pytest.raises(RuntimeError, match=message):
            module.set_reshard_after_forward(False)
    model.set_reshard_after_forward(False)
    with unsharded(model):
        pass
    assert not fully_shard.state(model.blocks[0]).unit.config.reshard_after_forward


@eager_and_full
@pytest.mark.parametrize("is_inference", [True, False])
@on_ranks(2)
def test_what_is_written_to_unsharded_parameters_is_not_lost_in_silence(mode, is_inference):
    model, x = MLP(), my_part(batches(1, 8, 10)[0])
    call = shard(model, mode)
    message = "blocks.0.0.weight in unsharded\\(\\): expected parameters that stay as they are, got a change of"
    with pytest.raises(RuntimeError, match=message), unsharded(model):
        model.blocks[0][0].weight.mul_(2)
    assert _is_sharded(model)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    with torch.inference_mode(is_inference), unsharded(model):
        assert call(x).abs().sum() > 0
        model.load_state_dict(zeros)
        assert not call(x).any()
    with torch.no_grad():
        assert not call(x).any() and _is_sharded(model)


@pytest.mark.parametrize("number", [0, 1])
@on_ranks(2)
def test_what_is_written_where_several_outermost_units_have_parameters_of_one_name(number):
    layers = nn.ModuleList(fully_shard(nn.Linear(4, 4)) for _ in range(2))
    with pytest.raises(RuntimeError, match="weight in unsharded\\(\\): expected parameters"), unsharded(layers):
        layers[number].weight.add_(1)


@on_ranks(2)
def test_within_a_compiled_function():
    alone, model = MLP(), MLP()
    shard(model, "eager")
    (x,) = batches(1, 4, 10)

    def evaluate(x):
        with unsharded(model):
            return model(x), model(x + 1)

    got = compiled(evaluate, fullgraph=False)(x)
    torch.testing.assert_close(got, (alone(x), alone(x + 1)))
    assert _is_sharded(model)


@on_ranks(2)
def test_entered_again_inside():
    model = MLP()
    shard(model, "eager")
    block = unsharded(model)
    with pytest.raises(RuntimeError, match="got one in another such block"), block, block:
        pass
    assert _is_sharded(model)
    with block:
        assert not _is_sharded(model)


@on_ranks(1)
def test_mistakes():
    for model, kwargs, error, message in (
        (3, {}, TypeError, "model: expected an nn.Module, got 3 of int"),
        (nn.Linear(2, 2), {}, ValueError, "Linear: expected a sharded model, got one without any unit"),
        (fully_shard(nn.Linear(2, 2)), {"max_bytes": -1}, ValueError, "max_bytes: expected 0 or more, got -1"),
        (fully_shard(nn.Linear(2, 2)), {"max_bytes": "all"}, TypeError, "max_bytes: expected an integer or None"),
    ):
        with pytest.raises(error, match=message), unsharded(model, **kwargs):
            pass
