"""Units that stay unsharded over micro-batches, as in pipelines: they communicate once a step, compiled ones too."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import unsharded
from fsdp_compiled.hooks.state import states_below
from tests.support.collectives import counted
from tests.support.graphs import record, regions_of
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    batches,
    compiled,
    each_with_regions,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
)
from tests.support.variants import thorough


def _unshard(model):
    for state in states_below([model]):
        state.modules[0].unshard()


def _train_kept(alone, model, call):
    """Each backward of kept units adds the gradients of one process."""
    for batch in batches(2, 8, 10):
        _unshard(model)
        square_loss(call, my_part(batch)).backward()
        square_loss(alone, batch).backward()
        assert_close(full_grads(model), full_grads(alone))


def _grads(model):
    """Those of the sharded parameters, which it registers."""
    for state in states_below([model]):
        state.modules[0].reshard()
    return full_grads(model)


def _backward(model, loss, is_last):
    """As a pipeline stage does it: what is not last neither reduces nor reshards."""
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)
    loss.backward()


@pytest.mark.parametrize("asks", [True, False], ids=["unshard", "settings"])
@each_with_regions
@thorough(when=lambda mode, asks: asks and mode in ("regional", "regions"))
@on_ranks(2)
def test_micro_batches_share_all_gathers_and_reductions(mode, asks):
    alone, model = MLP(), MLP()
    call = shard(model, mode, reshard_after_forward=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    once = dict.fromkeys(("all_gather", "reduce_scatter"), len(states_below([model])))
    for step in range(3):
        micros = list(batches(4, 8, 10))
        with counted() as counts:
            if asks:
                _unshard(model)
            losses = [square_loss(call, my_part(micro)) for micro in micros[:2]]
            for index, micro in enumerate(micros):
                _backward(model, losses[index], is_last=index == 3)
                losses += [square_loss(call, my_part(each)) for each in micros[index + 2 : index + 3]]
                square_loss(alone, micro).backward()
        # Graphs of a step that nothing has announced communicate: that of the next ones is expected to be alike.
        assert counts == once or (step == 0 and not asks and mode in ("full", "regions"))
        assert_close(full_grads(model), full_grads(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_close(full_params(model), full_params(alone))


@pytest.mark.parametrize("reshards", [True, False], ids=["after backward", "by state_dict"])
@each_with_regions
@thorough(when=lambda mode, reshards: reshards == (mode == "full") and mode != "eager")
@on_ranks(2)
def test_a_backward_all_gathers_what_was_resharded_since_forward(mode, reshards):
    alone, model = MLP(), MLP()
    call = shard(model, mode, reshard_after_forward=False)
    first, second = batches(2, 8, 10)
    _unshard(model)
    losses = [square_loss(call, my_part(each)) for each in (first, second)]
    if not reshards:
        model.set_reshard_after_backward(False)
        model.state_dict()
    for loss, micro in zip(losses, (first, second), strict=True):
        loss.backward()
        square_loss(alone, micro).backward()
    assert_close(_grads(model), full_grads(alone))


@each_with_regions
@thorough(when=lambda mode: mode == "regional")
@on_ranks(2)
def test_values_written_since_count(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode, reshard_after_forward=False)
    (batch,) = batches(1, 8, 10)
    _unshard(model)
    for _ in range(2):  # also after a forward without backward
        with torch.no_grad():
            for param in [*alone.parameters(), *(param.sharded_param for param in _params(model))]:
                param.mul_(1.5)
        torch.testing.assert_close(call(batch), alone(batch))
    square_loss(call, my_part(batch)).backward()
    square_loss(alone, batch).backward()
    assert_close(_grads(model), full_grads(alone))


def _params(model):
    return [param for state in states_below([model]) for param in state.params]


@each_with_regions
@thorough(when=lambda mode: mode == "regional")
@on_ranks(2)
def test_a_forward_that_fails_leaves_nothing_unsharded(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode, reshard_after_forward=False)
    (batch,) = batches(1, 8, 10)
    _unshard(model)
    square_loss(call, my_part(batch)).backward()
    _unshard(model)
    with pytest.raises(RuntimeError):
        call(my_part(batch)[:, :3])
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert not any(state.unit.is_kept for state in states_below([model]))
    square_loss(call, my_part(batch)).backward()
    for _ in range(2):
        square_loss(alone, batch).backward()
    assert_close(full_grads(model), full_grads(alone))


@each_with_regions
@thorough(when=lambda mode: mode == "regional")
@on_ranks(2)
def test_units_that_forward_reshards_are_all_gathered_in_the_graph(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode, reshard_after_forward=True)
    for micro in batches(2, 8, 10):
        _unshard(model)
        with counted() as counts:
            square_loss(call, my_part(micro)).backward()
        assert counts["all_gather"] + counts["all_gather_coalesced"] > 0
        square_loss(alone, micro).backward()
    assert_close(full_grads(model), full_grads(alone))


@pytest.mark.parametrize("trains", [True, False], ids=["train", "unsharded"])
@on_ranks(2)
def test_blocks_that_are_kept_are_regions(trains):
    alone, model = MLP(), MLP()
    shard(model, "regions", reshard_after_forward=False)
    call, recorder = record(model, lower=False)
    (batch,) = batches(1, 8, 10)
    with nullcontext() if trains else unsharded(model):
        _unshard(model)
        with counted() as counts:
            outputs = call(my_part(batch)), alone(my_part(batch))
        torch.testing.assert_close(*outputs)
    assert not counts
    assert len(regions_of(recorder.only("forward" if trains else "inference", after=True))) == 2
    if trains:
        square_loss(lambda _: outputs[0], my_part(batch)).backward()
        square_loss(alone, batch).backward()
        assert_close(_grads(model), full_grads(alone))


class _Again(MLP):
    """Its first block runs once more, outside of any graph."""

    def forward(self, x):
        return self._again(super().forward(x))

    @torch.compiler.disable
    def _again(self, x):
        return x + self.blocks[0](x)


@on_ranks(2)
def test_a_block_may_run_in_the_graph_and_outside():
    alone, model = _Again(), _Again()
    shard(model, "eager", reshard_after_forward=False)
    call = compiled(model, fullgraph=False)
    _train_kept(alone, model, call)


@each_with_regions
@thorough(when=lambda mode: mode == "regional")
@on_ranks(2)
def test_a_checkpoint_around_the_call_recomputes_what_ran(mode):
    """Though the backward before it has told that the units are kept."""
    alone, model = MLP(), MLP()
    inner = shard(model, mode, reshard_after_forward=False)

    def call(x):
        return checkpoint(inner, x, use_reentrant=False)

    for step in range(2):
        micros = batches(2, 8, 10, seed=step)
        losses = [square_loss(call, my_part(micro)) for micro in micros]
        for index, micro in enumerate(micros):
            _backward(model, losses[index], is_last=index == 1)
            square_loss(alone, micro).backward()
        assert_close(full_grads(model), full_grads(alone))


class _Clamped(MLP):
    def forward(self, x):
        with torch.no_grad():
            self.blocks[0][0].weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@each_with_regions
@on_ranks(2)
def test_what_forward_writes_to_parameters_stays(mode):
    alone, model = _Clamped(), _Clamped()
    call = shard(model, mode, reshard_after_forward=False)
    _train_kept(alone, model, call)
    assert_close(full_params(model), full_params(alone))


class _Wrapped(MLP):
    def forward(self, x):
        return Opaque(super().forward(x))


class Opaque:
    """In which nobody finds the tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


@each_with_regions
@on_ranks(2)
def test_an_output_in_an_object_of_the_users(mode):
    alone, model = MLP(), _Wrapped()
    call = shard(model, mode, reshard_after_forward=False)
    _train_kept(alone, model, lambda x: call(x).tensor)


@each_with_regions
@on_ranks(2)
def test_a_step_of_one_backward_has_its_collectives_in_the_graph_again(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode, reshard_after_forward=False)
    counts = []
    for syncs in ([True], [False, True], [False, True], [True], [True]):
        micros = batches(len(syncs), 8, 10)
        with counted() as count:
            for sync, micro in zip(syncs, micros, strict=True):
                loss = square_loss(call, my_part(micro))
                _backward(model, loss, is_last=sync)
                square_loss(alone, micro).backward()
        counts.append(count)
        assert_close(full_grads(model), full_grads(alone))
    assert counts[0] == counts[4]
    assert counts[2]["all_gather"] == len(states_below([model]))
