"""Estimated times, by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fsdp_compiled.collectives.all_gather import all_gather_bucket
from fsdp_compiled.passes import CLUSTERS, Cluster, Link, SchedulePolicy, cost
from fsdp_compiled.passes.cost import Lane, Measured
from fsdp_compiled.passes.cost.cluster_file import parse
from fsdp_compiled.passes.cost.detection import network_bytes_per_s
from fsdp_compiled.sharding.dtensor import data_parallel_mesh, note_groups
from fsdp_compiled.sharding.spec import AllGatherBucket, AllGatherSpec, Group, ParamSpec

LINK = Link(latency_us=10.0, hop_us=2.0, bytes_per_s=1e9, reduce_factor=1.5, knee_bytes=10_000)
TOY = Cluster("toy", 2e12, 1e12, 1e12, 3.0, LINK, Link(50.0, 5.0, 1e8), ranks_per_node=4)


def test_a_collective_is_latency_and_a_rings_bytes():
    assert LINK.collective_us(4000, world=1) == 0.0
    assert LINK.collective_us(4000, world=4) == pytest.approx(10 + 3 * 2 + 3.0)
    assert LINK.collective_us(4000, world=4, reduces=True) == pytest.approx(10 + 3 * 2 + 4.5)
    assert LINK.collective_us(20_000, world=2) == pytest.approx(10 + 2 + 2 * 10.0)  # past the knee


def test_parameters_go_into_place_where_copying_them_takes_longer_than_more_pieces():
    cluster = replace(TOY, piece_us=5.0)
    assert cluster.copy_us(3_500_000) == pytest.approx(10.0)
    assert cluster.saves_by_gathering_into_place([3_000_000, 500_000])
    assert cluster.saves_by_gathering_into_place([3_000_000, 400_000, 100_000])
    assert not cluster.saves_by_gathering_into_place([3_000_000, 300_000, 100_000, 100_000])
    assert cluster.saves_by_gathering_into_place([1])


def test_an_all_gather_and_the_copies_around_it():
    cluster = replace(TOY, piece_us=5.0, host_bytes_per_s=1e9, kernel_us=0.001)
    us = LINK.collective_us(4000, 4)
    pack, unpack, from_host = cluster.copy_us(1000), cluster.copy_us(4000), 1000 / (0.7 * 1e9) * 1e6

    def times(sizes, overlaps=False, device="", **how):
        bucket = AllGatherBucket(AllGatherSpec(Group("g", 4), torch.uint8, device=device), (), **how)
        return replace(cluster, on_host=not overlaps).all_gather_times(sizes, Lane(LINK, 4), bucket)

    assert times([4000], into_place=True) == ((us,), 0.0, 0.0)
    assert times([4000]) == ((us,), 0.0, unpack)  # sharded along another dimension than the first
    assert times([3000, 1000]) == ((us,), pack, unpack)
    assert times([3000, 1000], into_place=True) == ((us + 5.0,), 0.0, 0.0)
    assert times([3000, 1000], overlaps=True) == ((pytest.approx(us + pack + unpack),), 0.0, 0.0)
    assert times([3000, 1000], overlaps=True, inputs_persist=False) == ((us + unpack,), pack, 0.0)
    assert times([3000, 1000], into_place=True, inputs_persist=False) == ((us + 5.0,), pack, 0.0)
    assert times([4000], overlaps=True, device="cuda", into_place=True) == (
        (pytest.approx(us + from_host),),
        0.0,
        0.0,
    )
    assert times([4000], device="cuda", into_place=True) == ((us,), 0.0, 0.0)  # on the device of compute


def test_what_can_be_gathered_into_place():
    def into_place(spec, dims, sizes):
        shapes = [(size // 4, 4) if dim == 0 else (4, size // 4) for dim, size in zip(dims, sizes, strict=True)]
        params = [ParamSpec("w", "u", shape, dim, torch.uint8) for shape, dim in zip(shapes, dims, strict=True)]
        return all_gather_bucket(spec, params, torch.device("cpu")).into_place

    plain = AllGatherSpec(Group("g", 4), torch.uint8)
    assert into_place(plain, [0], [4])
    assert into_place(plain, [0, 0], [2**20, 2**20])
    assert not into_place(plain, [0, 0], [4, 4])  # copying costs less
    assert not into_place(plain, [0, 1], [2**20, 2**20])
    assert not into_place(plain, [0, 0], [2**20, 0])
    assert not into_place(replace(plain, comm="0"), [0], [4])
    assert not into_place(replace(plain, group=Group()), [0], [4])


def test_a_small_copy_costs_a_kernel():
    assert TOY.packing_us(1000) == 3.0
    assert TOY.packing_us(3_500_000) == TOY.copy_us(3_500_000) == pytest.approx(10.0)


def test_the_link_follows_the_groups_ranks():
    assert TOY.link("unknown", 4) is TOY.intra
    dist.init_process_group("fake", rank=0, world_size=8)
    try:
        mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        assert TOY.link(mesh.get_group("shard").group_name, 4) is TOY.intra
        assert TOY.link(mesh.get_group("replicate").group_name, 2) == TOY.inter  # of one rank in each node
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 4])
def test_a_group_is_taken_for_the_slowest_along_its_mesh_dimension(rank):
    """Only the group of ranks 4 to 7 lies on two machines of 6 ranks, and that of 4 and 5 on two of 5."""
    dist.init_process_group("fake", rank=rank, world_size=12)
    try:
        mesh = dist.init_device_mesh("cpu", (3, 4), mesh_dim_names=("replicate", "shard"))
        note_groups(mesh)
        shards = mesh.get_group("shard").group_name
        assert replace(TOY, ranks_per_node=6).link(shards, 4) == replace(TOY.link_of(range(2, 6)), bytes_per_s=2e8)
        assert replace(TOY, ranks_per_node=4).link(shards, 4) is TOY.intra
        smaller = data_parallel_mesh(mesh).another_group(2).name
        assert replace(TOY, ranks_per_node=5).link(smaller, 2) == TOY.inter
        assert replace(TOY, ranks_per_node=6).link(smaller, 2) is TOY.intra
        places = dict(cost.group_places())
        assert places[shards] == tuple(tuple(range(first, first + 4)) for first in (0, 4, 8))
        assert places[smaller] == tuple((first, first + 1) for first in range(0, 12, 2))
    finally:
        dist.destroy_process_group()


def test_between_nodes_a_group_has_the_cards_of_its_ranks_as_far_as_a_node_takes_them():
    cluster = replace(TOY, intra=replace(LINK, bytes_per_s=3.5e8))
    assert cluster.link("unknown", 8) == replace(TOY.inter, hop_us=(2 * 5.0 + 5 * 2.0) / 7, bytes_per_s=3.5e8)
    assert cluster.link("unknown", 7).bytes_per_s == 3e8  # three ranks are in the second node
    assert cluster.link("unknown", 5) == replace(TOY.inter, hop_us=(2 * 5.0 + 2 * 2.0) / 4, bytes_per_s=1e8)


def test_an_all_reduce_goes_around_twice():
    assert LINK.collective_us(4000, world=4, reduces=True, passes=2) == pytest.approx(10 + 2 * (3 * 2 + 4.5))


# Two published figures are missing, since they say nothing of a link: 200 GB/s of an all-gather on 32 nodes before
# tuning (NVIDIA/nccl issue 1218), and 101 GB/s of a badly configured pair of nodes (NVIDIA/nccl issue 2409).
# ranks, ranks in a node, passes, GB/s that each rank receives in the end (NCCL's bus bandwidth), and who measured it
CARDS_100GBIT = replace(CLUSTERS["A100"], inter=replace(CLUSTERS["A100"].inter, bytes_per_s=0.75 * 100e9 / 8))
MEASURED = [
    ("H100", 8, 8, 1, 350, "all-gather in a node, NVIDIA/nccl issue 1281"),
    ("H100", 8, 8, 1, 360, "reduce-scatter in a node, NVIDIA/nccl issue 1281"),
    ("H100", 8, 8, 1, 370, "what NVLink carries of 450 after protocol, NVIDIA/nccl-tests issue 212"),
    ("H100", 2, 1, 2, 46, "one 400 Gb/s card in each node, NVIDIA/nccl-tests issue 290"),
    ("H100", 16, 1, 1, 48, "the same, the higher of the two figures"),
    ("H100", 16, 8, 1, 368, "all cards of two nodes, 8 x 46, NVIDIA/nccl-tests issue 290"),
    ("H100", 256, 8, 2, 340, "all-reduce on 32 nodes, NVIDIA/nccl issue 1218"),
    ("A100, 100 Gb/s", 16, 8, 2, 75, "two nodes with eight 100 Gb/s cards each, NVIDIA/nccl issue 495"),
]


@pytest.mark.parametrize("name, ranks, in_node, passes, measured, source", MEASURED)
def test_links_are_as_fast_as_others_have_measured(name, ranks, in_node, passes, measured, source):
    """Within 15%, at the sizes of 4 GiB where bus bandwidth is quoted."""
    cluster = replace(CLUSTERS.get(name, CARDS_100GBIT), ranks_per_node=in_node)
    size = 4 * 2**30
    us = cluster.link("unknown", ranks).collective_us(size, ranks, passes=passes)
    assert passes * size * (ranks - 1) / ranks / us / 1e3 == pytest.approx(measured, rel=0.15), source


def test_replicas_with_one_card_each_reduce_at_half_its_speed():
    """Hybrid sharding over 8 nodes: 46 GB/s of bus bandwidth, so that a byte takes as long as at 23."""
    dist.init_process_group("fake", rank=0, world_size=64)
    try:
        mesh = dist.init_device_mesh("cpu", (8, 8), mesh_dim_names=("replicate", "shard"))
        link = CLUSTERS["H100"].link(mesh.get_group("replicate").group_name, 8)
        assert link.bytes_per_s == pytest.approx(46e9)
        assert link.collective_us(2**30, 8, True, passes=2) == pytest.approx(2**30 * 7 / 8 / 23e9 * 1e6, rel=0.01)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone(monkeypatch):
    """No launcher and no network cards tell anything."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cost.detection, "network_bytes_per_s", lambda folder: 0.0)
    return monkeypatch


CPU = torch.device("cpu")


def test_detection_on_a_cpu(alone):
    assert cost.detect(CPU) == CLUSTERS["CPU"]
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        with alone.context() as one:
            one.setenv(name, "2")
            assert cost.detect(CPU) == replace(CLUSTERS["CPU"], ranks_per_node=2)
    alone.setenv("SLURM_NTASKS_PER_NODE", "8(x2),4")
    assert cost.detect(CPU) == CLUSTERS["CPU"]


def test_detection_of_gpus(alone):
    alone.setattr(torch.cuda, "is_available", lambda: True)
    alone.setattr(torch.cuda, "device_count", lambda: 4)

    def detected(name):
        alone.setattr(torch.cuda, "get_device_name", lambda device: name)
        return cost.detect(torch.device("cuda", 0))

    assert detected("NVIDIA H200 141GB HBM3e") == replace(CLUSTERS["H200"], ranks_per_node=4)
    assert detected("Some new card") == replace(CLUSTERS["H100"], ranks_per_node=4)
    for other in ("NVIDIA GH200 480GB", "NVIDIA RTX A1000 Laptop GPU"):  # neither an H200 nor an A100
        assert detected(other) == replace(CLUSTERS["H100"], ranks_per_node=4)
    assert detected("NVIDIA GB200") == replace(CLUSTERS["B200"], ranks_per_node=4)
    assert detected("NVIDIA A100-PCIE-40GB").intra.bytes_per_s == pytest.approx(25.6e9)
    assert detected("NVIDIA H100 PCIe").intra.bytes_per_s == pytest.approx(51.2e9)  # of a card without NVLink


def test_detection_of_network_cards(alone, tmp_path):
    def card(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    rate = network_bytes_per_s  # not the fixture's
    assert rate(tmp_path) == 0.0
    card("net/lo/speed", "")
    card("net/eth0/speed", "-1\n")  # what it is nobody knows
    card("net/eth0/device/vendor", "")
    card("net/veth3/speed", "40000\n")  # no card
    assert rate(tmp_path) == 0.0
    for name, speed in (("eth1", "1000\n"), ("eth2", "10000\n")):
        card(f"net/{name}/speed", speed)
        card(f"net/{name}/device/vendor", "")
    assert rate(tmp_path) == pytest.approx(0.65 * 10e9 / 8)
    for number in range(8):
        card(f"infiniband/mlx5_{number}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    assert rate(tmp_path) == pytest.approx(8 * 46e9)
    alone.setenv("LOCAL_WORLD_SIZE", "4")
    alone.setattr(cost.detection, "network_bytes_per_s", lambda folder: 8e9)
    assert cost.detect(CPU).inter.bytes_per_s == 2e9  # a rank's share


CURVE = ((1e3, 1e8), (1e5, 1e9))
MEASURED_LINK = replace(LINK, measured=(Measured(4, 4, CURVE, ((1.0, 5e8),), ((1.0, 2e8),)),))


def test_a_curve_is_a_power_between_its_points():
    curve = cost.cluster.per_second
    assert curve(CURVE, 1e4) == pytest.approx(10**8.5)
    assert [curve(CURVE, size) for size in (0, 1, 1e3, 1e5, 1e9)] == [1e8, 1e8, pytest.approx(1e8), 1e9, 1e9]
    assert curve(((5.0, 7.0),), 1.0) == curve(((5.0, 7.0),), 9.0) == 7.0


def test_measured_collectives():
    us = MEASURED_LINK.collective_us
    assert us(100_000, 4) == pytest.approx(100.0)
    assert us(100, 4) == us(0, 4) == 16.0  # not less than the latencies
    assert us(100_000, 4, reduces=True) == pytest.approx(200.0)
    assert us(100_000, 4, reduces=True, passes=2) == pytest.approx(500.0)
    assert us(100_000, 8) == LINK.collective_us(100_000, 8)  # as many ranks were not measured


def test_measured_links_between_nodes_are_those_of_as_many_ranks_in_a_node():
    groups = tuple(Measured(4, in_node, CURVE, CURVE, CURVE) for in_node in (1, 2))
    cluster = replace(TOY, ranks_per_node=2, inter=replace(TOY.inter, measured=groups))
    assert cluster.link("unknown", 4).measured == (groups[1],)
    cluster = replace(cluster, ranks_per_node=1)
    assert cluster.link("unknown", 4).measured == (groups[0],)


def test_measured_products_and_copies():
    cluster = replace(TOY, products_32bit=((1e6, 5e11),), products_16bit=((1e6, 1e12),), copies=((1e6, 2e11),))
    assert cluster.product_us(1e9, 1.0, itemsize=4) == pytest.approx(2000.0)
    assert cluster.product_us(1e9, 1.0, itemsize=2) == pytest.approx(1000.0)
    assert cluster.product_us(1e3, 1e9, itemsize=4) == pytest.approx(5000.0) == cluster.memory_us(1e9)
    assert cluster.product_us(1.0, 1.0, itemsize=4) == cluster.kernel_us
    assert TOY.product_us(1.4e9, 1.0, itemsize=2) == pytest.approx(1000.0)


def test_links_may_block_compute_more_or_less_than_the_cluster_says():
    cluster = replace(TOY, compute_blocked_fraction=0.5, inter=replace(TOY.inter, compute_blocked_fraction=0.0))
    groups = [None, Group("unknown", 4), Group("unknown", 8)]
    assert [cluster.lane(group).compute_blocked_fraction for group in groups] == [0.5, 0.5, 0.0]
    lane = replace(cluster.lane(groups[1]), link=replace(TOY.intra, host_us=30.0))
    assert [lane.blocked_us(us) for us in (20.0, 100.0)] == [20.0, 80.0]


@pytest.mark.parametrize(
    "curve", [((2.0, 1.0), (1.0, 1.0)), ((1.0, 1.0), (1.0, 2.0)), ((0.0, 1.0),), ((1.0, float("nan")),), (1.0, 2.0)]
)
def test_wrong_curves(curve):
    with pytest.raises(
        ValueError, match=r"Cluster.copies: expected pairs of a size and a rate, all more than 0, with"
    ):
        replace(TOY, copies=curve)
    with pytest.raises(ValueError, match=r"Measured.all_reduce: expected pairs of a size and a rate"):
        Measured(2, 2, CURVE, CURVE, curve)


def test_a_cluster_file_keeps_everything(tmp_path):
    full = replace(TOY, intra=MEASURED_LINK, products_32bit=CURVE, copies=CURVE)
    for cluster in (full, *CLUSTERS.values()):
        (tmp_path / "cluster.json").write_text(cost.as_text(cluster, {"device": "a machine"}))
        assert cost.named(str(tmp_path / "cluster.json")) == cluster
        assert SchedulePolicy(cluster=str(tmp_path / "cluster.json")).cluster_for(CPU) == cluster
    assert SchedulePolicy(cluster="A100").cluster is CLUSTERS["A100"]
    assert SchedulePolicy(cluster="A100") == SchedulePolicy(cluster=CLUSTERS["A100"])


def _changed(**changes):
    record = json.loads(cost.as_text(CLUSTERS["CPU"]))
    record["cluster"] |= changes
    return json.dumps({key: value for key, value in record.items() if value is not None})


WRONG_FILES = {
    "not json": r"x: expected JSON, got an error: .*; write it anew with python -m fsdp_compiled calibrate",
    "[]": r"x: expected a cluster file of format 1, got format None",
    '{"format": 2}': r"x: expected a cluster file of format 1, got format 2; write it anew",
    '{"format": 1}': r"x: cluster: expected a dict of fields, got None",
    _changed(speed=1): r"x: cluster: expected the fields name, .*, got 'speed'",
    _changed(intra={"hop_us": 1}): r"x: cluster.intra: expected the fields latency_us, .*, got no 'latency_us'",
    _changed(kernel_us=-1): r"Cluster.kernel_us: expected 0 or more, got -1",
    _changed(intra=None): r"x: cluster.intra: expected a dict of fields, got None",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_wrong_cluster_files(text):
    with pytest.raises(ValueError, match=WRONG_FILES[text]):
        parse(text, "x")


def test_neither_a_cluster_nor_a_file(tmp_path, alone):
    expected = r"cluster: expected H100, .*H200, .* or a cluster file, got 'V100'.*; use one of those"
    with pytest.raises(ValueError, match=expected):
        SchedulePolicy(cluster="V100")
    alone.setenv("FSDP_COMPILED_CLUSTER", "V100")
    with pytest.raises(ValueError, match=f"FSDP_COMPILED_CLUSTER: {expected}"):
        cost.detect(CPU)
    alone.setenv("FSDP_COMPILED_CLUSTER", "H200")
    assert cost.detect(CPU) is CLUSTERS["H200"]


def test_the_clusters_that_ship():
    assert set(CLUSTERS) == {"CPU", "H100", "H100-500W", "H200", "A100", "B200"}
    for name, cluster in CLUSTERS.items():
        assert cluster.name == name
        assert cluster.intra.bytes_per_s >= cluster.inter.bytes_per_s


def test_attention_has_a_rate_of_its_own_for_small_elements():
    cluster = replace(TOY, kernel_us=0.0, attention_efficiency=(0.5, 0.25))
    assert cluster.attention_us(1e9, 0, 2, is_backward=False) == pytest.approx(1e9 / (0.5 * 2e12) * 1e6)
    assert cluster.attention_us(1e9, 0, 2, is_backward=True) == pytest.approx(1e9 / (0.25 * 2e12) * 1e6)
    assert cluster.attention_us(1e9, 0, 4, is_backward=True) == cluster.product_us(1e9, 0, 4)
    assert TOY.attention_us(1e9, 0, 2, is_backward=True) == TOY.product_us(1e9, 0, 2)
    assert cluster.attention_us(0.0, 7e8, 2, is_backward=False) == pytest.approx(7e8 / 0.7e12 * 1e6)


def test_measured_attention_comes_before_shares_of_the_peak():
    curves = {"attention_16bit": ((1e9, 4e11),), "attention_32bit_backward": ((1e6, 1e11), (1e8, 4e11))}
    cluster = replace(TOY, kernel_us=0.0, attention_efficiency=(0.5, 0.25), **curves)
    assert cluster.attention_us(1e9, 0, 2, is_backward=False) == pytest.approx(1e9 / 4e11 * 1e6)
    assert cluster.attention_us(1e7, 0, 4, is_backward=True) == pytest.approx(1e7 / 2e11 * 1e6)
    assert cluster.attention_us(1.0, 0, 4, is_backward=True) == pytest.approx(1e6 / 1e11 * 1e6)
    assert cluster.attention_us(1e9, 0, 2, is_backward=True) == pytest.approx(1e9 / (0.25 * 2e12) * 1e6)
    assert cluster.attention_us(1e9, 0, 4, is_backward=False) == cluster.product_us(1e9, 0, 4)


@pytest.mark.parametrize("wrong", [0.0, 1.5, (0.5,), (0.5, 0.0), (0.5, 2.0), "half"])
@pytest.mark.parametrize("name", ["memory_efficiency", "efficiency", "attention_efficiency"])
def test_shares_are_more_than_0_and_at_most_1(name, wrong):
    expected = "None or two numbers, more than 0" if name.startswith("attention") else "(a number, )?more than 0"
    with pytest.raises((TypeError, ValueError), match=f"Cluster.{name}: expected {expected}"):
        replace(TOY, **{name: wrong})


@pytest.mark.parametrize("given", ["", "0"])
def test_no_number_of_local_ranks(monkeypatch, given):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    assert cost.detect(torch.device("cpu")).ranks_per_node == CLUSTERS["CPU"].ranks_per_node


@pytest.mark.parametrize("given", ["two", "-1", "1.5"])
def test_a_wrong_number_of_local_ranks(monkeypatch, given):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    with pytest.raises(
        ValueError, match=f"LOCAL_WORLD_SIZE: expected the number of ranks .* got '{given}'; unset it"
    ):
        cost.detect(torch.device("cpu"))


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf")])
def test_numbers_out_of_range(number):
    with pytest.raises(ValueError, match=rf"Link.latency_us: expected 0 or more, got {number}"):
        Link(number, 1.0, 1.0)
    with pytest.raises(ValueError, match=rf"Link.bytes_per_s: expected more than 0, got {number}"):
        Link(1.0, 1.0, number)
    with pytest.raises(ValueError, match=rf"Cluster.piece_us: expected 0 or more, got {number}"):
        Cluster("x", 1, 1, 1, 1, LINK, LINK, piece_us=number)


def test_what_is_no_number():
    with pytest.raises(TypeError, match="Link.hop_us: expected 0 or more, got '3'"):
        Link(1.0, "3", 1.0)
    with pytest.raises(TypeError, match="Cluster.flops_16bit: expected more than 0, got True"):
        Cluster("x", True, 1, 1, 1, LINK, LINK)
    with pytest.raises(TypeError, match="Cluster.inter: expected a Link, got 3"):
        Cluster("x", 1, 1, 1, 1, LINK, 3)


def test_bad_numbers():
    with pytest.raises(ValueError, match=r"Link.bytes_per_s: expected more than 0, got 0"):
        Link(1.0, 1.0, 0)
    with pytest.raises(ValueError, match=r"Cluster.compute_blocked_fraction: expected 0 to 1, got 2"):
        Cluster("x", 1, 1, 1, 1, LINK, LINK, compute_blocked_fraction=2)


def test_the_host_takes_its_time_from_compute_only_where_ranks_compute_on_it():
    there = replace(TOY, launch_us=2.0, parameter_us=10.0)
    assert there.step_us(100.0, launches=5, parameters=3) == 100.0  # meanwhile
    assert there.step_us(30.0, launches=5, parameters=3) == 40.0  # the device waits for the host
    here = replace(there, on_host=True, new_mib_us=7.0)
    assert here.step_us(100.0, launches=5, parameters=3) == 140.0
    assert here.step_us(100.0, launches=5, parameters=3, new_bytes=3 * 2**20) == 161.0
    assert replace(there, new_mib_us=7.0).step_us(100.0, launches=5, parameters=3, new_bytes=3 * 2**20) == 100.0
