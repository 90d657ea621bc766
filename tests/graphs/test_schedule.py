"""The lowered graph as text: one launch and one wait for each collective, the same on every device."""

from __future__ import annotations

from unittest import mock

import expecttest
import torch

from fsdp_compiled.passes import Normalize, Schedule, SchedulePolicy
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.sharding.spec import Group, Scaling, scaling_for
from tests.support.builder import Builder, spec

UNIT = SchedulePolicy(bucket="unit")
neg = torch.ops.aten.neg.default


def test_the_mean_of_fp16_is_divided_on_both_sides():
    assert scaling_for(torch.float32, 8) == Scaling(1.0, "avg", 1.0)
    assert scaling_for(torch.float16, 1) == Scaling(1.0, "sum", 1.0)
    for world in (2, 3, 4, 8, 64, 96):
        scaling = scaling_for(torch.float16, world)
        assert scaling.op == "sum"
        assert scaling.pre_divide * scaling.post_divide == world
    assert scaling_for(torch.float16, 64).pre_divide == 8


def test_divisors():
    assert scaling_for(torch.float32, 8, sum_only=True) == Scaling(1.0, "sum", 8)
    assert scaling_for(torch.float32, 8, 8.0) == Scaling(1.0, "avg", 1.0)
    assert scaling_for(torch.bfloat16, 8, 3.0) == Scaling(1.0, "sum", 3.0)
    assert scaling_for(torch.float32, 1, 3.0) == Scaling(3.0, "sum", 1.0)
    half = scaling_for(torch.float16, 8, 64.0)
    assert half.op == "sum" and half.pre_divide * half.post_divide == 64.0 and half.pre_divide == 8.0


def on(device: str):
    """A builder, and its inputs on a device; shards are named as AOTAutograd names parameters."""
    b = Builder(Schedule(UNIT))
    return b, lambda name, *shape, **kwargs: b.input(name, *shape, device=device, **kwargs)


class LoweredText(expecttest.TestCase):
    maxDiff = None

    def same_on_devices(self, build, want):
        """The same text on a CPU and on a GPU; no values on either."""
        texts = [build(*on(device)) for device in ("cpu", "cuda")]
        self.assertEqual(texts[0], texts[1])
        self.assertExpectedInline(texts[0], want, skip=1)

    @mock.patch.object(nodes, "PART", 2)
    def test_results_of_a_long_wait_are_taken_from_parts(self):
        def build(b, given):
            units = [f"w{index}" for index in range(3)]
            return b.text(*(b.unshard(given(f"primals_{name}", 2), spec((8,), name)) for name in units))

        self.same_on_devices(
            build,
            """\
launch_all_gather_default = launch_all_gather([primals_w0, primals_w1, primals_w2], w0+w1+w2) [1] uint8
wait_all_gather_default = wait_all_gather(launch_all_gather_default, w0+w1+w2)
getitem = getitem(wait_all_gather_default, slice(0, 2, None))
getitem_1 = getitem(wait_all_gather_default, slice(2, 4, None))
getitem_2 = getitem(getitem, 0) [8] float32
getitem_3 = getitem(getitem, 1) [8] float32
getitem_4 = getitem(getitem_1, 0) [8] float32""",
        )

    def test_a_bucket_of_two_all_gathers_one_uneven(self):
        def build(b, given):
            first = b.unshard(given("primals_1", 2, 3), spec((8, 3), "w1", dtype=torch.bfloat16))
            second = b.unshard(given("primals_2", 2), spec((5,), "w2", dtype=torch.bfloat16))
            return b.text(first, second)

        self.same_on_devices(
            build,
            """\
launch_all_gather_default = launch_all_gather([primals_1, primals_2], w1+w2) [1] uint8
wait_all_gather_default = wait_all_gather(launch_all_gather_default, w1+w2)
getitem = getitem(wait_all_gather_default, 0) [8, 3] bfloat16
getitem_1 = getitem(wait_all_gather_default, 1) [5] bfloat16""",
        )

    def test_a_bucket_of_two_reductions_over_shards_and_replicas(self):
        def build(b, given):
            first = b.reduce_grad(given("g1", 5), spec((5,), "w1", replicas=2))
            second = b.reduce_grad(given("g2", 4, 8), spec((4, 8), "w2", replicas=2, dim=1))
            return b.text(first, second)

        self.same_on_devices(
            build,
            """\
launch_reduce_scatter_default = launch_reduce_scatter([g1, g2], w1+w2) [1] uint8
wait_reduce_scatter_default = wait_reduce_scatter(launch_reduce_scatter_default, w1+w2)
getitem = getitem(wait_reduce_scatter_default, 0) [1] uint8
launch_all_reduce_default = launch_all_reduce([getitem], w1+w2) [1] uint8
wait_all_reduce_default = wait_all_reduce(launch_all_reduce_default, w1+w2)
getitem_1 = getitem(wait_all_reduce_default, 0) [2] float32
getitem_2 = getitem(wait_all_reduce_default, 1) [4, 2] float32""",
        )

    def test_replicas_only(self):
        def build(b, given):
            return b.text(b.reduce_grad(given("g1", 5), spec((5,), "w1", world=1, replicas=2)))

        self.same_on_devices(
            build,
            """\
launch_all_reduce_default = launch_all_reduce([g1], w1) [1] uint8
wait_all_reduce_default = wait_all_reduce(launch_all_reduce_default, w1)
getitem = getitem(wait_all_reduce_default, 0) [5] float32""",
        )

    def test_another_dimension(self):
        def build(b, given):
            unsharded = b.unshard(given("primals_1", 4, 2), spec((4, 8), "w", dim=1))
            part = b.reduce_grad(given("g", 4, 8), spec((4, 8), "w", dim=1))
            return b.text(unsharded, part)

        self.same_on_devices(
            build,
            """\
launch_all_gather_default = launch_all_gather([primals_1], w) [1] uint8
launch_reduce_scatter_default = launch_reduce_scatter([g], w) [1] uint8
wait_all_gather_default = wait_all_gather(launch_all_gather_default, w)
getitem = getitem(wait_all_gather_default, 0) [4, 8] float32
wait_reduce_scatter_default = wait_reduce_scatter(launch_reduce_scatter_default, w)
getitem_1 = getitem(wait_reduce_scatter_default, 0) [4, 2] float32""",
        )

    def test_fp16_and_a_world_of_one(self):
        def build(b, given):
            half = b.reduce_grad(given("g", 8), spec((8,), "w", reduce_dtype=torch.float16))
            alone = b.unshard(given("primals_1", 8), spec((8,), "v", world=1))
            return b.text(half, alone)

        self.same_on_devices(
            build,
            """\
launch_reduce_scatter_default = launch_reduce_scatter([g], w) [1] uint8
wait_reduce_scatter_default = wait_reduce_scatter(launch_reduce_scatter_default, w)
getitem = getitem(wait_reduce_scatter_default, 0) [2] float32""",
        )

    def test_what_a_graph_has_computed_does_not_persist(self):
        def build(b, given):
            computed = b.call(neg, given("primals_1", 2))
            text = b.text(b.unshard(computed, spec((8,), "w")))
            (launch,) = filter(nodes.is_launch, b.graph.nodes)
            self.assertFalse(nodes.bucket_of(launch).inputs_persist)
            return text

        self.same_on_devices(
            build,
            """\
neg_default = neg(primals_1) [2] float32
launch_all_gather_default = launch_all_gather([neg_default], w into place) [1] uint8
wait_all_gather_default = wait_all_gather(launch_all_gather_default, w into place)
getitem = getitem(wait_all_gather_default, 0) [8] float32""",
        )

    def test_shards_on_the_cpu_and_compute_on_a_gpu(self):
        b = Builder(Schedule(UNIT))
        specs = [spec((8,), name, device="cuda") for name in ("w1", "w2")]
        unsharded = [b.unshard(b.input(f"primals_{s.param.name}", 2), s) for s in specs]
        grads = [b.call(neg, each) for each in unsharded]
        text = b.text(*(b.reduce_grad(grad, s) for grad, s in zip(grads, specs, strict=True)), b.call(neg, grads[0]))
        self.assertExpectedInline(
            text,
            """\
launch_all_gather_default = launch_all_gather([primals_w1, primals_w2], w1+w2) [1] uint8
wait_all_gather_default = wait_all_gather(launch_all_gather_default, w1+w2)
getitem = getitem(wait_all_gather_default, 0) [8] float32
getitem_1 = getitem(wait_all_gather_default, 1) [8] float32
neg_default = neg(getitem) [8] float32
neg_default_1 = neg(getitem_1) [8] float32
launch_reduce_scatter_default = launch_reduce_scatter([neg_default, neg_default_1], w1+w2) [1] uint8
wait_reduce_scatter_default = wait_reduce_scatter(launch_reduce_scatter_default, w1+w2)
getitem_2 = getitem(wait_reduce_scatter_default, 0) [1] uint8
launch_copy_to_host_default = launch_copy_to_host([getitem_2], w1+w2) [1] uint8
neg_default_2 = neg(neg_default) [8] float32
wait_copy_to_host_default = wait_copy_to_host(launch_copy_to_host_default, w1+w2)
getitem_3 = getitem(wait_copy_to_host_default, 0) [2] float32
getitem_4 = getitem(wait_copy_to_host_default, 1) [2] float32""",
        )
        self.assertEqual(nodes.device_of(b.graph).type, "cuda")

    def test_the_host_waits_before_compute_reads_what_was_copied_to_it(self):
        b = Builder(Schedule(SchedulePolicy(bucket="none")))
        grads = [b.input(name, 4, device="cuda") for name in ("g1", "g2")]
        parts = [b.reduce_grad(grad, spec((4,), grad.name, device="cuda")) for grad in grads]
        lines = b.text(b.call(neg, parts[0]), parts[1]).splitlines()
        steps = [line.split(" = ")[1].split("(")[0] for line in lines]
        self.assertExpectedInline(
            "\n".join(step for step in steps if step != "getitem"),
            """\
launch_reduce_scatter
launch_reduce_scatter
wait_reduce_scatter
launch_copy_to_host
wait_copy_to_host
neg
wait_reduce_scatter
launch_copy_to_host
wait_copy_to_host""",
        )


def test_the_users_own_collectives_and_hook_are_in_the_bucket():
    b = Builder(Schedule(UNIT))
    own = {"comm": "1", "hook": "2", "shards": Group("own", 4)}
    b.text(
        b.unshard(b.input("primals_1", 2), spec((8,), "w", all_gather_comm="0")),
        b.reduce_grad(b.input("g", 8), spec((8,), "w", **own)),
    )
    gathered, reduced = (nodes.bucket_of(node) for node in b.graph.nodes if nodes.is_launch(node))
    assert (gathered.spec.comm, gathered.into_place) == ("0", False)
    assert (reduced.spec.comm, reduced.spec.hook, reduced.spec.shards) == ("1", "2", Group("own", 4))


def test_what_does_not_share_a_collective():
    different = [{}, {"all_gather_comm": "0"}, {"comm": "1"}, {"hook": "2"}, {"shards": Group("own", 4)}]
    b = Builder(Schedule(UNIT))
    unsharded = [b.unshard(b.input(f"s{i}", 2), spec((8,), f"w{i}", **how)) for i, how in enumerate(different)]
    parts = [b.reduce_grad(b.input(f"g{i}", 8), spec((8,), f"w{i}", **how)) for i, how in enumerate(different)]
    b.text(*unsharded, *parts)
    stages = [nodes.stage_of(node) for node in b.graph.nodes if nodes.is_launch(node)]
    assert stages.count("all_gather") == 2
    assert stages.count("reduce_scatter") == 4


def test_users_of_an_early_reduction_move_behind_its_bucket():
    b = Builder(Normalize(), Schedule(UNIT))
    first = b.reduce_grad(b.input("g1", 8), spec((8,), "w"))
    late_input = b.input("g2", 8)
    total = b.graph.call_function(torch.ops.aten.add.Tensor, (first, first))
    total.meta["val"] = first.meta["val"]
    second = b.reduce_grad(late_input, spec((8,), "v"))
    b.text(total, second)
    assert sum(map(nodes.is_launch, b.graph.nodes)) == 1


def test_a_parameter_is_all_gathered_before_the_graph_writes_to_its_shard():
    """And copied for that: the graph may write before the wait."""
    aten, b = torch.ops.aten, Builder(Schedule(SchedulePolicy(bucket="none", prefetch=0)))
    shards = [b.input(f"primals_{name}", 2) for name in "wv"]
    used, returned = (b.unshard(shard, spec((8,), shard.name)) for shard in shards)
    halved = b.call(aten.mul.Tensor, shards[1], 0.5)
    result = b.call(neg, used)
    written = b.call(aten.copy_.default, shards[1], halved)
    b.text(result, returned)
    launches = {nodes.bucket_of(node).params[0].name: node for node in nodes.launches_of(b.graph)}
    assert launches["primals_v"] < written
    assert [nodes.bucket_of(launches[each.name]).inputs_persist for each in shards] == [True, False]


def test_lowering_twice_changes_nothing():
    b = Builder(Schedule(UNIT))
    b.text(b.unshard(b.input("s1", 2, 3), spec((8, 3), "w1")))
    once = str(b.graph)
    Schedule(UNIT)(b.graph)
    assert str(b.graph) == once
