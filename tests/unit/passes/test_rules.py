"""Broken graphs are refused, with a message that names the node."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fsdp_compiled.passes import Schedule, SchedulePolicy
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.passes.rules import GraphError, verify
from tests.support.builder import Builder, spec


def _lowered():
    b = Builder(Schedule(SchedulePolicy(bucket="unit")))
    first = b.unshard(b.input("s1", 2), spec((8,), "w1"))
    second = b.unshard(b.input("s2", 4), spec((16,), "w2"))
    third = b.unshard(b.input("s3", 4), spec((16,), "w3", unit="other"))
    b.text(first, second, third)
    return b.graph


def _reduced(**how):
    b = Builder(Schedule(SchedulePolicy(bucket="unit")))
    b.text(b.reduce_grad(b.input("g", 8), spec((8,), "w", **how)))
    return b.graph


def _one(graph, wanted):
    return next(node for node in graph.nodes if wanted(node))


def _refused(graph, message):
    with pytest.raises(GraphError, match=message):
        verify(graph)


def test_a_graph_of_ours_is_clean():
    verify(_lowered())
    verify(_reduced(replicas=2, device="cuda"))


def test_a_removed_wait():
    graph = _lowered()
    wait = _one(graph, nodes.is_wait)
    for item in list(wait.users):
        item.replace_all_uses_with(nodes.source_of(wait))
        graph.erase_node(item)
    graph.erase_node(wait)
    with pytest.raises(GraphError, match="after X: launch and wait: launch_all_gather_default has 0 waits"):
        verify(graph, "after X")


def test_a_read_that_does_not_wait():
    graph = _lowered()
    launch = _one(graph, nodes.is_launch)
    with graph.inserting_after(_one(graph, nodes.is_wait)):
        reader = graph.call_function(torch.ops.aten.neg.default, (launch,))
    output = _one(graph, lambda node: node.op == "output")
    output.args = ((*output.args[0], reader),)
    _refused(graph, f"{reader.name} reads {launch.name} without waiting for it")


def test_a_launch_after_its_use():
    graph = _lowered()
    launch = _one(graph, nodes.is_launch)
    _one(graph, lambda node: node.op == "output").prepend(launch)
    _refused(graph, f"order: wait_all_gather_default uses {launch.name}, which stands after it")


def test_a_wait_for_nothing():
    graph = _lowered()
    wait = _one(graph, nodes.is_wait)
    wait.args = (_one(graph, lambda node: node.op == "placeholder"), wait.args[1])
    _refused(graph, "has 0 waits|wait_all_gather_default waits for s1, which launches nothing")


def test_a_wait_for_another_bucket():
    graph = _lowered()
    first, second = filter(nodes.is_wait, graph.nodes)
    first.args = (first.args[0], second.args[1])
    _refused(graph, f"{first.name} waits for another bucket than launch_all_gather_default")


def test_a_bucket_of_other_tensors():
    graph = _lowered()
    launch = _one(graph, nodes.is_launch)
    launch.args = (launch.args[0][::-1], launch.args[1])
    _refused(graph, f"bucket: {launch.name} takes s2 of 4 elements for w1, expected 2")
    launch.args = (launch.args[0][:1], launch.args[1])
    _refused(graph, f"{launch.name} takes 1 tensors for 2 parameters")


def test_a_stage_that_is_left_out():
    graph = _reduced(replicas=2)
    second = [node for node in graph.nodes if nodes.is_launch(node)][1]
    (handle,) = nodes.inputs_of(second)
    second.args = ([_one(graph, lambda node: node.op == "placeholder")], second.args[1])
    _refused(graph, f"stages: {second.name} continues g, expected the handle of a wait_reduce_scatter")
    second.args = ([handle], second.args[1])
    verify(graph)


def test_a_result_that_is_not_there():
    graph = _lowered()
    item = _one(graph, lambda node: node.name == "getitem_1")
    item.args = (item.args[0], 2)
    _refused(graph, "getitem_1 takes result 2 of 2")


@pytest.mark.parametrize("index", [0, 1])
def test_a_result_that_is_not_there_in_a_part(index):
    with mock.patch.object(nodes, "PART", 1):
        graph = _lowered()
    results = (node for node in graph.nodes if nodes.is_getitem(node) and nodes.is_part(nodes.source_of(node)))
    (item,) = (node for node in results if nodes.index_of(node) == index)
    item.args = (item.args[0], 1)
    _refused(graph, f"{item.name} takes result 1 of 1")


def test_a_wait_that_is_read_as_a_tensor():
    graph = _lowered()
    item = _one(graph, nodes.is_getitem)
    item.target, item.args = torch.ops.aten.neg.default, (item.args[0],)
    _refused(graph, f"{item.name} reads wait_all_gather_default as a tensor")
