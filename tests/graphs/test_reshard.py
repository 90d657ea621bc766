"""Which parameters stay unsharded from forward to backward, on plain records."""

from __future__ import annotations

import expecttest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compiled.passes import Normalize
from fsdp_compiled.passes.reshard import Candidate, Reshard, decide_kept
from fsdp_compiled.sharding.spec import Group
from tests.support.builder import Builder, spec

add = torch.ops.aten.add.Tensor
smaller = {"post_forward": Group("small", 2)}


def test_the_largest_gather_time_per_byte_first():
    candidates = [Candidate("big", 1000, 20.0), Candidate("small", 10, 10.0), Candidate("slow", 500, 100.0)]
    assert decide_kept(candidates, 0) == set()
    assert decide_kept(candidates, 10) == {"small"}
    assert decide_kept(candidates, 509) == {"small"}
    assert decide_kept(candidates, 510) == {"small", "slow"}
    assert decide_kept(candidates, 10**6) == {"big", "small", "slow"}


def test_what_does_not_fit_is_passed_over():
    assert decide_kept([Candidate("slow", 500, 100.0), Candidate("next", 100, 10.0)], 200) == {"next"}


class SmallerGroup(expecttest.TestCase):
    def test_backward_gathers_what_forward_left(self):
        b = Builder(Reshard())
        whole = b.unshard(b.input("s", 2), spec((7,), "w", **smaller))
        self.assertExpectedInline(
            b.text(b.call(add, whole, whole)),
            """\
unshard_default = unshard(s, w) [7] float32
take_shard_default = take_shard(unshard_default, 0, 2, small) [4] float32
unshard_default_1 = unshard(take_shard_default, w) [7] float32
add_tensor = add(unshard_default_1, unshard_default_1) [7] float32""",
        )
        once = str(b.graph)
        Reshard()(b.graph)
        assert str(b.graph) == once
        tags = {node.name: node.meta.get("recompute") for node in b.graph.nodes}
        assert tags["take_shard_default"] is CheckpointPolicy.MUST_SAVE
        assert tags["unshard_default"] is tags["unshard_default_1"] is CheckpointPolicy.MUST_RECOMPUTE

    def test_forward_does_not_gather_twice(self):
        b = Builder(Reshard(), Normalize())
        whole = b.unshard(b.input("s", 2), spec((7,), "w", **smaller))
        self.assertExpectedInline(
            b.text(b.call(add, whole, whole)),
            """\
unshard_default = unshard(s, w) [7] float32
add_tensor = add(unshard_default, unshard_default) [7] float32""",
        )


def test_what_an_extension_makes_of_its_gathers_is_made_again_in_backward():
    b = Builder(Reshard())
    gathered = b.unshard(b.input("s", 2), spec((8,), "w"))
    product = b.call(torch.ops.aten.mul.Tensor, gathered, gathered)
    whole = b.op("with_gradient", (product, b.input("leaf", 2), None, None, spec((8,), "w").encode()))
    b.text(b.call(add, whole, whole))
    assert [node.name for node in b.graph.nodes if node.op == "call_function"] == [
        "unshard_default",
        "mul_tensor",
        "add_tensor",
    ]
    assert product.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE
