"""What collectives and the copies around them cost: clusters, those that ship, and which one this process is in."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...expect import expect, unexpected
from ...sharding.dtensor import process_group
from ...sharding.spec import AllGatherBucket, Group
from ..torch_internals import groups

EFFICIENCY = 0.7  # of peak FLOP/s and of memory bandwidth. *Source:* AutoParallel's compute model.


@dataclass(frozen=True)
class Link:
    """How long a collective takes between ranks, as a ring.

    Args:
        latency_us: of one collective, whatever its size.
        hop_us: added for each rank beyond the first.
        bytes_per_s: that one rank receives; NCCL calls it bus bandwidth. Between nodes: by a network card of its own.
        reduce_factor: how much longer a byte takes to reduce than to all-gather.
        knee_bytes: beyond this size of the unsharded buffer, a byte takes twice as long; 0 for nowhere.
    """

    latency_us: float
    hop_us: float
    bytes_per_s: float
    reduce_factor: float = 1.0
    knee_bytes: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self, may_be_0=("latency_us", "hop_us", "knee_bytes"))

    def collective_us(self, size_bytes: int, world: int, reduces: bool = False, passes: int = 1) -> float:
        """Return the time to all-gather or reduce ``size_bytes``, counted unsharded, over ``world`` ranks.

        ``passes`` is how often the buffer goes around the ring: 2 for an all-reduce, which reduces and then gathers.

        *Source:* a ring moves ``(world - 1) / world`` of the buffer through each rank in one pass, by ``world - 1``
        hops (NCCL's performance notes).
        """
        if world == 1:
            return 0.0
        seconds = size_bytes * (world - 1) / world / self.bytes_per_s
        if reduces:
            seconds *= self.reduce_factor
        if self.knee_bytes and size_bytes > self.knee_bytes:
            seconds *= 2
        return self.latency_us + passes * (self.hop_us * (world - 1) + seconds * 1e6)


@dataclass(frozen=True)
class Cluster:
    """A machine as the schedule sees it.

    Args:
        name: for reports.
        flops_16bit: peak FLOP/s of bf16 and fp16 matrix products, dense.
        flops_32bit: of fp32 ones, as torch runs them by default.
        memory_bytes_per_s: bandwidth of device memory.
        kernel_us: the least time that a matrix product takes, or a copy around a collective.
        intra: the link between ranks of one node.
        inter: what one rank has to other nodes: its network card. A group uses the cards of all its ranks at once.
        ranks_per_node: ranks that share ``intra``.
        compute_blocked_fraction: share of a collective's time during which compute cannot run: 1 where both use the
            same cores, 0 where an engine of its own moves the data.
        piece_us: added to an all-gather by each further buffer that it gathers into.
        host_bytes_per_s: from device to host, or back. *Source* of the default: 16 lanes of PCIe 5.0.
    """

    name: str
    flops_16bit: float
    flops_32bit: float
    memory_bytes_per_s: float
    kernel_us: float
    intra: Link
    inter: Link
    ranks_per_node: int = 8
    compute_blocked_fraction: float = 0.0
    piece_us: float = 0.0
    host_bytes_per_s: float = 64e9

    def __post_init__(self) -> None:
        _check_numbers(self, may_be_0=("kernel_us", "compute_blocked_fraction", "piece_us"))
        for name in ("intra", "inter"):
            expect(f"Cluster.{name}", getattr(self, name), Link, "a Link")
        if self.compute_blocked_fraction > 1:
            raise unexpected("Cluster.compute_blocked_fraction", "0 to 1", self.compute_blocked_fraction)

    def link(self, group: str, world: int) -> Link:
        """Return the link that a process group runs over.

        A ring enters a node by the card of every rank that the group has there, as fast as ``intra`` permits, and
        hops between nodes as often as there are nodes. *Source:* NCCL's src/graph/tuning.cc, which counts hops within
        nodes and between them apart; bus bandwidths above one card's in NVIDIA/nccl issue 1218.
        """
        try:  # what this looks at, compile-cache keys hold: see group_places
            ranks = dist.get_process_group_ranks(process_group(group))
        except (LookupError, RuntimeError, ValueError):
            ranks = list(range(world))
        in_node = Counter(rank // self.ranks_per_node for rank in ranks)
        if len(in_node) == 1:
            return self.intra
        hops, between = len(ranks) - 1, min(len(in_node), len(ranks) - 1)
        cards = min(in_node.values())
        return replace(
            self.inter,
            hop_us=(between * self.inter.hop_us + (hops - between) * self.intra.hop_us) / hops,
            bytes_per_s=min(self.intra.bytes_per_s, cards * self.inter.bytes_per_s),
        )

    def lane(self, group: Group | None) -> Lane:
        """Return the link that collectives of a process group queue for; without one, copies to the host."""
        if group is None:
            return Lane(self.intra, 1, "to the host")
        link = self.link(group.name, group.world)
        return Lane(link, group.world, "inside a node" if link is self.intra else "between nodes")

    def copy_us(self, size_bytes: int) -> float:
        """Return the time to read and write ``size_bytes`` in device memory."""
        return 2e6 * size_bytes / (EFFICIENCY * self.memory_bytes_per_s)

    def packing_us(self, size_bytes: int) -> float:
        """Return the time that compute takes to copy ``size_bytes`` into, or out of, a collective's buffer."""
        return max(self.copy_us(size_bytes), self.kernel_us)

    def host_us(self, size_bytes: int) -> float:
        """Return the time to move ``size_bytes`` to the host, or from there."""
        return 1e6 * size_bytes / (EFFICIENCY * self.host_bytes_per_s)

    def all_gather_times(self, sizes: Sequence[int], lane: Lane, bucket: AllGatherBucket, overlaps: bool) -> Times:
        """Return the times of one all-gather of parameters of these bytes, unsharded.

        ``bucket`` tells how it is done; ``overlaps``: copies run on a side stream of a GPU.
        """
        size, world = sum(sizes), lane.world
        us, pack_us, unpack_us = lane.link.collective_us(size, world), 0.0, 0.0
        if bucket.spec.device and overlaps:
            us += self.host_us(size // world)
        if bucket.into_place:
            us += (len(sizes) - 1) * self.piece_us
        else:
            unpack_us = self.packing_us(size)
        if not bucket.inputs_persist or (not bucket.into_place and len(sizes) > 1 and world > 1):
            pack_us = self.packing_us(size // world)
        if not overlaps:
            return Times((us,), pack_us, unpack_us)
        if bucket.inputs_persist:
            return Times((us + pack_us + unpack_us,))
        return Times((us + unpack_us,), pack_us)

    def saves_by_gathering_into_place(self, sizes: Sequence[int]) -> bool:
        """Tell whether further pieces of one launch cost less than unpacking parameters of these bytes."""
        return (len(sizes) - 1) * self.piece_us <= self.copy_us(sum(sizes))


@dataclass(frozen=True)
class Lane:
    """The link that a collective queues for."""

    link: Link
    world: int  # ranks of the collective
    name: str = ""  # collectives of equal names run one after the other


class Times(NamedTuple):
    """Estimated microseconds of one bucket."""

    stages_us: tuple[float, ...]  # on the lane of each stage, with what runs on its stream
    pack_us: float = 0.0  # of compute, before the launch
    unpack_us: float = 0.0  # of compute, after the first wait


def _check_numbers(record: Link | Cluster, may_be_0: tuple[str, ...]) -> None:
    """Raise unless every field that is a number is positive and finite; those named may be 0."""
    for field in fields(record):
        if field.type not in ("int", "float"):
            continue
        name, value = f"{type(record).__name__}.{field.name}", getattr(record, field.name)
        least = "0 or more" if field.name in may_be_0 else "more than 0"
        if field.type == "int":
            expect(name, value, int, f"an integer, {least}")
        expect(name, value, int | float, least)
        if not (0 <= value < inf) or (value == 0 and field.name not in may_be_0):
            raise unexpected(name, least, value)


# NCCL's ring: base latency and latency per hop of the Simple protocol, over NVLink and over the network.
# *Source:* baseLat and hwLat in NCCL's src/graph/tuning.cc.
_NCCL_BASE_US, _NVLINK_HOP_US, _NETWORK_HOP_US = 8.4, 3.4, 14.0
_NVLINK_USABLE = 370 / 450  # of its line rate, after protocol. *Source:* NVIDIA/nccl-tests issue 212 (H100).
# Of a network card's line rate. *Source:* 46 of 50 GB/s for a 400 Gb/s card, NVIDIA/nccl-tests issue 290; 75 of
# 100 GB/s for the eight 100 Gb/s cards of an A100 node, NVIDIA/nccl issue 495.
_CARD_USABLE, _A100_CARD_USABLE = 46 / 50, 75 / 100


def _gpu(name: str, tflops: tuple[float, float], memory_gb: float, nvlink_gb: float, card_gb: float) -> Cluster:
    tflops_16, tflops_32 = tflops
    return Cluster(
        name=name,
        flops_16bit=tflops_16 * 1e12,
        flops_32bit=tflops_32 * 1e12,
        memory_bytes_per_s=memory_gb * 1e9,
        kernel_us=7.0,  # *Source:* AutoParallel's launch floor.
        intra=Link(_NCCL_BASE_US, _NVLINK_HOP_US, _NVLINK_USABLE * nvlink_gb * 1e9),
        inter=Link(_NCCL_BASE_US, _NETWORK_HOP_US, card_gb * 1e9),
        piece_us=_NCCL_BASE_US,  # not measured: as if each piece of a group waited for the one before
    )


CLUSTERS: Mapping[str, Cluster] = {
    # *Source:* NVIDIA's datasheets (SXM parts): dense bf16 and fp32 FLOP/s, memory, half of NVLink's two-way
    # bandwidth; one network card for each GPU as in NVIDIA's DGX systems; PCIe 5.0, for the A100 4.0.
    "H100": _gpu("H100", (989, 67), 3350, 450, _CARD_USABLE * 50),
    "H200": _gpu("H200", (989, 67), 4800, 450, _CARD_USABLE * 50),
    "A100": replace(_gpu("A100", (312, 19.5), 2039, 300, _A100_CARD_USABLE * 25), host_bytes_per_s=32e9),
    "B200": _gpu("B200", (2250, 75), 8000, 900, _CARD_USABLE * 50),
    # *Source:* measured: two ranks with one thread each on a 2-core x86-64 virtual machine, torch 2.13.0. fp32
    # products 93 GFLOP/s and copies 17 GB/s read and written (both 0.7 of what stands here), gloo all-gathers
    # 0.4 ms and 0.6 ms a MiB, twice that a MiB beyond 16 MiB, reduce-scatters 0.6 ms and 1.15 ms a MiB; 10 us for
    # each further buffer of coalesced all-gathers.
    "CPU": Cluster(
        name="CPU",
        flops_16bit=133e9,
        flops_32bit=133e9,
        memory_bytes_per_s=25e9,
        kernel_us=2.0,
        intra=Link(400.0, 50.0, 0.85e9, reduce_factor=1.8, knee_bytes=16 * 2**20),
        inter=Link(600.0, 50.0, 0.85e9, reduce_factor=1.8, knee_bytes=16 * 2**20),
        compute_blocked_fraction=1.0,
        piece_us=10.0,
        host_bytes_per_s=25e9,  # its own memory
    ),
}


def detect(device: torch.device) -> Cluster:
    """Return the cluster that ``device`` belongs to.

    The device's name chooses the constants; an unknown GPU is taken for an H100. The number of ranks on a node
    is ``torchrun``'s ``LOCAL_WORLD_SIZE``, else the number of this machine's GPUs. Ranks on machines of different
    kinds would decide differently: give ``SchedulePolicy(cluster=...)`` there.
    """
    name, ranks_per_node = description(device)
    known = next((cluster for key, cluster in CLUSTERS.items() if key in name), CLUSTERS["H100"])
    return replace(known, ranks_per_node=ranks_per_node)


def group_places() -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return name and ranks of each process group, which compile-cache keys must hold.

    They are all that :meth:`Cluster.link` looks at. Groups of the first ranks, such as all ranks, are left out: there
    the world, which specs hold, tells as much, and a group for something else then leaves the keys as they are.
    """
    ranks_of = {str(name): dist.get_process_group_ranks(group) for group, name in groups().items()}
    return tuple(sorted((name, tuple(ranks)) for name, ranks in ranks_of.items() if max(ranks) >= len(ranks)))


def description(device: torch.device) -> tuple[str, int]:
    """Return all that :func:`detect` looks at, which compile-cache keys must hold."""
    module = torch.get_device_module(device)
    is_there = device.type != "cpu" and module.is_available()
    name = module.get_device_name(device) if is_there else "CPU" if device.type == "cpu" else device.type
    given = os.environ.get("LOCAL_WORLD_SIZE") or "0"
    if not given.isdecimal():
        raise unexpected("LOCAL_WORLD_SIZE", "the number of ranks on this machine", repr(given), "unset it")
    local = int(given)
    return name, local or (module.device_count() if is_there else 0) or CLUSTERS["CPU"].ranks_per_node
