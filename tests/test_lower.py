"""The lowered graph as text."""

from __future__ import annotations

import expecttest
import torch
from fsdp_compiled.passes.route import Reduction, reduction_for
from fsdp_compiled.passes.survey import cluster_of

from fsdp_compiled.passes import Bucket, Lower, Normalize, Reorder, SchedulePolicy
from tests.builder import Builder, route

UNIT = SchedulePolicy(bucket="unit")


def test_the_mean_of_fp16_is_divided_on_both_sides():
    assert reduction_for(torch.float32, 8) == Reduction(1.0, "avg", 1.0)
    assert reduction_for(torch.float16, 1) == Reduction(1.0, "sum", 1.0)
    for world in (2, 3, 4, 8, 64, 96):
        scaling = reduction_for(torch.float16, world)
        assert scaling.op == "sum"
        assert scaling.pre_divide * scaling.post_divide == world
    assert reduction_for(torch.float16, 64).pre_divide == 8


class LoweredText(expecttest.TestCase):
    maxDiff = None

    def test_a_bucket_of_two_gathers_one_uneven(self):
        b = Builder(Bucket(UNIT), Lower())
        first = b.unshard(b.input("s1", 2, 3), route((8, 3), "w1", dtype=torch.bfloat16))
        second = b.unshard(b.input("s2", 2), route((5,), "w2", dtype=torch.bfloat16))
        self.assertExpectedInline(
            b.text(first, second),
            """\
convert_element_type_default = convert_element_type(s1, torch.bfloat16) [2, 3] bfloat16
reshape_default = reshape(convert_element_type_default, [-1]) [6] bfloat16
convert_element_type_default_1 = convert_element_type(s2, torch.bfloat16) [2] bfloat16
reshape_default_1 = reshape(convert_element_type_default_1, [-1]) [2] bfloat16
cat_default = cat([reshape_default, reshape_default_1], 0) [8] bfloat16
all_gather_into_tensor_default = all_gather_into_tensor(cat_default, 4, shard) [32] bfloat16
wait_tensor_default = wait_tensor(all_gather_into_tensor_default) [32] bfloat16
reshape_default_2 = reshape(wait_tensor_default, [4, -1]) [4, 8] bfloat16
split_with_sizes_default = split_with_sizes(reshape_default_2, [6, 2], 1)
getitem = getitem(split_with_sizes_default, 0) [4, 6] bfloat16
getitem_1 = getitem(split_with_sizes_default, 1) [4, 2] bfloat16
reshape_default_3 = reshape(getitem, [8, 3]) [8, 3] bfloat16
reshape_default_4 = reshape(getitem_1, [8]) [8] bfloat16
slice_tensor = slice(reshape_default_4, 0, 0, 5) [5] bfloat16""",
        )

    def test_a_bucket_of_two_reductions_over_shards_and_replicas(self):
        b = Builder(Bucket(UNIT), Lower())
        first = b.reduce_grad(b.input("g1", 5), route((5,), "w1", replicas=2))
        second = b.reduce_grad(b.input("g2", 4, 8), route((4, 8), "w2", replicas=2, dim=1))
        self.assertExpectedInline(
            b.text(first, second),
            """\
constant_pad_nd_default = constant_pad_nd(g1, [0, 3], 0) [8] float32
reshape_default = reshape(constant_pad_nd_default, [4, -1]) [4, 2] float32
reshape_default_1 = reshape(g2, [4, 4, 2]) [4, 4, 2] float32
permute_default = permute(reshape_default_1, [1, 0, 2]) [4, 4, 2] float32
reshape_default_2 = reshape(permute_default, [4, -1]) [4, 8] float32
cat_default = cat([reshape_default, reshape_default_2], 1) [4, 10] float32
reshape_default_3 = reshape(cat_default, [-1]) [40] float32
reduce_scatter_tensor_default = reduce_scatter_tensor(reshape_default_3, avg, 4, shard) [10] float32
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default) [10] float32
all_reduce_default = all_reduce(wait_tensor_default, avg, replicate) [10] float32
wait_tensor_default_1 = wait_tensor(all_reduce_default) [10] float32
reshape_default_4 = reshape(wait_tensor_default_1, [1, -1]) [1, 10] float32
split_with_sizes_default = split_with_sizes(reshape_default_4, [2, 8], 1)
getitem = getitem(split_with_sizes_default, 0) [1, 2] float32
getitem_1 = getitem(split_with_sizes_default, 1) [1, 8] float32
reshape_default_5 = reshape(getitem, [2]) [2] float32
reshape_default_6 = reshape(getitem_1, [4, 2]) [4, 2] float32""",
        )

    def test_another_dimension(self):
        b = Builder(Bucket(UNIT), Lower())
        whole = b.unshard(b.input("s", 4, 2), route((4, 8), "w", dim=1))
        part = b.reduce_grad(b.input("g", 4, 8), route((4, 8), "w", dim=1))
        self.assertExpectedInline(
            b.text(whole, part),
            """\
reshape_default = reshape(s, [-1]) [8] float32
all_gather_into_tensor_default = all_gather_into_tensor(reshape_default, 4, shard) [32] float32
wait_tensor_default = wait_tensor(all_gather_into_tensor_default) [32] float32
reshape_default_1 = reshape(wait_tensor_default, [4, -1]) [4, 8] float32
reshape_default_2 = reshape(reshape_default_1, [4, 4, 2]) [4, 4, 2] float32
permute_default = permute(reshape_default_2, [1, 0, 2]) [4, 4, 2] float32
reshape_default_3 = reshape(permute_default, [4, 8]) [4, 8] float32
reshape_default_4 = reshape(g, [4, 4, 2]) [4, 4, 2] float32
permute_default_1 = permute(reshape_default_4, [1, 0, 2]) [4, 4, 2] float32
reshape_default_5 = reshape(permute_default_1, [4, -1]) [4, 8] float32
reshape_default_6 = reshape(reshape_default_5, [-1]) [32] float32
reduce_scatter_tensor_default = reduce_scatter_tensor(reshape_default_6, avg, 4, shard) [8] float32
wait_tensor_default_1 = wait_tensor(reduce_scatter_tensor_default) [8] float32
reshape_default_7 = reshape(wait_tensor_default_1, [1, -1]) [1, 8] float32
reshape_default_8 = reshape(reshape_default_7, [4, 2]) [4, 2] float32""",
        )

    def test_fp16_and_a_world_of_one(self):
        b = Builder(Bucket(UNIT), Lower())
        half = b.reduce_grad(b.input("g", 8), route((8,), "w", reduce_dtype=torch.float16))
        alone = b.unshard(b.input("s", 8), route((8,), "v", world=1))
        self.assertExpectedInline(
            b.text(half, alone),
            """\
convert_element_type_default = convert_element_type(g, torch.float16) [8] float16
reshape_default_3 = reshape(convert_element_type_default, [4, -1]) [4, 2] float16
div_tensor = div(reshape_default_3, 2.0) [4, 2] float16
reshape_default_4 = reshape(div_tensor, [-1]) [8] float16
reduce_scatter_tensor_default = reduce_scatter_tensor(reshape_default_4, sum, 4, shard) [2] float16
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default) [2] float16
reshape_default_5 = reshape(wait_tensor_default, [1, -1]) [1, 2] float16
div_tensor_1 = div(reshape_default_5, 2.0) [1, 2] float16
convert_element_type_default_1 = convert_element_type(div_tensor_1, torch.float32) [1, 2] float32
reshape_default_6 = reshape(convert_element_type_default_1, [2]) [2] float32
reshape_default = reshape(s, [-1]) [8] float32
reshape_default_1 = reshape(reshape_default, [1, -1]) [1, 8] float32
reshape_default_2 = reshape(reshape_default_1, [8]) [8] float32""",
        )


class UsersOwn(expecttest.TestCase):
    def test_collectives_and_a_hook(self):
        b = Builder(Bucket(UNIT), Lower())
        whole = b.unshard(b.input("s", 2), route((8,), "w", gather_comm="0"))
        part = b.reduce_grad(b.input("g", 8), route((8,), "w", reduce_comm="1", reduce_hook="2", reduce_group="own"))
        self.assertExpectedInline(
            b.text(whole, part),
            """\
reshape_default = reshape(s, [-1]) [2] float32
custom_all_gather_default = custom_all_gather(reshape_default, 4, shard, 0) [8] float32
wait_tensor_default = wait_tensor(custom_all_gather_default) [8] float32
reshape_default_1 = reshape(wait_tensor_default, [4, -1]) [4, 2] float32
reshape_default_2 = reshape(reshape_default_1, [8]) [8] float32
reshape_default_3 = reshape(g, [4, -1]) [4, 2] float32
reshape_default_4 = reshape(reshape_default_3, [-1]) [8] float32
custom_reduce_scatter_default = custom_reduce_scatter(reshape_default_4, avg, 4, own, 1) [2] float32
wait_tensor_default_1 = wait_tensor(custom_reduce_scatter_default) [2] float32
reshape_default_5 = reshape(wait_tensor_default_1, [-1]) [2] float32
reduce_hook_default = reduce_hook(reshape_default_5, 2) [2] float32
reshape_default_6 = reshape(reduce_hook_default, [1, -1]) [1, 2] float32
reshape_default_7 = reshape(reshape_default_6, [2]) [2] float32""",
        )

    def test_one_gradient_of_a_gpu_that_needs_no_copy(self):
        b = Builder(Bucket(UNIT), Lower())
        self.assertExpectedInline(
            b.text(b.reduce_grad(b.input("g", 8, 2, device="cuda"), route((8, 2), "w"))),
            """\
reshape_default = reshape(g, [4, -1]) [4, 4] float32
reshape_default_1 = reshape(reshape_default, [-1]) [16] float32
reduce_scatter_tensor_default = reduce_scatter_tensor(reshape_default_1, avg, 4, shard) [4] float32
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default) [4] float32
reshape_default_2 = reshape(wait_tensor_default, [1, -1]) [1, 4] float32
reshape_default_3 = reshape(reshape_default_2, [2, 2]) [2, 2] float32""",
        )

    def test_a_gpu_alone_whose_shards_live_on_the_cpu(self):
        b = Builder(Bucket(UNIT), Lower())
        ways = [route((4,), name, world=1, device="cuda", dtype=torch.bfloat16) for name in ("w1", "w2")]
        wholes = [b.unshard(b.input(f"primals_{way.param}", 4), way) for way in ways]
        grads = [b.call(torch.ops.aten.neg.default, whole) for whole in wholes]
        text = b.text(*(b.reduce_grad(grad, way) for grad, way in zip(grads, ways, strict=True)))
        names = [line.split(" = ")[1].split("(")[0] for line in text.split("\n")]
        assert names[:2] == ["launch_gather", "wait_tensor"] and names.count("launch_gather") == 1
        assert names.count("send_to_host") == 2 and "device_put" not in names

    def test_gradients_of_a_gpu_whose_shards_live_on_the_cpu(self):
        b = Builder(Bucket(UNIT), Lower(), Reorder(UNIT))
        b.input("shard", 2)
        grads = [b.input(name, numel, device="cuda") for name, numel in (("g1", 8), ("g2", 4))]
        parts = [b.reduce_grad(grad, route(grad.meta["val"].shape, grad.name, device="cuda")) for grad in grads]
        later = b.call(torch.ops.aten.neg.default, grads[0])
        self.assertExpectedInline(
            b.text(*parts, later),
            """\
copy_in_gradients_default = copy_in_gradients([g1, g2], [0, 0], 4, torch.float32, 1.0) [4, 16] float32
reshape_default = reshape(copy_in_gradients_default, [-1]) [64] float32
reduce_scatter_tensor_default = reduce_scatter_tensor(reshape_default, avg, 4, shard) [16] float32
neg_default = neg(g1) [8] float32
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default) [16] float32
reshape_default_1 = reshape(wait_tensor_default, [1, -1]) [1, 16] float32
send_to_host_default = send_to_host(reshape_default_1) [1, 16] float32
wait_tensor_default_1 = wait_tensor(send_to_host_default) [1, 16] float32
split_with_sizes_default = split_with_sizes(wait_tensor_default_1, [2, 1, 13], 1)
getitem = getitem(split_with_sizes_default, 0) [1, 2] float32
getitem_1 = getitem(split_with_sizes_default, 1) [1, 1] float32
reshape_default_2 = reshape(getitem, [2]) [2] float32
reshape_default_3 = reshape(getitem_1, [1]) [1] float32""",
        )
        self.assertEqual(cluster_of(b.graph, None).name, "H100")

    def test_the_host_waits_before_compute_reads_what_has_moved(self):
        b = Builder(Lower(), Reorder())
        grads = [b.input(name, 4, device="cuda") for name in ("g1", "g2")]
        parts = [b.reduce_grad(grad, route((4,), grad.name, device="cuda")) for grad in grads]
        lines = b.text(b.call(torch.ops.aten.neg.default, parts[0]), parts[1]).splitlines()
        steps = [line.split(" = ")[1].split("(")[0] for line in lines]
        kept = [step for step in steps if step in ("reduce_scatter_tensor", "send_to_host", "wait_tensor", "neg")]
        sent, arrived = ["wait_tensor", "send_to_host"], "wait_tensor"
        assert kept == [*(2 * ["reduce_scatter_tensor"]), *sent, arrived, *sent, "neg", arrived]

    def test_shards_on_another_device(self):
        b = Builder(Bucket(UNIT), Lower())
        whole = b.unshard(b.input("s", 2), route((8,), "w", device="meta"))
        part = b.reduce_grad(whole, route((8,), "w", device="meta"))
        self.assertExpectedInline(
            b.text(part),
            """\
device_put_default = device_put(s, meta) [2] float32
reshape_default = reshape(device_put_default, [-1]) [2] float32
all_gather_into_tensor_default = all_gather_into_tensor(reshape_default, 4, shard) [8] float32
wait_tensor_default = wait_tensor(all_gather_into_tensor_default) [8] float32
reshape_default_1 = reshape(wait_tensor_default, [4, -1]) [4, 2] float32
reshape_default_2 = reshape(reshape_default_1, [8]) [8] float32
reshape_default_3 = reshape(reshape_default_2, [4, -1]) [4, 2] float32
reshape_default_4 = reshape(reshape_default_3, [-1]) [8] float32
reduce_scatter_tensor_default = reduce_scatter_tensor(reshape_default_4, avg, 4, shard) [2] float32
wait_tensor_default_1 = wait_tensor(reduce_scatter_tensor_default) [2] float32
reshape_default_5 = reshape(wait_tensor_default_1, [1, -1]) [1, 2] float32
device_put_default_1 = device_put(reshape_default_5, cpu) [1, 2] float32
reshape_default_6 = reshape(device_put_default_1, [2]) [2] float32""",
        )


def test_what_does_not_share_a_collective():
    different = [{}, {"gather_comm": "0"}, {"reduce_comm": "1"}, {"reduce_hook": "2"}, {"reduce_group": "own"}]
    b = Builder(Bucket(UNIT), Lower())
    wholes = [b.unshard(b.input(f"s{i}", 2), route((8,), f"w{i}", **how)) for i, how in enumerate(different)]
    parts = [b.reduce_grad(b.input(f"g{i}", 8), route((8,), f"w{i}", **how)) for i, how in enumerate(different)]
    b.text(*wholes, *parts)
    launches = [str(n.target) for n in b.graph.nodes if "all_gather" in str(n.target)]
    assert len(launches) == 2
    assert sum("reduce_scatter" in str(n.target) for n in b.graph.nodes) == 4


def test_divisors():
    assert reduction_for(torch.float32, 8, sum_only=True) == Reduction(1.0, "sum", 8)
    assert reduction_for(torch.float32, 8, 8.0) == Reduction(1.0, "avg", 1.0)
    assert reduction_for(torch.bfloat16, 8, 3.0) == Reduction(1.0, "sum", 3.0)
    assert reduction_for(torch.float32, 1, 3.0) == Reduction(3.0, "sum", 1.0)
    half = reduction_for(torch.float16, 8, 64.0)
    assert half.op == "sum" and half.pre_divide * half.post_divide == 64.0 and half.pre_divide == 8.0


def test_users_of_an_early_reduction_move_behind_its_bucket():
    b = Builder(Normalize(), Bucket(UNIT), Lower())
    first = b.reduce_grad(b.input("g1", 8), route((8,), "w"))
    late_input = b.input("g2", 8)
    total = b.graph.call_function(torch.ops.aten.add.Tensor, (first, first))
    total.meta["val"] = first.meta["val"]
    second = b.reduce_grad(late_input, route((8,), "v"))
    b.text(total, second)
    launches = [n for n in b.graph.nodes if "reduce_scatter" in str(n.target)]
    assert len(launches) == 1


def test_lowering_twice_changes_nothing():
    b = Builder(Bucket(UNIT), Lower())
    b.text(b.unshard(b.input("s1", 2, 3), route((8, 3), "w1")))
    once = str(b.graph)
    Lower()(b.graph)
    assert str(b.graph) == once
