"""What capture reports, against a walk over the graphs and Inductor's code that knows nothing of the passes."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import torch.distributed as dist
from memory import Case
from torch import nn
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compiled import MixedPrecisionPolicy, SchedulePolicy, compile, fully_shard
from fsdp_compiled.inspect import capture
from fsdp_compiled.passes import CLUSTERS
from tests.support.graphs import after_inductors_passes, record, sequence, target_name
from tests.support.training import shard
from tests.support.variants import thorough

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
LAUNCHES, WAITS = ([f"{half}_{kind}" for kind in KINDS] for half in ("launch", "wait"))


@pytest.fixture
def ranks_64():
    dist.init_process_group("fake", rank=0, world_size=64)
    yield
    dist.destroy_process_group()


@pytest.fixture
def no_code(monkeypatch):
    """Inductor's passes run, but it generates no code, which takes most of the time."""
    monkeypatch.setattr(sys.modules["fsdp_compiled.inspect.capture"], "compile_fx_inner", after_inductors_passes)


class Layers(nn.Module):
    """``count`` layers with a matrix and a bias each, between two matrices of the root."""

    def __init__(self, count: int, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.last = nn.Linear(width, 5, bias=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.last(x)


def walked(graph, shards):
    """(kind, bytes, launch position, wait position) of every collective, from the graph's own nodes and values."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    launched, found = {}, []
    for node in graph.nodes:
        name = target_name(node) if node.op == "call_function" else ""
        if name in LAUNCHES:
            launched[node] = node.args[2:] if "control_deps" in str(node.target) else node.args[0]
        if name in WAITS:
            launch = next(source for source in node.all_input_nodes[::-1] if source in launched)
            kind, inputs = name.removeprefix("wait_"), [each.meta["val"] for each in launched[launch]]
            outputs = {"all_gather": inputs, "reduce_scatter": node.meta["val"], "all_reduce": node.meta["val"]}[kind]
            if outputs[0].dtype == torch.uint8:  # a handle: an all-reduce of what is scattered here follows
                outputs = [torch.empty(-(-grad.shape[0] // shards), *grad.shape[1:]) for grad in inputs]
            size = sum(each.numel() * 4 for each in outputs) * (1 if kind == "all_reduce" else shards)
            found.append((kind, size, order[launch], order[node]))
    return sorted(found, key=lambda each: each[2])


def reported(graph):
    return [(c.kind, c.bytes, c.launch, c.wait) for c in graph.collectives]


@pytest.mark.usefixtures("ranks_64", "no_code")
@pytest.mark.parametrize("bucket", ["auto", "unit", "none"])
def test_an_8_layer_model_on_64_ranks(bucket):
    model = Layers(8)
    shard(model, "eager")
    captured = capture(model, torch.randn(4, 16), schedule=SchedulePolicy(bucket=bucket, cluster=CLUSTERS["H100"]))
    forward, backward = captured.graphs
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert (captured.world, captured.graph_breaks) == (64, ())
    for graph in captured.graphs:
        assert reported(graph) == walked(graph.module.graph, 64)
        assert graph.peak_unsharded_bytes <= graph.bound_bytes
        assert all(c.launch < c.wait < c.first_use for c in graph.collectives)
        assert graph.peak_unsharded_bytes == max(step.bytes for step in graph.memory)
    gathers = {"auto": 1, "unit": 9, "none": 18}[bucket]  # 18 matrices and biases, 9 units
    reductions = {"auto": 1, "unit": 9, "none": 18}[bucket]
    assert [c.kind for c in forward.collectives].count("all_gather") == gathers
    assert [c.kind for c in backward.collectives].count("reduce_scatter") == reductions
    names = sorted(name for name, _ in model.named_parameters())
    assert sorted(name for c in forward.collectives for name in c.params) == names
    reduced = [c for c in backward.collectives if c.kind == "reduce_scatter"]
    assert sorted(name for c in reduced for name in c.params) == names
    # 16 of 64 ranks hold one row each of a 16-row matrix, the others padding; biases are padded to 64 elements
    padded = 4 * (9 * 64 * 16 + 8 * 64 + 64 * 16)
    assert sum(c.bytes for c in forward.collectives) == sum(c.bytes for c in reduced) == padded


@pytest.mark.usefixtures("fake_group")
def test_the_code_of_inductor_keeps_the_order():
    """Launches and waits stand in the generated code as in the graph, and launches among matrix products, too.

    A product that follows a wait but reads nothing of it may come first.
    """
    model = Layers(4)
    shard(model, "eager", reshard_after_forward=True)
    for schedule in (SchedulePolicy(bucket="unit", prefetch=1), SchedulePolicy(bucket="none", prefetch=2)):
        for graph in capture(model, torch.randn(4, 16), schedule=schedule).graphs:
            for left_out in (["mm"], WAITS):
                code, nodes = in_code(graph.code), in_graph(graph.module.graph)
                assert [n for n in code if n not in left_out] == [n for n in nodes if n not in left_out]


@pytest.mark.usefixtures("fake_group")
def test_inductors_own_reordering_of_collectives_moves_none_of_ours():
    model = Layers(3)
    shard(model, "eager", reshard_after_forward=True)
    moves = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["reorder_compute_for_overlap", "sink_waits", "raise_comms"],
    }
    with config.patch(moves):
        graphs = capture(model, torch.randn(4, 16), schedule=SchedulePolicy(bucket="unit", prefetch=1)).graphs
    for graph in graphs:
        assert in_code(graph.code) == in_graph(graph.module.graph)


def in_graph(graph):
    names = {"addmm": "mm"}
    return [names.get(name, name) for name in sequence(graph, *LAUNCHES, *WAITS, "mm", "addmm")]


def in_code(code):
    body = code[code.index("def call(") :]
    found = re.findall(r"(?:ops\.fsdp_compiled\.(\w+)\.default\()|(?:extern_kernels\.(addmm|mm)\()", body)
    return [a or "mm" for a, _ in found]


@pytest.mark.usefixtures("fake_group", "no_code")
def test_hsdp_reports_reduce_scatters_and_all_reduces():
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Layers(2)
    shard(model, "eager", mesh=mesh)
    _, backward = capture(model, torch.randn(4, 16), schedule=SchedulePolicy(bucket="unit")).graphs
    kinds = [c.kind for c in backward.collectives if c.kind != "all_gather"]
    assert kinds.count("reduce_scatter") == kinds.count("all_reduce") == 3
    assert reported(backward) == walked(backward.module.graph, 2)
    scattered = [c for c in backward.collectives if c.kind == "reduce_scatter"]
    reduced = [c for c in backward.collectives if c.kind == "all_reduce"]
    assert sorted(c.bytes for c in reduced) == sorted(c.bytes // 2 for c in scattered)
    assert max(c.launch for c in reduced) < min(c.wait for c in reduced)  # waited for at the end


@pytest.mark.usefixtures("fake_group", "no_code")
def test_inference_and_a_graph_break():
    class Broken(Layers):
        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.last(x)

    model = fully_shard(Broken(0))
    with torch.no_grad():
        captured = capture(model, torch.randn(4, 16))
    assert [graph.kind for graph in captured.graphs] == ["inference", "inference"]
    assert len(captured.graph_breaks) == 1
    # The call of the unit is broken, so its eager hooks gather it, outside the two graphs.
    assert not any(graph.collectives for graph in captured.graphs)
    print(captured)


@pytest.mark.usefixtures("fake_group", "no_code")
def test_capture_leaves_gradients_and_random_state_alone():
    model = Layers(1)
    shard(model, "eager")
    marks = {param: torch.zeros_like(param) for param in model.parameters()}
    for param, grad in marks.items():
        param.grad = grad
    state = torch.get_rng_state()
    capture(nn.Sequential(model), torch.randn(4, 16), loss=lambda y: y.square().mean())
    assert all(param.grad is marks[param] for param in model.parameters())
    torch.randn(4, 16)
    assert not torch.equal(state, torch.get_rng_state())


class Averages(nn.Module):
    """A layer with a running mean of what it returns, in a buffer that forward replaces or writes to."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.layer, self.replaces = nn.Linear(16, 16), replaces
        self.register_buffer("mean", torch.ones(16))

    def forward(self, x):
        x = self.layer(x)
        mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.mean = mean if self.replaces else self.mean.copy_(mean)
        return x - self.mean


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("replaces", [False, True])
def test_capture_leaves_buffers_alone_if_it_computes_nothing(replaces):
    model = fully_shard(Averages(replaces))
    mean = model.mean
    capture(model, torch.randn(4, 16), code=False)
    assert model.mean is mean and torch.equal(mean, torch.ones(16))


@pytest.mark.usefixtures("fake_group", "no_code")
@pytest.mark.parametrize("syncs", [False, True])
def test_capture_leaves_gradients_alone_that_are_not_reduced_yet(syncs):
    model, x = Layers(1), torch.randn(4, 16)
    shard(model, "eager")
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    before = {param: unsharded.clone() for param, (unsharded, _) in model.get_pending_gradients().items()}
    model.set_requires_gradient_sync(syncs)
    capture(model, x)
    after = model.get_pending_gradients()
    assert len(before) == 4 and after.keys() == before.keys()
    assert all(torch.equal(after[param][0], grad) for param, grad in before.items())


@pytest.mark.usefixtures("fake_group", "no_code")
def test_keeping_parameters_saves_their_second_gather():
    model = Layers(4)
    shard(model, "eager", reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    some = 3 * 16 * 16 * 2 + 100
    gathers = []
    for kept in (0, some, 10**6):
        call, recorder = record(model, SchedulePolicy(bucket="none", keep_unsharded_bytes=kept))
        call(torch.randn(4, 16)).sum().backward()
        gathers.append(sequence(recorder.only("backward", after=True), *LAUNCHES).count(LAUNCHES[0]))
    assert gathers[0] > gathers[1] > gathers[2] == 0
    forward, backward = capture(
        model, torch.randn(4, 16), schedule=SchedulePolicy(bucket="none", keep_unsharded_bytes=some)
    ).graphs
    assert 0 < forward.kept_bytes <= some
    assert [c.kind for c in backward.collectives].count("all_gather") == gathers[1]


@pytest.mark.usefixtures("fake_group")
def test_a_bound_that_is_too_small_for_one_parameter():
    model = Layers(1)
    shard(model, "eager", reshard_after_forward=True)
    with pytest.raises(Exception, match=r"SchedulePolicy.in_flight_bytes: expected at least 1088 .*, got 1000"):
        capture(model, torch.randn(4, 16), schedule=SchedulePolicy(in_flight_bytes=1000))


@pytest.mark.usefixtures("ranks_64")
def test_collectives_of_tensor_parallelism_take_their_time():
    mesh, cluster = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp")), CLUSTERS["H100"]
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False), nn.ReLU())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    captured = capture(model, torch.randn(64, 256), code=False, schedule=SchedulePolicy(cluster=cluster))
    (reduced,) = (k for graph in captured.graphs for k in graph.kernels if k.work == "other collectives")
    assert reduced.name == "_c10d_functional::all_reduce 64x256" and reduced.bytes == 64 * 256 * 4
    expected_us = cluster.intra.collective_us(64 * 256 * 4, 8, reduces=True, passes=2)
    assert captured.step_parts_us["other collectives"] == reduced.estimate_us == pytest.approx(expected_us)
    assert sum(captured.step_parts_us.values()) == pytest.approx(captured.step_us)


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_clipping_takes_the_links_of_the_mesh(ranks_64, tensor_parallel):
    mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    if tensor_parallel:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])  # of ranks 0, 8, 16 and so on, each of another node
    schedule = SchedulePolicy(cluster="H100")
    took, clipped = (
        capture(model, torch.ones(4, 16), code=False, schedule=schedule, optimizer="sgd", clip_gradients=clips)
        for clips in (False, True)
    )
    norms_us = [clipped.cluster.link_of(ranks).collective_us(4, 8, passes=2) for ranks in (range(0, 64, 8), range(8))]
    reads_us = clipped.cluster.memory_us(3 * clipped.memory.reduced_bytes)
    assert clipped.optimizer_us - took.optimizer_us == pytest.approx(sum(norms_us[: 1 + tensor_parallel]) + reads_us)
    assert clipped.world == (64 if tensor_parallel else 8)


def test_bad_input():
    with pytest.raises(TypeError, match="model: expected an nn.Module, got 3 of int"):
        capture(3)
    with pytest.raises(
        ValueError, match="Layers: expected a sharded model, got one without any unit; call fully_shard"
    ):
        capture(Layers(1), torch.randn(4, 16))


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("with_regions", [False, True])
@thorough(when=lambda with_regions: not with_regions)
def test_attention_that_backward_computes_again_takes_its_time_again(with_regions):
    def graphs(checkpointing):
        model, batch = Case(layers=2, width=128, seq=128, batch=1, checkpointing=checkpointing).model()
        compile(model, regions=list(model.blocks) if with_regions else "off")
        return capture(model, *batch, code=False).graphs

    forward, backward = graphs("none")
    assert backward.work_us("attention") > forward.work_us("attention") > 0
    again = [graph.work_us("attention") for graph in graphs("blocks")]
    assert again == pytest.approx(
        [forward.work_us("attention"), backward.work_us("attention") + forward.work_us("attention")]
    )
    saved = [graph.work_us("attention") for graph in graphs("selective")]
    assert saved == pytest.approx([forward.work_us("attention"), backward.work_us("attention")])
