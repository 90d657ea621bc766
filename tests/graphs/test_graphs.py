"""What a compiled model's forward and backward graphs hold: gathers, reductions, and what is saved between."""

from __future__ import annotations

from copy import deepcopy
from inspect import signature
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import SchedulePolicy, fully_shard, fully_shard_with_compiled_compute
from fsdp_compiled.agreement import peers
from fsdp_compiled.inspect import capture
from fsdp_compiled.passes.schedule_policy import DEFAULT
from tests.support.graphs import Recorder, outputs, record, sequence, target_name
from tests.support.parity import row
from tests.support.training import llama, shard, token_batches, without_codegen

pytestmark = pytest.mark.usefixtures("fake_group")

LAUNCHES = ("launch_all_gather", "launch_reduce_scatter", "launch_all_reduce")
WAITS = ("wait_all_gather", "wait_reduce_scatter", "wait_all_reduce")


class Net(nn.Module):
    """Three units: the root with two matrices, and two blocks; sizes tell shards from whole parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)])
        self.last = nn.Linear(16, 20, bias=False)

    def forward(self, x):
        x = self.first(x).relu()
        for block in self.blocks:
            x = block(x).relu()
        return self.last(x)


UNIT = SchedulePolicy(bucket="unit", prefetch=1)


def _graphs(model, *args, schedule=DEFAULT):
    call, recorder = record(model, schedule)
    call(*args).sum().backward()
    assert recorder.dynamo_graphs == 1
    return recorder


@row("reshard", mode="full")
@pytest.mark.parametrize("reshard", [True, False])
def test_what_forward_saves_for_backward(reshard):
    model = Net()
    shard(model, "eager", reshard_after_forward=reshard)
    recorder = _graphs(model, torch.randn(8, 12))
    forward, backward = recorder.only("forward"), recorder.only("backward")
    saved = outputs(forward)[1:]
    shards = [n for n in saved if n.op == "placeholder" and n.meta["val"].numel() in (48, 64, 80)]
    derived = [n for n in saved if n.op != "placeholder" and n.meta["val"].numel() in (192, 256, 320)]
    gathers = len(sequence(backward, "unshard"))
    # Backward needs blocks and last: the gradient of the input is not asked for, so first is not needed.
    if reshard:
        assert (len(shards), len(derived), gathers) == (3, 0, 3)
    else:
        assert (len(shards), len(derived), gathers) == (0, 3, 0)
    assert len(sequence(forward, "unshard")) == 4
    assert len(sequence(backward, "reduce_grad")) == 4


@row("reshard", mode="full")
def test_the_default_keeps_the_roots_parameters_and_reshards_the_rest():
    model = Net()
    shard(model, "eager")
    recorder = _graphs(model, torch.randn(8, 12))
    assert len(sequence(recorder.only("backward"), "unshard")) == 2


def test_one_bucket_per_unit_launched_one_ahead():
    model = Net()
    shard(model, "eager", reshard_after_forward=True)
    recorder = _graphs(model, torch.randn(8, 12), schedule=UNIT)
    names = (*LAUNCHES, *WAITS, "mm", "unshard", "reduce_grad")
    (gather, reduce, _), (gathered, reduced, _) = LAUNCHES, WAITS
    assert sequence(recorder.only("forward", after=True), *names) == [
        gather,  # root: first and last
        gather,  # blocks.0
        gathered,
        "mm",
        gather,  # blocks.1
        gathered,
        "mm",
        gathered,
        "mm",
        "mm",
    ]
    backward = sequence(recorder.only("backward", after=True), *names)
    assert [n for n in backward if n != "mm"] == [
        gather,  # root
        gather,  # blocks.1
        gathered,
        reduce,  # blocks.1
        gather,  # blocks.0
        gathered,
        reduce,  # blocks.0
        gathered,
        reduce,  # root
        reduced,
        reduced,
        reduced,
    ]


def test_nothing_else_of_a_collective_is_left_in_a_graph():
    model = Net()
    shard(model, "eager", reshard_after_forward=True)
    recorder = _graphs(model, torch.randn(8, 12), schedule=UNIT)
    for kind, units in (("forward", 3), ("backward", 6)):
        graph = recorder.only(kind, after=True)
        ours = [target_name(n) for n in graph.nodes if "fsdp_compiled" in str(n.target)]
        assert len(ours) == 2 * units == 2 * len(sequence(graph, *LAUNCHES))
        assert sequence(graph, "cat", "split_with_sizes", "slice", "constant_pad_nd", "all_gather_into_tensor") == []


def test_nothing_opaque_is_left():
    model = llama()
    shard(model, "eager")
    call, recorder = record(model, UNIT)
    tokens = token_batches(1)[0]
    call(tokens[:, :-1], tokens[:, 1:]).backward()
    for _, graph in recorder.after:
        assert sequence(graph, "unshard", "reduce_grad") == []
        launches = sequence(graph, *LAUNCHES)
        assert len(launches) == len(sequence(graph, *WAITS)) == (3 if graph is recorder.after[0][1] else 5)


def test_one_dynamo_graph_no_breaks_and_no_recompilation():
    model = llama()
    shard(model, "eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend(without_codegen)
    call = torch.compile(model, backend=counter, fullgraph=True)
    for tokens in token_batches(3):
        call(tokens[:, :-1], tokens[:, 1:]).backward()
        for param in model.parameters():
            param.grad = None
    assert counter.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Recomputed(Net):
    def forward(self, x):
        x = self.first(x).relu()
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: b(y).sin().relu(), x, use_reentrant=False)
        return self.last(x)


@row("activation checkpointing", mode="full")
@pytest.mark.parametrize("reshard", [True, False])
def test_activation_checkpointing_gathers_each_parameter_once_in_backward(reshard):
    model = Recomputed()
    shard(model, "eager", reshard_after_forward=reshard)
    recorder = _graphs(model, torch.randn(8, 12))
    assert len(sequence(recorder.only("backward"), "unshard")) == (3 if reshard else 0)


@row("tied and shared", mode="full")
def test_a_parameter_read_twice_is_gathered_once():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            return (x @ self.weight).relu() @ self.weight

    model = fully_shard(Twice())
    recorder = _graphs(model, torch.randn(8, 16))
    assert len(sequence(recorder.only("forward", after=True), *LAUNCHES)) == 1
    backward = recorder.only("backward", after=True)
    assert sequence(backward, *LAUNCHES) == ["launch_reduce_scatter"]
    (scatter,) = [n for n in backward.nodes if target_name(n) == "launch_reduce_scatter"]
    assert len(scatter.args[0]) == 1


def test_an_inference_graph_only_gathers():
    model = Net()
    shard(model, "eager")
    call, recorder = record(model, UNIT)
    with torch.no_grad():
        call(torch.randn(8, 12))
    graph = recorder.only("inference", after=True)
    assert sequence(graph, *LAUNCHES) == ["launch_all_gather"] * 3


def test_units_without_an_outer_unit_are_buckets_of_their_own():
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    recorder = _graphs(model, torch.randn(8, 12), schedule=UNIT)
    assert sequence(recorder.only("forward", after=True), *LAUNCHES) == ["launch_all_gather"] * 2


def test_two_sharded_models_in_one_graph_share_no_bucket():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = Net(), Net()

        def forward(self, x):
            return self.teacher(x) - self.student(x)

    model = Both()
    shard(model.teacher, "eager")
    shard(model.student, "eager")
    recorder = _graphs(model, torch.randn(8, 12), schedule=UNIT)
    assert sequence(recorder.only("forward", after=True), *LAUNCHES) == ["launch_all_gather"] * 6


@pytest.mark.parametrize(
    ("set_by_user", "schedule", "again"),
    [(False, DEFAULT, 0), (True, DEFAULT, 2), (True, SchedulePolicy(keep_unsharded_bytes=2**20), 0)],
)
def test_small_parameters_are_kept_where_the_user_has_not_set_it(set_by_user, schedule, again):
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if set_by_user:
        for block in model.blocks:
            block.set_reshard_after_forward(True)
    assert len(sequence(_graphs(model, torch.randn(8, 12), schedule=schedule).only("backward"), "unshard")) == again


def test_no_more_is_kept_by_default_than_16_mib():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(1536, 1536, bias=False) for _ in range(4))  # of 9 MiB each

        def forward(self, x):
            for block in self.blocks:
                x = block(x).relu()
            return x

    model = Wide()
    for block in model.blocks:
        fully_shard(block)
    captured = capture(fully_shard(model), torch.randn(2, 1536, requires_grad=True), code=False)
    assert [graph.kept_bytes for graph in captured.graphs] == [9 * 2**20, 0]


def test_regional_compilation_shares_one_graph_without_collectives():
    model = Net()
    torch._dynamo.reset()
    recorder = Recorder(code=True)
    for block in model.blocks:
        fully_shard_with_compiled_compute(block, compile_kwargs={"backend": recorder, "fullgraph": True})
    fully_shard(model)
    model(torch.randn(8, 12)).sum().backward()
    assert recorder.dynamo_graphs == 1
    for _, graph in recorder.before:
        assert sequence(graph, "unshard", "reduce_grad", *LAUNCHES) == []


@pytest.mark.parametrize(("cls", "parts"), [(Net, ()), (nn.Sequential, (nn.Linear(12, 12),))])
def test_many_models_do_not_share_dynamos_recompile_limit(cls, parts):
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    for index in range(torch._dynamo.config.recompile_limit + 2):
        model = fully_shard(type(f"{cls.__name__}{index}", (cls,), {})(*deepcopy(parts)))
        torch.compile(model, backend=counter, fullgraph=True)(torch.ones(2, 12))
        assert counter.frame_count == index + 1


def test_a_call_compiled_over_torchs_own_forward_reports_its_failure():
    model = fully_shard(nn.Sequential(nn.Linear(12, 12)))
    assert signature(model.forward) == signature(nn.Sequential(nn.Linear(12, 12)).forward)
    with (
        mock.patch.object(peers, "report_failure") as reported,
        pytest.raises(RuntimeError, match=r"\[12, 12\]") as caught,
    ):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 7))
    reported.assert_called_once_with(caught.value)
