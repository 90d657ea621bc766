"""Which nodes each launch and wait has to follow in what Inductor makes of a graph."""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.passes import Pin, Schedule, SchedulePolicy
from fsdp_compiled.passes import pin as pin_module
from fsdp_compiled.passes.graph import nodes
from tests.support.builder import Builder, spec

mm, neg = torch.ops.aten.mm.default, torch.ops.aten.neg.default


def two_products(b):
    """Two matrices in units of their own, each all-gathered for one product."""
    x = b.input("x", 8, 8)
    for name in ("w1", "w2"):
        weight = b.unshard(b.input(f"primals_{name}", 2, 8), spec((8, 8), name, unit=name))
        x = b.call(mm, b.call(neg, x), weight)
    return x


def bound(monkeypatch, graph):
    """Run the pass and return what it binds, by names."""
    given = []
    monkeypatch.setattr(pin_module, "preserve_node_ordering", lambda graph, each: given.append(each))
    Pin()(graph)
    (found,) = given
    return {node.name: {each.name for each in after} for node, after in found.items()}


def test_each_launch_and_wait_follows_the_one_before_it_and_the_product_between(monkeypatch):
    b = Builder(Schedule(SchedulePolicy(bucket="unit", prefetch=1)))
    b.text(two_products(b))
    first, second = "all_gather_default", "all_gather_default_1"
    order = [f"launch_{first}", f"launch_{second}", f"wait_{first}", "mm_default", f"wait_{second}", "mm_default_1"]
    assert [node.name for node in b.graph.nodes if node.name in order] == order
    assert bound(monkeypatch, b.graph) == {
        f"launch_{second}": {f"launch_{first}"},
        f"wait_{first}": {f"launch_{second}"},  # not its own launch, of which it takes the buffer
        f"wait_{second}": {"mm_default"},  # which follows the wait before by its input
    }


def test_a_list_is_followed_by_one_of_its_results(monkeypatch):
    b = Builder(Schedule(SchedulePolicy(bucket="unit")))
    gathered = [
        b.unshard(b.input(f"primals_{name}", 2, 8), spec((8, 8), name, unit=unit))
        for name, unit in (("w1", "u"), ("w2", "u"), ("w3", "v"))
    ]
    b.text(b.call(mm, gathered[0], gathered[2]), gathered[1])
    waits = [node for node in b.graph.nodes if nodes.is_wait(node)]
    results = {node.name for node in waits[0].users}
    (after,) = (after for name, after in bound(monkeypatch, b.graph).items() if name == waits[1].name)
    assert len(results) == 2 and len(after) == 1 and after < results


def test_a_reduction_stays_behind_the_product_that_it_does_not_read(monkeypatch):
    b = Builder(Schedule(SchedulePolicy(bucket="unit")))
    grad = b.call(mm, b.input("x", 8, 8), b.input("y", 8, 8))
    reduced = b.reduce_grad(grad, spec((8, 8), "w"))
    b.text(reduced, b.call(mm, b.input("z", 8, 8), grad))
    launch, product, wait = "launch_reduce_scatter_default", "mm_default_1", "wait_reduce_scatter_default"
    assert [node.name for node in b.graph.nodes if node.name in (launch, product, wait)] == [launch, product, wait]
    assert bound(monkeypatch, b.graph) == {wait: {product}}


def test_a_graph_is_bound_once(monkeypatch):
    b = Builder(Schedule(SchedulePolicy(bucket="unit")))
    b.text(two_products(b))
    fx.GraphModule(torch.nn.Module(), b.graph)  # which holds what nodes are bound by
    assert not nodes.is_pinned(b.graph)
    Pin()(b.graph)
    assert nodes.is_pinned(b.graph)
    given = []
    monkeypatch.setattr(pin_module, "preserve_node_ordering", lambda *each: given.append(each))
    Pin()(b.graph)
    assert not given
