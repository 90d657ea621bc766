"""What collectives and the copies around them cost on a given cluster: records, and arithmetic on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import NamedTuple

import torch.distributed as dist

from ...expect import expect, unexpected
from ...sharding.dtensor import process_group
from ...sharding.spec import Group

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

    def all_gather_times(self, sizes: Sequence[int], lane: Lane, kind: AllGatherKind) -> AllGatherTimes:
        """Return the times of one all-gather of parameters of these bytes, unsharded."""
        size, world = sum(sizes), lane.world
        us, pack_us, unpack_us = lane.link.collective_us(size, world), 0.0, 0.0
        if kind.from_host:
            us += self.host_us(size // world)
        if kind.into_place:
            us += (len(sizes) - 1) * self.piece_us
        else:
            unpack_us = self.packing_us(size)
        if not kind.inputs_persist or (not kind.into_place and len(sizes) > 1 and world > 1):
            pack_us = self.packing_us(size // world)
        if not kind.beside:
            return AllGatherTimes(us, pack_us, unpack_us)
        if kind.inputs_persist:
            return AllGatherTimes(us + pack_us + unpack_us, 0.0, 0.0)
        return AllGatherTimes(us + unpack_us, pack_us, 0.0)

    def saves_by_gathering_into_place(self, sizes: Sequence[int]) -> bool:
        """Tell whether further pieces of one launch cost less than unpacking parameters of these bytes."""
        return (len(sizes) - 1) * self.piece_us <= self.copy_us(sum(sizes))


@dataclass(frozen=True)
class Lane:
    """The link that a collective queues for."""

    link: Link
    world: int  # ranks of the collective
    name: str = ""  # collectives of equal names run one after the other


@dataclass(frozen=True)
class AllGatherKind:
    """What happens around an all-gather."""

    into_place: bool = False  # each parameter is gathered straight into its own memory
    beside: bool = False  # copies run on a side stream
    inputs_persist: bool = True  # the shards keep their memory until the wait; others are copied first, by compute
    from_host: bool = False  # the shards live there


class AllGatherTimes(NamedTuple):
    """Times of an all-gather: on the link, with what runs on its stream; of compute before, and after."""

    us: float
    pack_us: float
    unpack_us: float


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
