"""What ``torch.profiler`` shows of a step: a range of ours, with the units' names, around every collective."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import fully_shard
from fsdp_compiled.collectives import backend
from tests.support.training import compiled, without_codegen


class Net(nn.Module):
    """Four units of one matrix each inside the outermost one, which has one too."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x).sum()


@pytest.fixture
def ranks_4():
    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def sharded(mesh=None, mesh_dims=()):
    mesh = init_device_mesh("cpu", mesh, mesh_dim_names=mesh_dims) if mesh else None
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def profiled(step):
    """The events of one step; one before it has made and compiled all there is to make."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    return list(profiler.events())


def ranges_of(events):
    return Counter(event.name.removeprefix("FSDP::") for event in events if event.name.startswith("FSDP::"))


def outside(events):
    """The collectives of torch that lie in no range of ours."""
    alone = []
    for event in events:
        if event.name.startswith("c10d::"):
            parents = [event]
            while parents[-1].cpu_parent is not None:
                parents.append(parents[-1].cpu_parent)
            if not any(parent.name.startswith("FSDP::") for parent in parents):
                alone.append(event.name)
    assert any(event.name.startswith("c10d::") for event in events)
    return alone


@pytest.mark.usefixtures("ranks_4")
def test_hooks_name_each_unit():
    model = sharded()
    events = profiled(lambda: model(torch.ones(2, 8)).backward())
    assert not outside(events)
    blocks = [f"blocks.{number}" for number in range(4)]
    twice = ("all_gather", "all_gather_wait")  # before forward, and before backward
    once = (
        "pre_forward",
        "post_forward",
        "pre_backward",
        "reduce_scatter",
        "reduce_scatter_wait",
        "gradient_copy_out",
    )
    want = Counter({f"{what} ({unit})": 1 for what in (*twice, *once) for unit in (*blocks, "Net")})
    want += Counter({f"{what} ({unit})": 1 for what in twice for unit in blocks})
    # The input needs no gradient, so that the first block's reduction waits for the end of backward.
    want += Counter({f"post_backward ({unit})": 1 for unit in (*blocks, "Net")})
    assert ranges_of(events) == want


@pytest.mark.usefixtures("ranks_4")
def test_a_bucket_of_a_graph_names_the_units_that_it_spans():
    model = sharded()
    call = compiled(model)
    events = profiled(lambda: call(torch.ones(2, 8)).backward())
    assert not outside(events)
    everything, inner = (
        "blocks.0 to Net, 5 units",
        "blocks.3, blocks.2, blocks.1",
    )  # backward reads them in this order
    found = ranges_of(events)
    for what in ("all_gather", "all_gather_wait", "all_gather_copy_out"):
        assert {name: count for name, count in found.items() if name.startswith(f"{what} (")} == {
            f"{what} ({everything})": 1,
            f"{what} ({inner})": 1,
        }
    for what in ("gradient_copy_in", "reduce_scatter", "reduce_scatter_wait", "gradient_copy_out"):
        assert found[f"{what} (Net to blocks.0, 5 units)"] == 1


@pytest.mark.parametrize("mode", ["eager", "full"])
@pytest.mark.usefixtures("ranks_4")
def test_all_reduces_over_replicas_have_ranges_of_their_own(mode):
    model = sharded((2, 2), ("replicas", "shards"))
    call = compiled(model) if mode == "full" else model
    events = profiled(lambda: call(torch.ones(2, 8)).backward())
    assert not outside(events)
    found = ranges_of(events)
    for what in ("reduce_scatter", "all_reduce", "all_reduce_wait"):
        assert any(name.startswith(f"{what} (") for name in found), what


@pytest.mark.usefixtures("ranks_4")
def test_operators_that_meet_no_pass_have_ranges_too():
    model = sharded()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    events = profiled(lambda: call(torch.ones(2, 8)).backward())
    assert not outside(events)
    assert ranges_of(events)["reduce_scatter (blocks.3)"] == 1


@pytest.mark.usefixtures("ranks_4")
def test_ranges_are_in_no_graph_even_while_a_profiler_is_on():
    graphs = []

    def backend(gm, inputs, **kwargs):
        graphs.append(gm.graph)
        return without_codegen(gm, inputs, **kwargs)

    model = sharded()
    torch._dynamo.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        torch.compile(model, backend=backend, fullgraph=True)(torch.ones(2, 8)).backward()
    (graph,) = graphs
    assert not any("record_function" in str(node.target) for node in graph.nodes)


def test_without_a_profiler_no_range_is_opened(monkeypatch):
    monkeypatch.delattr(backend, "record_function")
    with backend.profiled("all_gather", "Net.blocks.0"):
        pass
