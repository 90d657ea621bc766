"""The three ways to give a schedule, and what stays of the user's own configuration."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor import config, custom_graph_pass

import fsdp_compiled
from fsdp_compiled import SchedulePolicy, fully_shard, passes
from fsdp_compiled.hooks.state import FSDPState
from tests.support.graphs import sequence

COLLECTIVES = ("launch_all_gather", "wait_all_gather", "launch_reduce_scatter", "wait_reduce_scatter", "mm")
SLOTS = ("joint_custom_pre_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Spy(custom_graph_pass.CustomGraphPass):
    """A user's pass that writes down what it sees; without a uuid, compile caches are off and it always runs."""

    def __init__(self) -> None:
        self.seen = []

    def __call__(self, graph) -> None:
        self.seen.append(sequence(graph, *COLLECTIVES))

    def uuid(self):
        return None


@pytest.fixture
def spy(fake_group):
    """In the last slot beside our passes, which are taken out and put back around the test."""
    passes.uninstall()
    before = {slot: getattr(config, slot) for slot in SLOTS}
    config.post_grad_custom_post_pass = spy = Spy()
    yield spy
    passes.uninstall()
    assert config.post_grad_custom_post_pass is spy
    for slot, value in before.items():
        setattr(config, slot, value)
    passes.install()


def sharded():
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def seen(spy, call):
    torch._dynamo.reset()
    spy.seen.clear()
    call(torch.randn(4, 8)).sum().backward()
    return list(spy.seen)


def test_all_three_ways_give_the_same_schedule(spy):
    model = sharded()
    plain = seen(spy, torch.compile(model, fullgraph=True))
    assert len(plain) == 2
    assert seen(spy, fsdp_compiled.compile(model, fullgraph=True)) == plain
    assert seen(spy, torch.compile(model, fullgraph=True, options=fsdp_compiled.options())) == plain
    assert seen(spy, fsdp_compiled.compile(model, fullgraph=True, mode="default", schedule=SchedulePolicy())) == plain


def test_compiling_in_place_brings_the_hooks_in_but_not_for_inner_units(fake_group, monkeypatch):
    gathered = []
    unshard = FSDPState.unshard
    monkeypatch.setattr(FSDPState, "unshard", lambda state: (gathered.append(state), unshard(state)))
    model = sharded()
    model.compile(fullgraph=True, backend="aot_eager")
    model(torch.randn(4, 8)).sum().backward()
    assert gathered == []
    assert all(param.grad is not None for param in model.parameters())

    outer = fully_shard(nn.Sequential(fully_shard(Net())))
    outer[0].compile(fullgraph=True, backend="eager")
    outer[0](torch.randn(4, 8))
    assert gathered == [outer[0]._get_fsdp_state()]


def test_a_schedule_holds_for_one_compile_only(spy):
    model, units = sharded(), SchedulePolicy(bucket="unit")
    plain = seen(spy, torch.compile(model, fullgraph=True))
    for call in (
        fsdp_compiled.compile(model, schedule=units, fullgraph=True),
        torch.compile(model, fullgraph=True, options=fsdp_compiled.options(units)),
    ):
        forward, _ = seen(spy, call)
        assert forward.count("launch_all_gather") == 3 > plain[0].count("launch_all_gather")
    assert seen(spy, torch.compile(model, fullgraph=True)) == plain


def test_options_of_the_user_are_kept(spy):
    with pytest.raises(RuntimeError, match="Unexpected optimization option no_such_option"):
        fsdp_compiled.compile(sharded(), options={"no_such_option": 3})
    user, units = Spy(), SchedulePolicy(bucket="unit")
    options = {"pre_grad_custom_pass": user}
    forward, _ = seen(spy, fsdp_compiled.compile(sharded(), schedule=units, fullgraph=True, options=options))
    assert forward.count("launch_all_gather") == 3
    assert len(user.seen) == 1


@pytest.mark.parametrize("slot", SLOTS[1:])
def test_a_pass_among_the_options_runs_beside_ours(spy, slot):
    user = Spy()
    forward, backward = seen(spy, fsdp_compiled.compile(sharded(), fullgraph=True))
    config.post_grad_custom_post_pass = None
    call = fsdp_compiled.compile(sharded(), fullgraph=True, options={slot: user})
    call(torch.ones(2, 8)).sum().backward()
    config.post_grad_custom_post_pass = spy
    assert user.seen == [forward, backward]


def test_models_of_one_class_compile_once(fake_group):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    for _ in range(50):
        torch.compile(sharded(), backend=backend, fullgraph=True)(torch.ones(2, 8)).sum().backward()
    assert len(graphs) == 1


def test_models_of_one_class_in_one_graph_are_told_apart(spy):
    first, second = sharded(), sharded()

    def both(x):
        return first(x) + second(x)

    call = fsdp_compiled.compile(both, schedule=SchedulePolicy(bucket="unit"), fullgraph=True)
    call(torch.ones(2, 8)).sum().backward()
    assert spy.seen[0].count("launch_all_gather") == 6
    assert spy.seen[1].count("launch_reduce_scatter") == 6


def test_bad_input():
    with pytest.raises(ValueError, match="backend: expected 'inductor', got 'eager'; only Inductor runs"):
        fsdp_compiled.compile(Net(), backend="eager")
    with pytest.raises(ValueError, match="mode: expected None beside options, got 'max-autotune'"):
        fsdp_compiled.compile(Net(), mode="max-autotune", options={"max_fusion_size": 3})
    with pytest.raises(TypeError, match="schedule: expected a SchedulePolicy or None, got .* of dict"):
        fsdp_compiled.options({"bucket": "unit"})
    with pytest.raises(TypeError, match="schedule: expected a SchedulePolicy or None, got .* of str"):
        fsdp_compiled.compile(Net(), schedule="unit")


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"bucket": "big"}, ValueError, "bucket: expected 'auto' or 'unit' or 'none' or an integer of at least 1"),
        ({"bucket": 0}, ValueError, "bucket: .* got 0"),
        ({"bucket": 1.5}, TypeError, "bucket: .* got 1.5 of float"),
        ({"prefetch": -1}, ValueError, "prefetch: expected 'auto' or an integer of at least 0, got -1"),
        ({"prefetch": True}, TypeError, "prefetch: .* got True of bool"),
        ({"in_flight_bytes": 0}, ValueError, "in_flight_bytes: expected 'auto' or an integer of at least 1, got 0"),
        (
            {"keep_unsharded_bytes": "all"},
            ValueError,
            "keep_unsharded_bytes: expected 'auto' or an integer of at lea",
        ),
        ({"cluster": 8}, TypeError, "cluster: expected a Cluster, a name, a file or None, got 8 of int"),
    ],
)
def test_a_policy_is_checked_when_made(fields, error, text):
    with pytest.raises(error, match=f"SchedulePolicy.{text}"):
        SchedulePolicy(**fields)
