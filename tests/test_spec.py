"""Broken graphs are refused, with a message that names the node."""

from __future__ import annotations

import pytest
import torch

from fsdp_compiled.passes import Bucket, Lower, Reorder, SchedulePolicy, ir
from fsdp_compiled.passes.spec import GraphError, verify
from tests.builder import Builder, route


def _lowered():
    b = Builder(Bucket(SchedulePolicy(bucket="unit")), Lower(), Reorder())
    first = b.unshard(b.input("s1", 2), route((8,), "w1"))
    second = b.unshard(b.input("s2", 4), route((16,), "w2"))
    third = b.unshard(b.input("s3", 4), route((16,), "w3", unit="other"))
    b.text(first, second, third)
    return b.graph


def _one(graph, wanted):
    return next(node for node in graph.nodes if wanted(node))


def test_a_graph_of_ours_is_clean():
    verify(_lowered())


def test_a_removed_wait():
    graph = _lowered()
    wait = _one(graph, ir.is_wait)
    wait.replace_all_uses_with(ir.source_of(wait))
    graph.erase_node(wait)
    with pytest.raises(GraphError, match="after X: launch and wait: all_gather_into_tensor_default has 0 waits"):
        verify(graph, "after X")


def test_gradients_on_their_way_to_the_host():
    b = Builder(Bucket(SchedulePolicy(bucket="unit")), Lower(), Reorder())
    part = b.reduce_grad(b.input("g", 8, device="cuda"), route((8,), "w", device="cuda"))
    b.text(part)
    arrival = _one(b.graph, ir.is_arrival)
    arrival.replace_all_uses_with(ir.source_of(arrival))
    with pytest.raises(GraphError, match="reshape_default_3 reads send_to_host_default without waiting for it"):
        verify(b.graph)
    b.graph.erase_node(arrival)
    with pytest.raises(GraphError, match="launch and wait: send_to_host_default has 0 waits"):
        verify(b.graph)


def test_a_read_that_does_not_wait():
    graph = _lowered()
    launch = _one(graph, ir.is_launch)
    with graph.inserting_after(_one(graph, ir.is_wait)):
        reader = graph.call_function(torch.ops.aten.neg.default, (launch,))
    output = _one(graph, lambda node: node.op == "output")
    output.args = ((*output.args[0], reader),)
    with pytest.raises(GraphError, match=f"{reader.name} reads {launch.name} without waiting for it"):
        verify(graph)


def test_a_launch_after_its_use():
    graph = _lowered()
    launch = _one(graph, ir.is_launch)
    _one(graph, lambda node: node.op == "output").prepend(launch)
    with pytest.raises(GraphError, match=f"order: wait_tensor_default uses {launch.name}, which stands after it"):
        verify(graph)


def test_a_wait_for_nothing():
    graph = _lowered()
    wait = _one(graph, ir.is_wait)
    wait.args = (_one(graph, lambda node: node.op == "placeholder"),)
    with pytest.raises(GraphError, match="has 0 waits|wait_tensor_default waits for s1, which launches nothing"):
        verify(graph)


@pytest.mark.parametrize(
    ("sizes", "what"), [([2, 5], "do not tile"), ([3, 4], "do not tile"), ([7, -1], "do not tile")]
)
def test_bucket_offsets_that_overlap_or_leave_gaps(sizes, what):
    graph = _lowered()
    split = _one(graph, ir.is_bucket_split)
    split.args = (split.args[0], sizes, split.args[2])
    with pytest.raises(GraphError, match=f"bucket offsets: {split.name} cuts .* of length 6 into .*{what}"):
        verify(graph)


def test_a_piece_that_is_not_there():
    graph = _lowered()
    item = _one(graph, lambda node: node.name == "getitem_1")
    item.args = (item.args[0], 2)
    with pytest.raises(GraphError, match="getitem_1 takes piece 2 of 2"):
        verify(graph)
