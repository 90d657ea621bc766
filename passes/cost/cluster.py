"""What collectives, copies and products cost on a machine that is described by a record, by arithmetic alone."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf, log
from typing import Any, NamedTuple

from ...expect import expect, expect_bool, unexpected
from ...sharding.dtensor import process_group
from ...sharding.mesh import siblings_of
from ...sharding.spec import AllGatherBucket, Group

_USUAL_BYTES = 2**24  # of a collective, by which links are compared
Curve = tuple[tuple[float, float], ...]  # measured: sizes, which increase, and what a second does at each


def per_second(curve: Curve, size: float) -> float:
    """Return what a second does at ``size``: a power of the size between two points, and as at the ends beyond."""
    above = bisect_right(curve, (size, inf))
    if above in (0, len(curve)):
        return curve[max(above - 1, 0)][1]
    (left, low), (right, high) = curve[above - 1 : above + 1]
    return low * (high / low) ** (log(size / left) / log(right / left))


@dataclass(frozen=True)
class Measured:
    """Collectives of groups of ``world`` ranks, ``in_node`` of them in a node, while all such groups do the same.

    Curves are bytes of the unsharded buffer a second, by the bytes of it.
    """

    world: int
    in_node: int
    all_gather: Curve
    reduce_scatter: Curve
    all_reduce: Curve

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class Link:
    """How long a collective takes between ranks, as a ring.

    Args:
        latency_us: of one collective, whatever its size.
        hop_us: added for each rank beyond the first.
        bytes_per_s: that one rank receives; NCCL calls it bus bandwidth. Between nodes: by a network card of its own.
        reduce_factor: how much longer a byte takes to reduce than to all-gather.
        knee_bytes: beyond this size of the unsharded buffer, a byte takes twice as long; 0 for nowhere.
        compute_blocked_fraction: as of a :class:`Cluster`; None: as there.
        host_us: of compute on the same cores, taken by each collective whatever its size: launching it, waiting for
            it, and the threads that send.
        measured: groups for which curves take the place of all of the above but the latencies, which are the least.
    """

    latency_us: float
    hop_us: float
    bytes_per_s: float
    reduce_factor: float = 1.0
    knee_bytes: int = 0
    compute_blocked_fraction: float | None = None
    host_us: float = 0.0
    measured: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        _check_fields(self, "latency_us", "hop_us")
        _check_fraction(self)
        expect("Link.measured", self.measured, tuple, "a tuple of Measured")

    def collective_us(self, size_bytes: int, world: int, reduces: bool = False, passes: int = 1) -> float:
        """Return the time to all-gather or reduce ``size_bytes``, counted unsharded, over ``world`` ranks.

        ``passes`` is how often the buffer goes around the ring: 2 for an all-reduce, which reduces and then gathers.

        *Source:* a ring moves ``(world - 1) / world`` of the buffer through each rank in one pass, by ``world - 1``
        hops (NCCL's performance notes).
        """
        if world == 1:
            return 0.0
        least_us = self.latency_us + passes * self.hop_us * (world - 1)
        for group in self.measured:
            if group.world == world and size_bytes:
                curve = group.all_reduce if passes == 2 else group.reduce_scatter if reduces else group.all_gather
                return max(least_us, 1e6 * size_bytes / per_second(curve, size_bytes))
        seconds = size_bytes * (world - 1) / world / self.bytes_per_s
        if reduces:
            seconds *= self.reduce_factor
        if self.knee_bytes and size_bytes > self.knee_bytes:
            seconds *= 2
        return least_us + passes * seconds * 1e6


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
        efficiency: share of peak FLOP/s that matrix products reach, and of the bandwidth to the host. *Source* of the
            default: AutoParallel's compute model.
        memory_efficiency: share of ``memory_bytes_per_s`` that kernels reach.
        attention_efficiency: share of ``flops_16bit`` that fused attention reaches, forward and backward; None for
            ``efficiency``, also where elements are larger.
        products_16bit: measured FLOP/s of bf16 matrix products by their FLOPs, in place of the peak's share.
        products_32bit: the same of fp32 ones.
        attention_16bit: measured FLOP/s of attention on elements of 16 bits by its FLOPs, in place of the peak's
            share; of its backward, and of fp32 ones, those that follow.
        copies: measured bytes a second, read and written, by the bytes of both, in place of the bandwidth's share.
        memory_bytes: device memory of one rank; 0 where it is unknown.
        on_host: whether ranks compute on the host: launching kernels takes its time from compute, and collectives,
            which gloo does, work on copies of their buffers.
        launch_us: of the host, to launch a kernel.
        parameter_us: of the host, for each parameter in a step: guards, packing, its gradient, the optimizer.
        new_mib_us: of the host, if ranks compute there, for each MiB that the system gives and takes back. *Source*
            of the rule: a C library returns freed memory that lies at the end of its heap (glibc's M_TRIM_THRESHOLD),
            so that a step gets anew what it needs beyond what lasts.
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
    efficiency: float = 0.7
    memory_efficiency: float = 0.7
    attention_efficiency: tuple[float, float] | None = None
    products_16bit: Curve = ()
    products_32bit: Curve = ()
    attention_16bit: Curve = ()
    attention_16bit_backward: Curve = ()
    attention_32bit: Curve = ()
    attention_32bit_backward: Curve = ()
    copies: Curve = ()
    memory_bytes: int = 0
    on_host: bool = False
    launch_us: float = 0.0
    parameter_us: float = 0.0
    new_mib_us: float = 0.0

    def __post_init__(self) -> None:
        _check_fields(self, "kernel_us")
        expect_bool("Cluster.on_host", self.on_host)
        for name in ("intra", "inter"):
            expect(f"Cluster.{name}", getattr(self, name), Link, "a Link")
        _check_fraction(self)
        _check_shares(self)

    def link(self, group: str, world: int) -> Link:
        """Return the slowest link, see :meth:`link_of`, of a process group and those along the same mesh dimension.

        Ranks of all of them estimate alike, and decide alike on what their replicas reduce together.
        """
        try:  # what this looks at, compile-cache keys hold: see group_places
            siblings = siblings_of(process_group(group))
        except (LookupError, RuntimeError, ValueError):
            siblings = [tuple(range(world))]
        return max(map(self.link_of, siblings), key=lambda link: link.collective_us(_USUAL_BYTES, world))

    def link_of(self, ranks: Sequence[int]) -> Link:
        """Return the link that a group of these ranks runs over.

        A ring enters a node by the card of every rank that the group has there, as fast as ``intra`` permits, and
        hops between nodes as often as there are nodes. *Source:* NCCL's src/graph/tuning.cc, which counts hops within
        nodes and between them apart; bus bandwidths above one card's in NVIDIA/nccl issue 1218.
        """
        in_node = Counter(rank // self.ranks_per_node for rank in ranks)
        if len(in_node) == 1:
            return self.intra
        hops, between = len(ranks) - 1, min(len(in_node), len(ranks) - 1)
        cards = min(in_node.values())
        return replace(
            self.inter,
            measured=tuple(group for group in self.inter.measured if group.in_node == cards),
            hop_us=(between * self.inter.hop_us + (hops - between) * self.intra.hop_us) / hops,
            bytes_per_s=min(self.intra.bytes_per_s, cards * self.inter.bytes_per_s),
        )

    def lane(self, group: Group | None) -> Lane:
        """Return the link that collectives of a process group queue for; without one, copies to the host."""
        if group is None:
            return Lane(self.intra, 1, "to the host", self.compute_blocked_fraction)
        return self.lane_of(self.link(group.name, group.world), group.world)

    def lane_of(self, link: Link, world: int) -> Lane:
        blocked = link.compute_blocked_fraction
        blocked = self.compute_blocked_fraction if blocked is None else blocked
        return Lane(link, world, "inside a node" if link is self.intra else "between nodes", blocked)

    def product_us(self, flops: float, traffic_bytes: float, itemsize: int) -> float:
        """Return the time of a matrix product on elements of ``itemsize`` bytes."""
        is_16bit = itemsize <= 2
        curve = self.products_16bit if is_16bit else self.products_32bit
        peak = self.flops_16bit if is_16bit else self.flops_32bit
        rate = per_second(curve, flops) if curve else self.efficiency * peak
        return max(1e6 * flops / rate, self.memory_us(traffic_bytes), self.kernel_us)

    def attention_us(self, flops: float, traffic_bytes: float, itemsize: int, is_backward: bool) -> float:
        """Return the time of attention in one kernel; ``flops`` are those that it needs, the masked ones left out."""
        is_16bit = itemsize <= 2
        curve = (
            (self.attention_32bit, self.attention_32bit_backward),
            (self.attention_16bit, self.attention_16bit_backward),
        )[is_16bit][is_backward]
        if not curve and not (is_16bit and self.attention_efficiency):
            return self.product_us(flops, traffic_bytes, itemsize)
        share = self.attention_efficiency[is_backward] if self.attention_efficiency else 0.0
        flops = max(flops, curve[0][0]) if curve else flops  # a smaller one takes as long as the smallest measured
        rate = per_second(curve, flops) if curve else share * self.flops_16bit
        return max(1e6 * flops / rate, self.memory_us(traffic_bytes), self.kernel_us)

    def step_us(self, device_us: float, launches: int, parameters: int, new_bytes: int = 0) -> float:
        """Return the time of a step whose device computes, waits and copies for so long: the host has to keep up.

        ``new_bytes`` are those that the step needs beyond what lasts from step to step.
        """
        host_us = launches * self.launch_us + parameters * self.parameter_us
        if not self.on_host:
            return max(device_us, host_us)
        return device_us + host_us + new_bytes / 2**20 * self.new_mib_us

    def memory_us(self, traffic_bytes: float) -> float:
        """Return the time to move so many bytes to and from device memory, read and written ones together."""
        usable = self.memory_efficiency * self.memory_bytes_per_s
        return 1e6 * traffic_bytes / (per_second(self.copies, traffic_bytes) if self.copies else usable)

    def copy_us(self, size_bytes: int) -> float:
        """Return the time to read and write ``size_bytes`` in device memory."""
        return self.memory_us(2 * size_bytes)

    def packing_us(self, size_bytes: int) -> float:
        """Return the time that compute takes to copy ``size_bytes`` into, or out of, a collective's buffer."""
        return max(self.copy_us(size_bytes), self.kernel_us)

    def host_us(self, size_bytes: int) -> float:
        """Return the time to move ``size_bytes`` to the host, or from there."""
        return 1e6 * size_bytes / (self.efficiency * self.host_bytes_per_s)

    def all_gather_times(self, sizes: Sequence[int], lane: Lane, bucket: AllGatherBucket) -> Times:
        """Return the times of one all-gather of parameters of these bytes, unsharded; on GPUs copies overlap."""
        size, world = sum(sizes), lane.world
        us, pack_us, unpack_us = lane.link.collective_us(size, world), 0.0, 0.0
        if bucket.spec.device and not self.on_host:
            us += self.host_us(size // world)
        if bucket.into_place:
            us += (len(sizes) - 1) * self.piece_us
        else:
            unpack_us = self.packing_us(size)
        if not bucket.inputs_persist or (not bucket.into_place and len(sizes) > 1 and world > 1):
            pack_us = self.packing_us(size // world)
        if self.on_host:
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
    compute_blocked_fraction: float = 0.0  # see :class:`Cluster`

    def blocked_us(self, us: float) -> float:
        """Return for how long of a collective's ``us`` compute cannot run."""
        return min(us, self.link.host_us + us * self.compute_blocked_fraction)


class Times(NamedTuple):
    """Estimated microseconds of one bucket."""

    stages_us: tuple[float, ...]  # on the lane of each stage, with what runs on its stream
    pack_us: float = 0.0  # of compute, before the launch
    unpack_us: float = 0.0  # of compute, after the first wait


def _check_fields(record: Link | Cluster | Measured, *may_be_0: str) -> None:
    """Raise unless every number is positive and finite, and every curve has sizes that increase, and values.

    Numbers that are named, and those that are 0 by default, may be 0; a curve that is empty by default may be empty.
    """
    for field in fields(record):
        name, value = f"{type(record).__name__}.{field.name}", getattr(record, field.name)
        if field.type == "Curve":
            _check_curve(name, value, field.default == ())
        elif field.type in ("int", "float"):
            is_0_allowed = field.name in may_be_0 or field.default == 0
            least = "0 or more" if is_0_allowed else "more than 0"
            if field.type == "int":
                expect(name, value, int, f"an integer, {least}")
            expect(name, value, int | float, least)
            if not (0 <= value < inf) or (value == 0 and not is_0_allowed):
                raise unexpected(name, least, value)


def _check_curve(name: str, curve: Any, may_be_empty: bool) -> None:
    expected = "pairs of a size and a rate, all more than 0, with increasing sizes"
    expect(name, curve, tuple, expected)
    is_right = all(map(_are_two_numbers, curve)) and (may_be_empty or len(curve) > 0)
    if not is_right or (sizes := [size for size, _ in curve]) != sorted(set(sizes)):
        raise unexpected(name, expected, repr(curve))


def _check_fraction(record: Link | Cluster) -> None:
    name, value = f"{type(record).__name__}.compute_blocked_fraction", record.compute_blocked_fraction
    expect(name, value, int | float | None, "0 to 1")
    if value is not None and not 0 <= value <= 1:
        raise unexpected(name, "0 to 1", value)


def _check_shares(cluster: Cluster) -> None:
    """Raise unless shares are at most 1, those of attention two numbers; that others are numbers was checked."""
    for name in ("efficiency", "memory_efficiency"):
        if (share := getattr(cluster, name)) > 1:
            raise unexpected(f"Cluster.{name}", "a number, more than 0 and at most 1", share)
    shares = cluster.attention_efficiency
    if shares is not None and not (_are_two_numbers(shares) and max(shares) <= 1):
        expected = "None or two numbers, more than 0 and at most 1"
        raise unexpected("Cluster.attention_efficiency", expected, repr(shares))


def _are_two_numbers(given: Any) -> bool:
    """Tell whether this is a tuple of two numbers, positive and finite."""
    is_pair = isinstance(given, tuple) and len(given) == 2
    return is_pair and all(isinstance(x, int | float) and 0 < x < inf for x in given)
