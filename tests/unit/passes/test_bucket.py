"""Which gathers and reductions share a collective, on plain records and on graphs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compiled.passes import (
    CLUSTERS,
    Bucket,
    Cluster,
    Link,
    Lower,
    SchedulePolicy,
    post_grad,
    rules,
)
from fsdp_compiled.passes.cost import Lane
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.passes.graph.anchors import AnchoredCompute
from fsdp_compiled.passes.graph.requests import is_ours, lowered_buckets, lowered_requests, opaque_requests
from fsdp_compiled.passes.planning.buckets import auto_bound, decide_buckets
from fsdp_compiled.passes.planning.requests import AllGatherRequest, Buckets, ReductionRequest, Requests, load_of
from fsdp_compiled.passes.planning.tasks import AllGatherTask, ReductionTask
from fsdp_compiled.sharding.spec import AllGatherBucket, AllGatherSpec, Group, ParamSpec, ReductionSpec
from tests.support.builder import Builder, spec

MIB = 2**20
LINK = Link(latency_us=10.0, hop_us=0.0, bytes_per_s=1e9)  # 2 ranks: 1 us for 2000 bytes
TOY = Cluster("toy", 1e12, 1e12, 1e15, 0.0, LINK, LINK)
LANE = Lane(LINK, 2)
GROUP = Group("g", 2)


def all_gather(index, task, unit="u", lane=LANE, key=0):
    # of dimension 1, which is never gathered into place
    param = ParamSpec(f"w{index}", unit, (2, 2), 1, torch.float32)
    return AllGatherRequest(index, param, AllGatherSpec(GROUP, torch.float32), task, lane, key=key)


def reduction(index, task, name, unit="u", lane=LANE):
    param = ParamSpec(name, unit, (2, 2), 0, torch.float32)
    return ReductionRequest(index, param, ReductionSpec(torch.float32, GROUP), task, (lane,))


def layers(sizes, compute_us, units=None, cluster=TOY, lane=LANE):
    """A backward graph: each layer reads a parameter of ``sizes`` bytes, then makes a gradient as large."""
    end = len(sizes)
    units = units or [f"u{i}" for i in range(end)]
    all_gathers = [all_gather(i, AllGatherTask(size, 0.0, i, i), units[i], lane) for i, size in enumerate(sizes)]
    reductions = [
        reduction(end + i, ReductionTask(((i, size),), 0.0, end), f"w{i}", units[i], lane)
        for i, size in enumerate(sizes)
    ]
    return Requests((compute_us,) * end, tuple(all_gathers), tuple(reductions), cluster)


def shown(buckets):
    return (
        [[r.param.name for r in bucket] for bucket in buckets.all_gathers],
        [[r.param.name for r in bucket] for bucket in buckets.reductions],
    )


def test_none_is_every_parameter_alone():
    gathers, reductions = shown(decide_buckets(layers([10] * 3, 1.0), SchedulePolicy(bucket="none")))
    assert gathers == reductions == [["w0"], ["w1"], ["w2"]]


def test_one_bucket_per_unit_wherever_its_parameters_stand():
    work = layers([10] * 4, 1.0, units=["root", "a", "a", "root"])
    gathers, _ = shown(decide_buckets(work, SchedulePolicy(bucket="unit")))
    assert gathers == [["w0", "w3"], ["w1", "w2"]]


def test_full_buckets_of_a_given_size():
    work = layers([10, 10, 30, 10, 10, 10], 1.0)
    gathers, reductions = shown(decide_buckets(work, SchedulePolicy(bucket=25)))
    assert gathers == reductions == [["w0", "w1"], ["w2"], ["w3", "w4"], ["w5"]]


def test_only_equal_keys_share_a_bucket():
    requests = tuple(all_gather(i, AllGatherTask(10, 0.0, i, i), key=i % 2) for i in range(4))
    plan = decide_buckets(Requests((1.0,) * 4, requests, (), TOY), SchedulePolicy(bucket=1000))
    assert shown(plan)[0] == [["w0", "w2"], ["w1", "w3"]]


def test_a_reduction_whose_result_is_read_before_another_is_ready_stays_apart():
    reductions = tuple(
        reduction(i, ReductionTask(((i, 10),), 0.0, needed), f"w{i}") for i, needed in enumerate([2, 4, 4, 4])
    )
    plan = decide_buckets(Requests((1.0,) * 4, (), reductions, TOY), SchedulePolicy(bucket=1000))
    assert shown(plan)[1] == [["w0", "w1"], ["w2", "w3"]]


def test_an_all_gather_whose_input_is_computed_late_does_not_hold_up_earlier_ones():
    gathers = tuple(all_gather(i, AllGatherTask(10, 0.0, i, i, earliest)) for i, earliest in enumerate([0, 1, 0]))
    plan = decide_buckets(Requests((1.0,) * 3, gathers, (), TOY), SchedulePolicy(bucket=1000))
    assert shown(plan)[0] == [["w0"], ["w1", "w2"]]


def test_a_latency_bound_model_gets_few_big_buckets():
    plan = decide_buckets(layers([100] * 32, 0.1), SchedulePolicy())
    assert len(plan.all_gathers) <= 2
    assert len(plan.reductions) <= 2


def test_a_compute_bound_model_starts_with_a_small_bucket_and_ends_with_one():
    plan = decide_buckets(layers([100_000] * 32, 1000.0), SchedulePolicy())
    assert len(plan.all_gathers[0]) < 4  # nothing hides it
    assert len(plan.reductions[-1]) < 4
    assert max(len(bucket) for bucket in plan.all_gathers) > 8


def test_where_nothing_can_hide_buckets_grow_up_to_the_links_knee():
    cpu = CLUSTERS["CPU"]
    work = layers([MIB] * 40, 1000.0, cluster=cpu, lane=Lane(cpu.intra, 2))
    plan = decide_buckets(work, SchedulePolicy())
    for buckets in (plan.all_gathers, plan.reductions):
        sizes = [sum(m.task.bytes for m in bucket) for bucket in buckets]
        assert max(sizes) <= 16 * MIB
        assert len(sizes) <= 5


def test_the_automatic_bound():
    small = layers([10] * 3, 1.0)
    assert auto_bound(small) == 64 * MIB
    # two of the largest units gathered, and the gradients of two
    assert auto_bound(layers([30 * MIB, 20 * MIB, 40 * MIB], 1.0)) == 140 * MIB
    tied = AllGatherTask(300 * MIB, 0.0, 0, 2)
    gathers = (all_gather(3, tied, "root"), *small.all_gathers)
    assert auto_bound(Requests((1.0,) * 3, gathers, (), TOY)) == 300 * MIB + 10


def test_a_bound_cuts_buckets():
    work = layers([10] * 8, 1.0)
    for bucket in ("unit", 1000, "auto"):
        plan = decide_buckets(work, SchedulePolicy(bucket=bucket, in_flight_bytes=25))
        assert all(sum(m.task.bytes for m in b) <= 25 for b in (*plan.all_gathers, *plan.reductions))


def test_a_bound_below_one_parameter_is_refused():
    with pytest.raises(ValueError) as error:
        decide_buckets(layers([10, 30], 1.0), SchedulePolicy(in_flight_bytes=59))
    assert str(error.value) == (
        "SchedulePolicy.in_flight_bytes: expected at least 60 for this graph, got 59; one place needs at once: "
        "w1 (30 bytes), gradient of w1 (30 bytes). Allow that many bytes, or use 'auto'"
    )
    decide_buckets(layers([10, 30], 1.0), SchedulePolicy(in_flight_bytes=60))


# ---- whole graphs ----

mm, add = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor
PASSES_POLICIES = st.builds(
    SchedulePolicy,
    bucket=st.sampled_from(["auto", "unit", "none", 300, 3000]),
    prefetch=st.sampled_from(["auto", 0, 1, 3]),
    cluster=st.sampled_from([TOY, CLUSTERS["CPU"], CLUSTERS["H100"]]),
)


@st.composite
def chains(draw):
    """A backward-like chain of matrix products: random widths and units, weights read again later, weights whose
    gradient is not wanted, and inputs that skip layers."""
    layers = []
    for _ in range(draw(st.integers(1, 8))):
        layers.append(
            {
                "width": draw(st.integers(1, 12)),
                "unit": draw(st.sampled_from("abc")),
                "again": draw(st.booleans()),
                "trained": draw(st.booleans()),
                "skips": draw(st.booleans()),
                "replicas": draw(st.sampled_from([1, 1, 2])),
            }
        )
    return layers


def build(layers, passes=()):
    b, world, rows = Builder(*passes), 4, 8
    x = skipped = b.input("x", rows, rows)
    results, again = [], []
    for i, layer in enumerate(layers):
        there = spec((rows, layer["width"]), f"w{i}", unit=layer["unit"], world=world, replicas=layer["replicas"])
        back = spec((layer["width"], rows), f"v{i}", unit=layer["unit"], world=world, replicas=layer["replicas"])
        shard = b.input(f"s{i}", rows // world, layer["width"])
        w = b.unshard(shard, there)
        v = b.unshard(b.input(f"t{i}", -(-layer["width"] // world), rows), back)
        hidden = b.call(mm, x, w)
        if layer["trained"]:
            results.append(b.reduce_grad(b.call(mm, b.call(torch.ops.aten.t.default, x), hidden), there))
        x = b.call(mm, hidden, v)
        if layer["skips"]:
            x, skipped = b.call(add, x, skipped), x
        if layer["again"]:
            again.append((shard, there))
    for shard, there in again:
        x = b.call(
            mm, b.call(mm, x, b.unshard(shard, there)), b.input(f"u{len(b.inputs)}", there.param.shape[1], rows)
        )
    b.finish(x, *results)
    return b.graph


def run(graph, policy):
    """Run the passes, the rules checked around each."""
    rules.verify(graph)
    for step in post_grad(policy):
        step(graph)
        rules.verify(graph, type(step).__name__)
    graph.lint()


def bytes_in_flight(graph):
    """Walk a lowered graph: unsharded bytes from launch to the last read of a member, gradients from the node that
    makes them to their reduction's wait. Written without the passes' own reading of graphs."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    change = [0] * (len(order) + 1)
    for node in graph.nodes:
        name, bucket = str(node.target), None
        if "launch_" in name:
            bucket = nodes.bucket_of(node)
        if "launch_all_gather" in name:
            last, stack = order[node], list(node.users)
            while stack:
                user = stack.pop()
                last = max(last, order[user])
                if any(word in str(user.target) for word in ("wait_", "getitem", "t.def")):
                    stack += user.users
            change[order[node]] += sum(bucket.sizes)
            change[last] -= sum(bucket.sizes)
        if "launch_reduce_scatter" in name:
            (wait,) = node.users
            for grad, size in zip(node.args[0], bucket.sizes, strict=True):
                change[order[grad]] += size
                change[order[wait]] -= size
    total = peak = 0
    for delta in change:
        total += delta
        peak = max(peak, total)
    return peak


@settings(max_examples=60, deadline=None)
@given(chains(), PASSES_POLICIES, st.floats(0, 1))
def test_the_memory_bound_holds_on_any_graph(layers, policy, room):
    check_graph(layers, policy, room)


def check_graph(layers, policy, room):
    """Every parameter travels once; within the bound."""
    bound = least_bound(layers, policy) + int(room * 2000)
    policy = replace(policy, in_flight_bytes=bound)
    graph = build(layers)
    run(graph, policy)
    assert bytes_in_flight(graph) <= bound
    gathered = [("v", i) for i in range(len(layers))] + [("w", i) for i in range(len(layers))]
    assert travelling(graph, "launch_all_gather") == sorted(f"{name}{i}" for name, i in gathered)
    assert travelling(graph, "launch_reduce_scatter") == [
        f"w{i}" for i, layer in enumerate(layers) if layer["trained"]
    ]


def travelling(graph, launch):
    """The names of the parameters in all buckets of a kind of launch."""
    launches = [node for node in graph.nodes if launch in str(node.target)]
    return sorted(param.name for node in launches for param in nodes.bucket_of(node).params)


def least_bound(layers, policy):
    """The least bound that the error for too small a bound asks for."""
    try:
        run(build(layers), replace(policy, in_flight_bytes=1))
    except ValueError as error:
        return int(re.search(r"expected at least (\d+)", str(error)).group(1))
    return 1


@settings(max_examples=30, deadline=None)
@given(chains(), PASSES_POLICIES)
def test_the_passes_are_idempotent(layers, policy):
    graph = build(layers)
    run(graph, policy)
    once = str(graph)
    run(graph, policy)
    assert str(graph) == once


@pytest.mark.parametrize("shards", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [["w1"], ["w1", "w2"]])
@pytest.mark.parametrize("width", [64, 2048])  # two are copied out, or gathered into place
def test_a_bucket_costs_the_same_before_and_after_it_is_lowered(width, names, dtype, shards):
    """On a GPU, where copies run beside compute, and shards may come from the host and gradients go there."""
    device = "cuda" if shards == "cpu" else ""
    b = Builder()
    specs = [spec((4 * width, width), name, device=device, dtype=dtype) for name in names]
    unsharded = [b.unshard(b.input(f"primals_{i}", width, width, device=shards), s) for i, s in enumerate(specs)]
    grads = [b.call(torch.ops.aten.neg.default, each) for each in unsharded]
    graph = b.finish(*[b.reduce_grad(grad, s) for grad, s in zip(grads, specs, strict=True)])
    cluster = CLUSTERS["H100"]

    opaque = list(filter(nodes.travels, graph.nodes))
    requests = opaque_requests(graph, opaque, cluster, 8192)
    before = load_of(requests, Buckets((requests.all_gathers,), (requests.reductions,)))
    Bucket(SchedulePolicy(bucket="unit"))(graph)
    Lower()(graph)
    found = lowered_buckets(graph)
    after = load_of(*lowered_requests(AnchoredCompute(graph, is_ours, 8192), found, cluster))
    assert [replace(task, first=0, last=0) for task in before.all_gathers] == [
        replace(task, first=0, last=0) for task in after.all_gathers
    ]
    assert [replace(task, parts=(), needed=0) for task in before.reductions] == [
        replace(task, parts=(), needed=0) for task in after.reductions
    ]
    (gathered,) = [each.bucket for each in found if isinstance(each.bucket, AllGatherBucket)]
    assert gathered.into_place == (len(names) == 1 or width == 2048)
    assert (after.reductions[0].host_us > 0.0) == (shards == "cpu")
    assert after.reductions[0].pack_us > 0.0


def test_gradients_are_packed_even_alone_so_they_share_buckets():
    cluster = CLUSTERS["H100"]
    requests = layers([4 * MIB] * 64, 200.0, cluster=cluster, lane=Lane(cluster.intra, 8))
    requests = replace(requests, all_gathers=())
    buckets = decide_buckets(requests, SchedulePolicy(in_flight_bytes=1024 * MIB))
    assert 4 < len(buckets.reductions) <= 8
    assert sum(map(len, buckets.reductions)) == 64
