from __future__ import annotations

import expecttest
import torch

from fsdp_compiled.passes import Normalize
from tests.support.builder import Builder, spec

add = torch.ops.aten.add.Tensor
BF16 = torch.bfloat16


class NormalizedText(expecttest.TestCase):
    def test_a_parameter_read_twice_is_gathered_once(self):
        b = Builder(Normalize())
        shard = b.input("s", 2)
        first, second = b.unshard(shard, spec((8,), "w")), b.unshard(shard, spec((8,), "w"))
        other = b.unshard(b.input("t", 2), spec((8,), "v"))
        self.assertExpectedInline(
            b.text(b.call(add, first, second), other),
            """\
unshard_default = unshard(s, w) [8] float32
unshard_default_2 = unshard(t, v) [8] float32
add_tensor = add(unshard_default, unshard_default) [8] float32""",
        )

    def test_gathers_in_other_dtypes_stay_apart(self):
        b = Builder(Normalize())
        shard = b.input("s", 2)
        wide, narrow = b.unshard(shard, spec((8,), "w")), b.unshard(shard, spec((8,), "w", dtype=BF16))
        self.assertExpectedInline(
            b.text(wide, narrow),
            """\
unshard_default = unshard(s, w) [8] float32
unshard_default_1 = unshard(s, w) [8] bfloat16""",
        )

    def test_a_sum_of_three_reductions_is_one_reduction_of_the_sum(self):
        b = Builder(Normalize())
        parts = [b.reduce_grad(b.input(f"g{i}", 8), spec((8,), "w")) for i in range(3)]
        total = b.call(add, b.call(add, parts[0], parts[1]), parts[2])
        self.assertExpectedInline(
            b.text(total),
            """\
add_tensor_2 = add(g0, g1) [8] float32
add_tensor_3 = add(add_tensor_2, g2) [8] float32
reduce_grad_default_4 = reduce_grad(add_tensor_3, w) [2] float32""",
        )

    def test_a_reduction_that_is_also_used_alone_stays(self):
        b = Builder(Normalize())
        first, second = (b.reduce_grad(b.input(f"g{i}", 8), spec((8,), "w")) for i in range(2))
        self.assertExpectedInline(
            b.text(b.call(add, first, second), first),
            """\
reduce_grad_default = reduce_grad(g0, w) [2] float32
reduce_grad_default_1 = reduce_grad(g1, w) [2] float32
add_tensor = add(reduce_grad_default, reduce_grad_default_1) [2] float32""",
        )

    def test_the_sum_is_taken_in_the_reduce_dtype(self):
        b = Builder(Normalize())
        parts = [b.reduce_grad(b.input(f"g{i}", 8, dtype=BF16), spec((8,), "w")) for i in range(2)]
        self.assertExpectedInline(
            b.text(b.call(add, *parts)),
            """\
convert_element_type_default = convert_element_type(g0, torch.float32) [8] float32
convert_element_type_default_1 = convert_element_type(g1, torch.float32) [8] float32
add_tensor_1 = add(convert_element_type_default, convert_element_type_default_1) [8] float32
reduce_grad_default_2 = reduce_grad(add_tensor_1, w) [2] float32""",
        )


def test_twice_is_once():
    b = Builder(Normalize())
    shard = b.input("s", 2)
    b.text(b.call(add, b.unshard(shard, spec((8,), "w")), b.unshard(shard, spec((8,), "w"))))
    once = str(b.graph)
    Normalize()(b.graph)
    assert str(b.graph) == once
