"""Activation checkpointing of units, and selective policies: the same numbers, and no more gathers than without."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compiled import fully_shard, fully_shard_with_compiled_compute, register_fsdp_forward_method
from tests.support.graphs import record, sequence
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    MODES,
    assert_trains_like_one_process,
    assert_trains_like_replicas,
    backend,
    batches,
    compiled,
    my_part,
    shard,
    units_inside,
    with_regions,
)
from tests.support.variants import thorough


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.down(self.up(x).sin()).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.call = lambda block, x: block(x)

    def forward(self, x):
        for block in self.blocks:
            x = x + self.call(block, x)
        return x


def _keep_matmuls(context, operation, *args, **kwargs):
    kept = operation == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_everything(context, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def _selective(policy):
    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


OPTIONS = {"whole": {}, "matmuls kept": _selective(_keep_matmuls), "everything kept": _selective(_keep_everything)}


HOW = ("function", "unit inside the wrapper", "unit around the wrapper")


def _checkpointed(how=None, options=None):
    """A model whose blocks are recomputed, and its units."""
    model = Model()
    units = list(model.blocks)
    if how == "function":
        model.call = partial(checkpoint, use_reentrant=False, **options)
    elif how is not None:
        model.blocks = nn.ModuleList(checkpoint_wrapper(block, **options) for block in units)
        units = list(model.blocks) if how == "unit around the wrapper" else units
    return model, units


def _sharded(how=None, options=None, mode="eager", reshard=True):
    model, units = _checkpointed(how, options)
    for unit in units:
        if mode == "regional":
            fully_shard_with_compiled_compute(unit, compile_kwargs=backend(), reshard_after_forward=reshard)
        else:
            fully_shard(unit, reshard_after_forward=reshard)
    return fully_shard(model)


def _input():
    return my_part(batches(1, 4, 6)[0]).requires_grad_()


def _eager_collectives(model):
    """How often the process groups ran each collective; a dispatch mode would change what the policies see."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(_input()).sum().backward()
    return Counter(event.name for event in profile.events() if event.name.startswith("gloo:"))


def _graph_gathers(model):
    """How many gathers the backward graph has, and whether it recomputes anything."""
    call, recorder = record(model, lower=False)
    call(_input()).sum().backward()
    assert recorder.dynamo_graphs == 1
    backward = recorder.only("backward")
    return len(sequence(backward, "unshard")), bool(sequence(backward, "sin"))


@row("activation checkpointing", mode="eager")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("how", HOW)
@on_ranks(2)
def test_eager_steps_gather_as_often_as_without(how, options):
    options = OPTIONS[options]
    for reshard in (True, False):
        expected = _eager_collectives(_sharded(reshard=reshard))
        assert sorted(expected.values()) == [2, 4 if reshard else 2], expected
        seen = _eager_collectives(_sharded(how, options, reshard=reshard))
        assert seen == expected, f"{seen} against {expected}"
    alone, _ = _checkpointed(how, options)
    model = _sharded(how, options)
    assert_trains_like_replicas(model, model, alone, batches(3, 4, 6))


@row("activation checkpointing", mode="full")
@pytest.mark.parametrize("reshard", [True, False])
@thorough(when=lambda reshard: not reshard)
@on_ranks(2)
def test_backward_graphs_gather_as_often_as_without(reshard):
    expected, _ = _graph_gathers(_sharded(reshard=reshard))
    assert expected == (4 if reshard else 0)
    for how in HOW:
        for name, options in OPTIONS.items():
            gathers, recomputes = _graph_gathers(_sharded(how, options, reshard=reshard))
            assert (how, name, gathers) == (how, name, expected)
            assert recomputes == (name != "everything kept")


@row("activation checkpointing")
@pytest.mark.parametrize("mode", ["regional", "full", "regions"])
@pytest.mark.parametrize(("how", "options"), list(zip(HOW, OPTIONS, strict=True)))
@on_ranks(2)
def test_compiled_steps_train_as_without(how, options, mode):
    options = OPTIONS[options]
    alone, _ = _checkpointed(how, options)
    model = _sharded(how, options, mode)
    if mode == "regions":
        with_regions(model, units_inside(model))
    call = compiled(model) if mode != "regional" else model
    assert_trains_like_replicas(model, call, alone, batches(3, 4, 6))


@row("activation checkpointing", "frozen and LoRA", mode="regional")
def test_recomputation_finds_the_compiled_code_of_forward(fake_group):
    """Each block holds a frozen unit, whose parameters its compiled code reads."""
    model, units = _checkpointed("function", {})
    for block in units:
        fully_shard(block.up.requires_grad_(False))
        fully_shard_with_compiled_compute(block, compile_kwargs={"backend": "aot_eager"})
    fully_shard(model)
    counters.clear()
    out = model(torch.ones(4, 6))
    compiled_in_forward = counters["stats"]["unique_graphs"]
    assert compiled_in_forward > 0
    out.sum().backward()
    assert counters["stats"]["unique_graphs"] == compiled_in_forward


class _Checkpointed(MLP):
    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@row("activation checkpointing")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_activation_checkpointing(mode):
    alone, model = _Checkpointed(), _Checkpointed()
    call = shard(model, mode)
    assert_trains_like_one_process(model, call, alone)


class _WithHead(Model):
    """What the outermost unit computes last keeps something for backward, so a recomputation ends in its call."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        return self.head(super().forward(x))


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_call_of_the_outermost_unit_is_recomputed(mode):
    alone, model = _WithHead(), _WithHead()
    recomputed = partial(checkpoint, shard(model, mode), use_reentrant=False)
    assert_trains_like_replicas(model, recomputed, alone, batches(3, 4, 6))


class _Encoders(Model):
    """Blocks and the model run methods of their own."""

    def encode(self, x):
        for block in self.blocks:
            x = x + checkpoint(block.forward, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("of", ["blocks", "model"])
@on_ranks(2)
def test_a_registered_forward_method_is_recomputed(of):
    alone, model = _Encoders(), _Encoders()
    shard(model, "eager")
    register_fsdp_forward_method(model, "encode")
    for block in model.blocks:
        register_fsdp_forward_method(block, "forward")
    encode = model.encode if of == "blocks" else partial(checkpoint, model.encode, use_reentrant=False)
    assert_trains_like_replicas(model, encode, alone, batches(3, 4, 6), call_alone=alone.encode)
