"""Which values get memory, and what fused kernels read and write, by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import nn

from fsdp_compiled import fully_shard
from fsdp_compiled.inspect import OPTIMIZERS, capture
from fsdp_compiled.inspect.lifetimes import GraphMemory
from fsdp_compiled.passes.cost import CLUSTERS
from fsdp_compiled.testing.llama import Config, Llama
from tests.support.builder import Builder
from tests.support.training import with_regions
from tests.support.variants import thorough

aten = torch.ops.aten


def _traffic(b, *returned):
    b.graph.output(returned)
    return {node.name: size for node, size in GraphMemory("inference", b.graph).traffic().items()}


def _peak(b, *returned):
    b.graph.output(returned)
    return max(accumulate(event.sign * event.what.bytes for event in GraphMemory("inference", b.graph).events()))


def test_a_chain_reads_its_input_once_and_writes_its_end():
    b = Builder()
    x = b.input("x", 100, 10)
    end = b.call(aten.mul.Tensor, b.call(aten.exp.default, b.call(aten.relu.default, x)), x)
    assert _traffic(b, end) == {"mul_tensor": 2 * 4000}


def test_kernels_lie_between_products():
    b = Builder()
    x, w = b.input("x", 100, 10), b.input("w", 10, 10)
    product = b.call(aten.mm.default, b.call(aten.relu.default, x), w)
    end = b.call(aten.add.Tensor, product, x)
    assert _traffic(b, end) == {"relu_default": 2 * 4000, "add_tensor": 3 * 4000}


def test_a_lookup_reads_what_it_returns():
    b = Builder()
    table, index = b.input("table", 5000, 10), b.input("index", 100, dtype=torch.int64)
    found = b.call(aten.embedding.default, table, index)
    assert _traffic(b, b.call(aten.relu.default, found)) == {"relu_default": 2 * 4000}


def test_what_is_scattered_into_has_memory():
    b = Builder()
    grads, index = b.input("grads", 100, 10), b.input("index", 100, dtype=torch.int64)
    table = b.call(aten.full.default, [5000, 10], 0.0)
    added = b.call(aten.index_put.default, table, [index], grads, True)
    assert _peak(b, b.call(aten.sum.dim_IntList, added, [0])) == 5000 * 10 * 4 + 10 * 4


@pytest.mark.parametrize("dtype, freed_at", [(torch.float32, "mm_default_4"), (torch.bfloat16, "mm_default_2")])
def test_memory_is_kept_for_a_result_of_its_size_and_dtype(dtype, freed_at):
    b = Builder()
    x, thin, one = b.input("x", 64, 64), b.input("thin", 64, 1), b.input("one", 1, 1)
    wide, tall = b.input("wide", 64, 640), b.input("tall", 640, 64)
    first = b.call(aten.mm.default, b.call(aten.mm.default, x, wide), tall)
    second = b.call(aten.mm.default, b.call(aten.mm.default, first, thin), one)
    y, v = b.input("y", 64 * 4 // dtype.itemsize, 64, dtype=dtype), b.input("v", 64, 64, dtype=dtype)
    b.graph.output((second, b.call(aten.mm.default, y, v)))
    events = GraphMemory("inference", b.graph).events()
    assert [event.at for event in events if event.what.name == first.name] == [first.name, freed_at]


@pytest.mark.parametrize("lies_between", [False, True])
def test_what_its_kernel_alone_reads_has_no_memory(lies_between):
    b = Builder()
    x, w = b.input("x", 64, 64), b.input("w", 64, 64)
    product = b.call(aten.mm.default, x, w)
    shared = b.call(aten.exp.default, product)  # which Inductor does not compute again behind the next product
    other = b.call(aten.mm.default, product, w)
    first = b.call(aten.mul.Tensor, shared, other)
    last = b.call(aten.add.Tensor, shared, b.call(aten.mm.default, first, w) if lies_between else other)
    b.graph.output(tuple(b.call(aten.mm.default, each, w) for each in (first, last)))
    made = [event.what.name for event in GraphMemory("inference", b.graph).events() if event.sign > 0]
    assert (shared.name in made) is lies_between
    assert (made.index(last.name) == made.index(first.name) + 1) is not lies_between


@pytest.mark.parametrize(("between", "is_near"), [(aten.t.default, True), (aten.mm.default, False)])
def test_what_reads_one_parameter_is_a_kernel_where_few_others_lie_between(between, is_near):
    b = Builder()
    x, w, table = b.input("x", 64, 64), b.input("w", 64, 64), b.input("table", 64, 64)
    first = b.call(aten.add.Tensor, b.call(aten.mm.default, x, w), table)
    last = product = b.call(aten.mm.default, first, w)
    for _ in range(70):
        last = b.call(between, last, w) if between is aten.mm.default else b.call(between, last)
    second = b.call(aten.add.Tensor, b.call(aten.mm.default, w, x), table)
    b.graph.output((last, b.call(aten.mm.default, second, w)))
    made = [event.what.name for event in GraphMemory("inference", b.graph).events() if event.sign > 0]
    assert (made.index(first.name) < made.index(second.name) < made.index(product.name)) is is_near


def test_of_two_values_that_it_could_be_computed_with_it_is_the_nearer():
    b = Builder()
    x, w, table = b.input("x", 64, 64), b.input("w", 64, 64), b.input("table", 64, 64)
    far = b.call(aten.add.Tensor, b.call(aten.mm.default, x, w), table)
    near = b.call(aten.add.Tensor, b.call(aten.mm.default, far, w), table)
    value = b.call(aten.mul.Tensor, x, table)
    b.graph.output(tuple(b.call(aten.mm.default, each, w) for each in (near, value)))
    made = [event.what.name for event in GraphMemory("inference", b.graph).events() if event.sign > 0]
    assert made.index(value.name) == made.index(near.name) + 1


def test_a_region_frees_what_it_is_given_when_it_has_read_it():
    b = Builder()
    x, kept, freed = b.input("x", 64, 64), b.input("kept", 64, 64), b.input("freed", 64, 64)
    first = b.call(aten.mm.default, x, freed)
    b.graph.output((b.call(aten.mm.default, first, kept),))
    events = list(GraphMemory("inference", b.graph, given={freed: 64 * 64 * 4}).events())
    assert [(event.at, event.sign) for event in events if event.what.name == freed.name] == [
        (freed.name, 1),
        (first.name, -1),
    ]
    assert not any(event.what.name == kept.name for event in events)


@pytest.mark.usefixtures("fake_group")
def test_a_step_is_its_graphs_and_the_optimizer():
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    fully_shard(model)
    captured = {kind: capture(model, torch.ones(4, 16), code=False, optimizer=kind) for kind in OPTIMIZERS}
    shard, cluster = 16 * 16 * 4 // 4, captured["sgd"].cluster
    for kind, each in captured.items():
        assert each.optimizer_us == cluster.memory_us(OPTIMIZERS[kind].traffic * shard) > 0
        host_us = cluster.launch_us * sum(len(graph.kernels) for graph in each.graphs) + cluster.parameter_us
        assert host_us > cluster.parameter_us > 0  # of the one parameter
        assert each.step_us == pytest.approx(sum(g.total_us for g in each.graphs) + each.optimizer_us + host_us)
        assert each.step_parts_us["host"] == pytest.approx(host_us)
        assert sum(each.step_parts_us.values()) == pytest.approx(each.step_us)
        assert "time of a step, by estimate: all" in str(each)
    assert captured["adamw"].step_us > captured["sgd"].step_us
    clipped = capture(model, torch.ones(4, 16), code=False, optimizer="sgd", clip_gradients=True)
    norm_us = cluster.link_of(range(4)).collective_us(4, 4, passes=2)
    clipping_us = clipped.optimizer_us - captured["sgd"].optimizer_us
    assert clipping_us == pytest.approx(norm_us + cluster.memory_us(3 * shard))
    assert clipped.step_us == pytest.approx(captured["sgd"].step_us + clipping_us)
    on_a_gpu = replace(clipped, cluster=CLUSTERS["H100"])  # whose host takes no time: none below zero by rounding
    assert all(replace(on_a_gpu, optimizer_us=us / 7).step_parts_us["host"] >= 0 for us in range(1, 50))


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("regions", [False, True])
@thorough(when=lambda regions: not regions)
def test_parts_of_a_step_are_found_in_regions_too(regions):
    config = Config(width=64, layers=3, heads=2, kv_heads=1, hidden=96, max_seq=32)
    model = Llama(config)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if regions:
        with_regions(model, model.blocks)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    parts = capture(model, tokens, tokens, code=False).step_parts_us
    assert all(parts[name] > 0 for name in ("matrix products", "attention", "fused kernels", "optimizer"))
    products = 2 * 64 * (3 * (64 * 2 + 32 * 2 + 3 * 96) + 256)  # FLOPs of a token in forward
    cluster, count = CLUSTERS["CPU"], 3 * 3 * 7 + 3
    assert parts["matrix products"] >= 3 * 1e6 * 64 * products / (cluster.efficiency * cluster.flops_32bit)
    assert parts["matrix products"] >= count * cluster.kernel_us
