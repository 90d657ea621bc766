"""Which gathers and reductions share a collective, on plain records and on graphs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compiled.collectives.all_gather import ALL_GATHER
from fsdp_compiled.collectives.reduction import REDUCTION
from fsdp_compiled.passes import (
    CLUSTERS,
    Cluster,
    Link,
    Schedule,
    SchedulePolicy,
    post_grad,
    rules,
)
from fsdp_compiled.passes.cost import Lane
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.passes.graph.emit import PLACE
from fsdp_compiled.passes.kinds import Request
from fsdp_compiled.passes.planning.buckets import _best, _Scored, auto_bound, decide
from fsdp_compiled.passes.planning.tasks import Requests, simulate
from fsdp_compiled.sharding.spec import AllGatherBucket, AllGatherSpec, Group, ParamSpec, ReductionSpec
from tests.support.builder import Builder, spec

MIB = 2**20
LINK = Link(latency_us=10.0, hop_us=0.0, bytes_per_s=1e9)  # 2 ranks: 1 us for 2000 bytes
TOY = Cluster("toy", 1e12, 1e12, 1e15, 0.0, LINK, LINK)
LANE = Lane(LINK, 2)
GROUP = Group("g", 2)


def all_gather(index, size, first, last, earliest=0, unit="u", lane=LANE, key=0):
    # of dimension 1, which is never gathered into place
    param = ParamSpec(f"w{index}", unit, (2, 2), 1, torch.float32)
    spec = AllGatherSpec(GROUP, torch.float32)
    return Request(index, ALL_GATHER, param, spec, size, earliest, first, last, (lane,), key=("gather", key))


def reduction(index, size, made, needed, name, unit="u", lane=LANE):
    param = ParamSpec(name, unit, (2, 2), 0, torch.float32)
    spec = ReductionSpec(torch.float32, GROUP)
    return Request(index, REDUCTION, param, spec, size, made + 1, needed, needed, (lane,), made, key="reduction")


def layers(sizes, compute_us, units=None, cluster=TOY, lane=LANE):
    """A backward graph: each layer reads a parameter of ``sizes`` bytes, then makes a gradient as large."""
    end = len(sizes)
    units = units or [f"u{i}" for i in range(end)]
    all_gathers = [all_gather(i, size, i, i, unit=units[i], lane=lane) for i, size in enumerate(sizes)]
    reductions = [reduction(end + i, size, i, end, f"w{i}", units[i], lane) for i, size in enumerate(sizes)]
    return Requests((compute_us,) * end, (*all_gathers, *reductions), cluster)


def decided(requests, policy):
    """The buckets of each kind."""
    buckets = decide(requests, policy).buckets
    return [[bucket for bucket in buckets if bucket[0].kind is kind] for kind in (ALL_GATHER, REDUCTION)]


def shown(kinds):
    return tuple([[r.param.name for r in bucket] for bucket in buckets] for buckets in kinds)


def test_none_is_every_parameter_alone():
    gathers, reductions = shown(decided(layers([10] * 3, 1.0), SchedulePolicy(bucket="none")))
    assert gathers == reductions == [["w0"], ["w1"], ["w2"]]


def test_one_bucket_per_unit_wherever_its_parameters_stand():
    work = layers([10] * 4, 1.0, units=["root", "a", "a", "root"])
    gathers, _ = shown(decided(work, SchedulePolicy(bucket="unit")))
    assert gathers == [["w0", "w3"], ["w1", "w2"]]


def test_full_buckets_of_a_given_size():
    work = layers([10, 10, 30, 10, 10, 10], 1.0)
    gathers, reductions = shown(decided(work, SchedulePolicy(bucket=25)))
    assert gathers == reductions == [["w0", "w1"], ["w2"], ["w3", "w4"], ["w5"]]


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (30, [["w0", "w1"], ["w2", "w3"], ["w4", "w5"]]),
        (40, [["w0", "w1", "w2", "w3"], ["w4", "w5"]]),
        (10, [["w0"], ["w1"], ["w2"], ["w3"], ["w4"], ["w5"]]),  # too small for two
    ],
)
def test_what_one_node_needs_or_makes_shares_a_bucket_with_room_for_it(cap, expected):
    """Such as the call of a region, which begins when all its parameters are there."""
    gathers = [all_gather(i, 10, i // 2, i // 2) for i in range(6)]
    reductions = [reduction(6 + i, 10, i // 2, 3, f"w{i}") for i in range(6)]
    plan = decided(Requests((1.0,) * 3, (*gathers, *reductions), TOY), SchedulePolicy(bucket=cap))
    assert shown(plan) == (expected, expected)


def test_only_equal_keys_share_a_bucket():
    requests = tuple(all_gather(i, 10, i, i, key=i % 2) for i in range(4))
    plan = decided(Requests((1.0,) * 4, requests, TOY), SchedulePolicy(bucket=1000))
    assert shown(plan)[0] == [["w0", "w2"], ["w1", "w3"]]


def test_a_reduction_whose_result_is_read_before_another_is_ready_stays_apart():
    reductions = tuple(reduction(i, 10, i, needed, f"w{i}") for i, needed in enumerate([2, 4, 4, 4]))
    plan = decided(Requests((1.0,) * 4, reductions, TOY), SchedulePolicy(bucket=1000))
    assert shown(plan)[1] == [["w0", "w1"], ["w2", "w3"]]


def test_an_all_gather_whose_input_is_computed_late_does_not_hold_up_earlier_ones():
    gathers = tuple(all_gather(i, 10, i, i, earliest) for i, earliest in enumerate([0, 1, 0]))
    plan = decided(Requests((1.0,) * 3, gathers, TOY), SchedulePolicy(bucket=1000))
    assert shown(plan)[0] == [["w0"], ["w1", "w2"]]


def test_a_latency_bound_model_gets_few_big_buckets():
    plan = decided(layers([100] * 32, 0.1), SchedulePolicy())
    assert len(plan[0]) <= 2
    assert len(plan[1]) <= 2


def test_a_compute_bound_model_starts_with_a_small_bucket_and_ends_with_one():
    plan = decided(layers([100_000] * 32, 1000.0), SchedulePolicy())
    assert len(plan[0][0]) < 4  # nothing hides it
    assert len(plan[1][-1]) < 4
    assert max(len(bucket) for bucket in plan[0]) > 8


def test_where_nothing_can_hide_buckets_grow_up_to_the_links_knee():
    cpu = CLUSTERS["CPU"]
    work = layers([MIB] * 40, 1000.0, cluster=cpu, lane=Lane(cpu.intra, 2, compute_blocked_fraction=1.0))
    plan = decided(work, SchedulePolicy())
    for buckets in plan:
        sizes = [sum(m.bytes for m in bucket) for bucket in buckets]
        assert max(sizes) <= 16 * MIB
        assert len(sizes) <= 5


def test_the_automatic_bound():
    small = layers([10] * 3, 1.0)
    assert auto_bound(small) == 64 * MIB
    # two of the largest units gathered, and the gradients of two
    assert auto_bound(layers([30 * MIB, 20 * MIB, 40 * MIB], 1.0)) == 140 * MIB
    gathers = (all_gather(9, 300 * MIB, 0, 2, unit="root"), *small.each[:3])
    assert auto_bound(Requests((1.0,) * 3, gathers, TOY)) == 300 * MIB + 10


def test_a_bound_cuts_buckets():
    work = layers([10] * 8, 1.0)
    for bucket in ("unit", 1000, "auto"):
        plan = decided(work, SchedulePolicy(bucket=bucket, in_flight_bytes=25))
        assert all(sum(m.bytes for m in b) <= 25 for b in (*plan[0], *plan[1]))


def test_a_bound_below_one_parameter_is_refused():
    with pytest.raises(ValueError) as error:
        decided(layers([10, 30], 1.0), SchedulePolicy(in_flight_bytes=59))
    assert str(error.value) == (
        "SchedulePolicy.in_flight_bytes: expected at least 60 for this graph, got 59; one place needs at once: "
        "w1 (30 bytes), gradient of w1 (30 bytes). Allow that many bytes, or use 'auto'"
    )
    decided(layers([10, 30], 1.0), SchedulePolicy(in_flight_bytes=60))


def test_fewer_positions_change_no_decision():
    requests = Requests(
        (1.0,) * 20,
        (all_gather(0, 10, 4, 9), all_gather(1, 10, 12, 12, earliest=2), reduction(2, 5, 10, 20, "a")),
        TOY,
    )
    small, positions = requests.compressed()
    assert len(small.compute_us) < 15
    assert sum(small.compute_us) == 20.0
    assert [positions[request.needed] for request in small.each] == [4, 12, 20]
    assert [positions[request.last + 1] for request in small.each[:2]] == [10, 13]
    assert [positions[request.ready] for request in small.each] == [0, 2, 11]
    plan = decide(requests, SchedulePolicy(bucket="none"))
    assert plan.load == requests.load(plan.buckets)
    assert [request.needed for (request,) in plan.buckets] == [4, 12, 20]


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


@settings(max_examples=60)
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


@settings(max_examples=30)
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
def test_what_is_emitted_is_what_was_decided(width, names, dtype, shards):
    """On a GPU, where copies run beside compute, and shards may come from the host and gradients go there."""
    device = "cuda" if shards == "cpu" else ""
    b = Builder()
    specs = [spec((4 * width, width), name, device=device, dtype=dtype) for name in names]
    unsharded = [b.unshard(b.input(f"primals_{i}", width, width, device=shards), s) for i, s in enumerate(specs)]
    grads = [b.call(torch.ops.aten.neg.default, each) for each in unsharded]
    graph = b.finish(*[b.reduce_grad(grad, s) for grad, s in zip(grads, specs, strict=True)])
    Schedule(SchedulePolicy(bucket="unit", cluster=CLUSTERS["H100"]))(graph)

    places = {node: node.meta[PLACE] for node in graph.nodes if nodes.is_launch(node)}
    (plan,) = {id(place.plan): place.plan for place in places.values()}.values()
    assert [(place.task, place.stage) for place in places.values()] == [
        (action.task, action.stage) for action in plan.actions if action.verb == "launch"
    ]
    for node, place in places.items():
        assert [param.name for param in nodes.bucket_of(node).params] == [
            r.param.name for r in plan.buckets[place.task]
        ]
    (gathered,) = [each for each in map(nodes.bucket_of, places) if isinstance(each, AllGatherBucket)]
    assert gathered.into_place == (len(names) == 1 or width == 2048)
    gather, reduced = plan.load.tasks
    assert len(gather.stages) == 1 and [nodes.stage_of(node) for node in places][1:] == (
        ["reduce_scatter", "copy_to_host"] if shards == "cpu" else ["reduce_scatter"]
    )
    assert (reduced.stages[-1].lane == "to the host" and reduced.stages[-1].us > 0.0) == (shards == "cpu")
    assert reduced.pack_us > 0.0


def test_gradients_are_packed_even_alone_so_they_share_buckets():
    cluster = CLUSTERS["H100"]
    requests = layers([4 * MIB] * 64, 200.0, cluster=cluster, lane=Lane(cluster.intra, 8))
    requests = replace(requests, each=requests.each[64:])
    _, reductions = decided(requests, SchedulePolicy(in_flight_bytes=1024 * MIB))
    assert 4 < len(reductions) <= 8
    assert sum(map(len, reductions)) == 64


def test_what_further_collectives_save_must_be_worth_their_launches():
    few, many, faster = (_Scored(((),) * count, [], (us,), 0) for count, us in [(4, 1000.0), (8, 970.0), (8, 950.0)])
    assert _best([few, many]) is few
    assert _best([few, faster]) is faster


def test_the_schedule_that_loses_least_where_it_loses_most():
    for_much, for_little, for_both = (
        _Scored(((),) * 4, [], totals_us, 0) for totals_us in [(1000.0, 900.0), (1300.0, 600.0), (1020.0, 640.0)]
    )
    assert _best([for_much, for_little, for_both]) is for_both


@pytest.mark.parametrize("size", [200_000, 400_000, 800_000])  # each takes 100 us and more
def test_a_schedule_is_also_good_for_batches_of_fewer_tokens(size):
    """As estimated, all but the ends hides behind the compute, whatever the buckets are."""
    work = layers([size] * 8, 1000.0)
    plan = decide(work, SchedulePolicy())
    for part in (1.0, 0.5, 0.25, 0.125):
        load = replace(plan.load, compute_us=tuple(part * us for us in work.compute_us))
        exclusive = decide(replace(work, compute_us=load.compute_us), SchedulePolicy())
        assert simulate(load, plan.actions).total_us < 1.05 * simulate(exclusive.load, exclusive.actions).total_us


def test_a_gpus_copies_run_beside_compute_wherever_its_graph_is_traced():
    many_small = layers([64] * 100, 1.0).each[:100]  # not gathered into place
    on_gpu, on_host = (ALL_GATHER.times(many_small, CLUSTERS[name]) for name in ("H100", "CPU"))
    assert on_gpu[1:] == (0.0, 0.0)
    assert min(on_host[1:]) > 0.0
