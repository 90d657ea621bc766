"""Which gathers and reductions share a collective, on plain records and on graphs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from fsdp_compiled.passes.grouping import Member, Wire, Work
from fsdp_compiled.passes.schedule import Gather, Reduction
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compiled.passes import (
    CLUSTERS,
    Bucket,
    Cluster,
    Link,
    Lower,
    SchedulePolicy,
    grouping,
    ir,
    post_grad,
    spec,
    survey,
)
from fsdp_compiled.passes.bucket import work_of
from tests.builder import Builder, route

MIB = 2**20
LINK = Link(latency_us=10.0, hop_us=0.0, bytes_per_s=1e9)  # 2 ranks: 1 us for 2000 bytes
TOY = Cluster("toy", 1e12, 1e12, 1e15, 0.0, LINK, LINK)
WIRE = Wire(LINK, 2)


def layers(sizes, compute_us, key="k", units=None, cluster=TOY):
    """A backward graph: each layer reads a parameter of ``sizes`` bytes, then makes a gradient as large."""
    gathers = [
        Member(i, f"w{i}", key, units[i] if units else f"u{i}", WIRE, Gather(size, 0.0, i, i))
        for i, size in enumerate(sizes)
    ]
    end = len(sizes)
    reductions = [
        Member(end + i, f"w{i}", key, units[i] if units else f"u{i}", WIRE, Reduction(((i, size),), 0.0, end))
        for i, size in enumerate(sizes)
    ]
    return Work((compute_us,) * end, tuple(gathers), tuple(reductions), cluster)


def shown(plan):
    return [[m.name for m in b] for b in plan.gathers], [[m.name for m in b] for b in plan.reductions]


def test_none_is_every_parameter_alone():
    gathers, reductions = shown(grouping.decide_buckets(layers([10] * 3, 1.0), SchedulePolicy(bucket="none")))
    assert gathers == reductions == [["w0"], ["w1"], ["w2"]]


def test_one_bucket_per_unit_wherever_its_parameters_stand():
    work = layers([10] * 4, 1.0, units=["root", "a", "a", "root"])
    gathers, _ = shown(grouping.decide_buckets(work, SchedulePolicy(bucket="unit")))
    assert gathers == [["w0", "w3"], ["w1", "w2"]]


def test_full_buckets_of_a_given_size():
    work = layers([10, 10, 30, 10, 10, 10], 1.0)
    gathers, reductions = shown(grouping.decide_buckets(work, SchedulePolicy(bucket=25)))
    assert gathers == reductions == [["w0", "w1"], ["w2"], ["w3", "w4"], ["w5"]]


def test_only_equal_keys_share_a_bucket():
    work = layers([10] * 4, 1.0)
    gathers = tuple(Member(m.index, m.name, m.index % 2, m.unit, m.wire, m.alone) for m in work.gathers)
    plan = grouping.decide_buckets(Work(work.compute_us, gathers, (), TOY), SchedulePolicy(bucket=1000))
    assert shown(plan)[0] == [["w0", "w2"], ["w1", "w3"]]


def test_a_reduction_whose_result_is_read_before_another_is_ready_stays_apart():
    reductions = tuple(
        Member(i, f"w{i}", "k", "u", WIRE, Reduction(((i, 10),), 0.0, needed))
        for i, needed in enumerate([2, 4, 4, 4])
    )
    plan = grouping.decide_buckets(Work((1.0,) * 4, (), reductions, TOY), SchedulePolicy(bucket=1000))
    assert shown(plan)[1] == [["w0", "w1"], ["w2", "w3"]]


def test_a_gather_whose_input_is_computed_late_does_not_hold_up_earlier_ones():
    gathers = tuple(
        Member(i, f"w{i}", "k", "u", WIRE, Gather(10, 0.0, i, i, earliest)) for i, earliest in enumerate([0, 1, 0])
    )
    plan = grouping.decide_buckets(Work((1.0,) * 3, gathers, (), TOY), SchedulePolicy(bucket=1000))
    assert shown(plan)[0] == [["w0"], ["w1", "w2"]]


def test_a_latency_bound_model_gets_few_big_buckets():
    plan = grouping.decide_buckets(layers([100] * 32, 0.1), SchedulePolicy())
    assert len(plan.gathers) <= 2
    assert len(plan.reductions) <= 2


def test_a_compute_bound_model_starts_with_a_small_bucket_and_ends_with_one():
    plan = grouping.decide_buckets(layers([100_000] * 32, 1000.0), SchedulePolicy())
    assert len(plan.gathers[0]) < 4  # nothing hides it
    assert len(plan.reductions[-1]) < 4
    assert max(len(bucket) for bucket in plan.gathers) > 8


def test_where_nothing_can_hide_buckets_grow_up_to_the_links_knee():
    work = layers([MIB] * 40, 1000.0, cluster=CLUSTERS["CPU"])
    wire = Wire(CLUSTERS["CPU"].intra, 2)
    work = Work(
        work.compute_us,
        tuple(Member(m.index, m.name, m.key, m.unit, wire, m.alone) for m in work.gathers),
        tuple(Member(m.index, m.name, m.key, m.unit, wire, m.alone) for m in work.reductions),
        CLUSTERS["CPU"],
    )
    plan = grouping.decide_buckets(work, SchedulePolicy())
    for buckets in (plan.gathers, plan.reductions):
        sizes = [sum(m.alone.bytes for m in bucket) for bucket in buckets]
        assert max(sizes) <= 16 * MIB
        assert len(sizes) <= 5


def test_the_automatic_bound():
    small = layers([10] * 3, 1.0)
    assert grouping.auto_bound(small) == 64 * MIB
    # two of the largest units gathered, and the gradients of two
    assert grouping.auto_bound(layers([30 * MIB, 20 * MIB, 40 * MIB], 1.0)) == 140 * MIB
    tied = Gather(300 * MIB, 0.0, 0, 2)
    gathers = (Member(0, "tied", "k", "root", WIRE, tied), *small.gathers)
    assert grouping.auto_bound(Work((1.0,) * 3, gathers, (), TOY)) == 300 * MIB + 10


def test_a_bound_cuts_buckets():
    work = layers([10] * 8, 1.0)
    for bucket in ("unit", 1000, "auto"):
        plan = grouping.decide_buckets(work, SchedulePolicy(bucket=bucket, in_flight_bytes=25))
        assert all(sum(m.alone.bytes for m in b) <= 25 for b in (*plan.gathers, *plan.reductions))


def test_a_bound_below_one_parameter_is_refused():
    with pytest.raises(ValueError) as error:
        grouping.decide_buckets(layers([10, 30], 1.0), SchedulePolicy(in_flight_bytes=59))
    assert str(error.value) == (
        "SchedulePolicy.in_flight_bytes: expected at least 60 for this graph, got 59; one place needs at once: "
        "w1 (30 bytes), gradient of w1 (30 bytes). Allow that many bytes, or use 'auto'"
    )
    grouping.decide_buckets(layers([10, 30], 1.0), SchedulePolicy(in_flight_bytes=60))


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
        there = route((rows, layer["width"]), f"w{i}", unit=layer["unit"], world=world, replicas=layer["replicas"])
        back = route((layer["width"], rows), f"v{i}", unit=layer["unit"], world=world, replicas=layer["replicas"])
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
        x = b.call(mm, b.call(mm, x, b.unshard(shard, there)), b.input(f"u{len(b.inputs)}", there.shape[1], rows))
    b.finish(x, *results)
    return b.graph


def run(graph, policy):
    """Run the passes, the rules checked around each; return the graph's bound."""
    spec.verify(graph)
    bound = None
    for step in post_grad(policy):
        step(graph)
        spec.verify(graph, type(step).__name__)
        if isinstance(step, Bucket):
            bound = max((t.bound_bytes for n in graph.nodes if (t := ir.ticket_of(n))), default=0)
    graph.lint()
    return bound


def bytes_in_flight(graph):
    """Walk a lowered graph: gathered bytes from launch to the last read of a member, gradients from the node that
    makes them to their reduction's wait. Written without the passes' own reading of graphs."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    change = [0] * (len(order) + 1)
    for node in graph.nodes:
        if "all_gather_into_tensor" in str(node.target):
            last, stack = order[node], list(node.users)
            while stack:
                user = stack.pop()
                last = max(last, order[user])
                if any(
                    word in str(user.target) for word in ("wait", "reshape", "split", "getitem", "slice", "t.def")
                ):
                    stack += user.users
            change[order[node]] += node.meta["val"].nbytes
            change[last] -= node.meta["val"].nbytes
        if "wait_tensor" in str(node.target) and "reduce_scatter" in str(node.args[0]):
            stack, grads = [node.args[0].args[0]], []
            while stack:
                source = stack.pop()
                ours = any(word in str(source.target) for word in ("cat", "reshape", "pad"))
                stack += source.all_input_nodes if ours else []
                grads += [] if ours else [source]
            packed = node.args[0].args[0].meta["val"].nbytes
            plain = sum(grad.meta["val"].nbytes for grad in grads)
            for grad in grads:  # padding counts with its gradient
                share = grad.meta["val"].nbytes * packed / plain
                change[order[grad]] += share
                change[order[node]] -= share
    total = peak = 0
    for delta in change:
        total += delta
        peak = max(peak, total)
    return peak


@settings(max_examples=60, deadline=None)
@given(chains(), PASSES_POLICIES, st.floats(0, 1))
def test_the_memory_bound_holds_on_any_graph(layers, policy, room):
    least = least_bound(layers, policy)
    bound = least + int(room * 2000)
    policy = SchedulePolicy(policy.bucket, policy.prefetch, bound, cluster=policy.cluster)
    graph = build(layers)
    assert run(graph, policy) in (bound, 0)
    assert bytes_in_flight(graph) <= bound * (1 + 1e-9)


def least_bound(layers, policy):
    """The least bound that the error for too small a bound asks for."""
    try:
        run(build(layers), SchedulePolicy(policy.bucket, policy.prefetch, 1, cluster=policy.cluster))
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
def test_what_a_bucket_is_thought_to_cost_is_what_the_lowered_graph_costs(width, names, dtype, shards):
    """On a GPU, where copies run beside compute, and shards may come from the host and gradients go there."""
    device = "cuda" if shards == "cpu" else ""
    b = Builder()
    places = [route((4 * width, width), name, device=device, dtype=dtype) for name in names]
    wholes = [
        b.unshard(b.input(f"primals_{i}", width, width, device=shards), place) for i, place in enumerate(places)
    ]
    grads = [b.call(torch.ops.aten.neg.default, whole) for whole in wholes]
    graph = b.finish(*[b.reduce_grad(grad, place) for grad, place in zip(grads, places, strict=True)])
    cluster = CLUSTERS["H100"]

    nodes = [node for node in graph.nodes if ir.is_unshard(node) or ir.is_reduce_grad(node)]
    work = work_of(graph, nodes, cluster)
    thought = grouping.load_of(work, grouping.Plan((work.gathers,), (work.reductions,), 0))
    Bucket(SchedulePolicy(bucket="unit"))(graph)
    Lower()(graph)
    found = survey.flights(graph)
    (gather,), (reduction,) = (
        [flight for flight in found if flight.bundle.reduces is reduces] for reduces in (False, True)
    )
    is_so = survey.load_of(graph, survey.compute_of(graph, found), found, cluster)
    assert [replace(g, first=0, last=0) for g in thought.gathers] == [
        replace(g, first=0, last=0) for g in is_so.gathers
    ]
    assert [replace(r, parts=(), needed=0) for r in thought.reductions] == [
        replace(r, parts=(), needed=0) for r in is_so.reductions
    ]
    assert gather.bundle.is_in_place == (len(names) == 1 or width == 2048)
    assert reduction.bundle.is_in_place == (len(names) == 1 and dtype == torch.float32)
    assert (is_so.reductions[0].pack_us == 0.0) == reduction.bundle.is_in_place
    assert (is_so.reductions[0].host_us > 0.0) == (shards == "cpu")


@pytest.mark.parametrize("is_row, most", [(True, 64), (False, 8)])
def test_gradients_that_are_copied_in_even_alone_do_not_travel_alone(is_row, most):
    cluster = CLUSTERS["H100"]
    work = layers([4 * MIB] * 64, 200.0, cluster=cluster)
    reductions = tuple(replace(each, wire=Wire(cluster.intra, 8), is_row=is_row) for each in work.reductions)
    work = replace(work, gathers=(), reductions=reductions)
    plan = grouping.decide_buckets(work, SchedulePolicy(in_flight_bytes=1024 * MIB))
    assert most // 2 < len(plan.reductions) <= most
    assert sum(map(len, plan.reductions)) == 64
