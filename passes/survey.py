"""Reads a graph into plain records: where compute stands, and where tensors are first and last read.

It must not decide anything, nor change a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from . import cost, ir
from .compute import is_view, node_us, size_bytes
from .schedule import Action, Gather, Kind, Load, Reduction


@dataclass(frozen=True)
class Reads:
    """Where a tensor is read: positions of the first and the last compute node, views of it included.

    Args:
        first: the number of compute nodes, which is the end of the graph, if nothing reads it.
        last: likewise.
    """

    first: int
    last: int


class Compute:
    """The nodes of a graph that are no collective's, in order; their index is their position.

    Args:
        graph: any graph.
        is_ours: tells which nodes belong to collectives.
    """

    def __init__(self, graph: fx.Graph, is_ours: Callable[[fx.Node], bool]) -> None:
        self.nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and not is_ours(n)]
        self.position = {node: index for index, node in enumerate(self.nodes)}

    @property
    def end(self) -> int:
        """The position after the last node."""
        return len(self.nodes)

    def time(self, cluster: cost.Cluster) -> tuple[float, ...]:
        """Return each node's estimated time in microseconds."""
        return tuple(node_us(node, cluster) for node in self.nodes)

    def after(self, sources: Iterable[fx.Node]) -> int:
        """Return the first position at which all ``sources`` exist."""
        return max((self.position.get(source, -1) + 1 for source in sources), default=0)

    def reads(self, tensors: Iterable[fx.Node]) -> Reads:
        """Return where ``tensors`` are read; nodes that have no position are looked through, as views are."""
        first, last = self.end, -1
        stack, seen = [(tensor, True) for tensor in tensors], set[fx.Node]()
        while stack:
            tensor, is_whole = stack.pop()
            for user in tensor.users:
                place = self.position.get(user)
                if place is not None:
                    first, last = min(first, place) if is_whole else first, max(last, place)
                if user not in seen and (place is None or is_view(user)):
                    seen.add(user)
                    stack.append((user, is_whole and place is None))
        return Reads(first, max(first, last))


def is_returned(node: fx.Node) -> bool:
    """Tell whether the graph returns ``node`` or a view of it, as forward does with what it keeps for backward."""
    return any(user.op == "output" or (is_view(user) and is_returned(user)) for user in node.users)


def cluster_of(graph: fx.Graph, given: cost.Cluster | None) -> cost.Cluster:
    """Return ``given``, or the cluster that the graph computes on, though shards may live on the CPU."""
    if given is not None:
        return given
    devices = (value.device for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor))
    return cost.detect(next((device for device in devices if device.type != "cpu"), torch.device("cpu")))


@dataclass(frozen=True)
class Flight:
    """One bucket after lowering.

    Args:
        bundle: its identity.
        nodes: all of its nodes, in graph order.
        launches: where its collectives start: one, or a reduce-scatter and its all-reduce.
        waits: as many.
    """

    bundle: ir.Bundle
    nodes: tuple[fx.Node, ...]
    launches: tuple[fx.Node, ...]
    waits: tuple[fx.Node, ...]

    def stages(self) -> list[tuple[fx.Node, ...]]:
        """Return its nodes as [pack and launch, wait (and launch the all-reduce, and wait), unpack].

        Each stage but the last ends with a launch; each but the first begins with a wait.
        """
        cuts = [self.nodes.index(wait) for wait in self.waits]
        return [self.nodes[a:b] for a, b in zip([0, *cuts], [*cuts, len(self.nodes)], strict=True)]

    def sources(self) -> list[fx.Node]:
        """Return what the bucket is packed from."""
        mine = set(self.nodes)
        return [source for node in self.nodes for source in node.all_input_nodes if source not in mine]


def landing(graph: fx.Graph) -> list[fx.Node]:
    """Return the host's waits for gradients, and what unpacks them, that nothing but the graph's caller reads."""
    found: dict[fx.Node, None] = {}
    for node in filter(ir.is_arrival, graph.nodes):
        unpacked = _dependents(node)
        if all(ir.bundle_of(user) for user in unpacked):
            found |= dict.fromkeys([node, *unpacked])
    return list(found)


def _dependents(node: fx.Node) -> list[fx.Node]:
    """Return all that is computed from ``node``, the nearest first."""
    found = [user for user in node.users if user.op != "output"]
    for each in found:
        found += [user for user in each.users if user.op != "output" and user not in found]
    return found


def flights(graph: fx.Graph) -> list[Flight]:
    """Return every bucket of a lowered graph that communicates, in order of launch, without :func:`landing`."""
    found: dict[ir.Bundle, list[fx.Node]] = {}
    landed = set(landing(graph))
    for node in graph.nodes:
        bundle = ir.bundle_of(node)
        if bundle is not None and node not in landed:
            found.setdefault(bundle, []).append(node)
    every = [
        Flight(bundle, tuple(nodes), tuple(filter(ir.is_launch, nodes)), tuple(filter(ir.is_wait, nodes)))
        for bundle, nodes in found.items()
    ]
    return [flight for flight in every if flight.launches]


def compute_of(graph: fx.Graph, found: Sequence[Flight]) -> Compute:
    """Return the compute of a lowered graph, ``found`` being its flights."""
    ours = {node for flight in found for node in flight.nodes} | set(landing(graph))
    return Compute(graph, ours.__contains__)


def load_of(graph: fx.Graph, compute: Compute, found: Sequence[Flight], cluster: cost.Cluster) -> Load:
    """Return what the schedule has to place: the flights of ``graph`` in its compute."""
    return Load(
        compute.time(cluster),
        tuple(_gather(flight, compute, cluster) for flight in found if not flight.bundle.reduces),
        tuple(_reduction(flight, compute, cluster) for flight in found if flight.bundle.reduces),
        cluster.taken_from_compute,
    )


def _gather(flight: Flight, compute: Compute, cluster: cost.Cluster) -> Gather:
    reads = compute.reads(flight.waits)
    (launch,) = flight.launches
    group, world = ir.group_of(launch)
    link, beside = cluster.link(group, world), ir.leaves_compute(launch)
    kind = cost.GatherKind(
        in_place=flight.bundle.is_in_place,
        beside=beside,
        lasting=not (beside and ir.copies_in_first(launch)),
        from_host=any(ir.changes_device(source, launch) for source in flight.sources()),
    )
    times = cluster.gather_times(flight.bundle.sizes, link, world, kind)
    return Gather(
        bytes=size_bytes(launch),
        us=times.us,
        first=reads.first,
        last=reads.last,
        earliest=min(compute.after(flight.sources()), reads.first),
        kept_bytes=flight.bundle.kept_bytes,
        lane=cluster.lane(link),
        pack_us=times.pack_us,
        unpack_us=times.unpack_us,
    )


def _reduction(flight: Flight, compute: Compute, cluster: cost.Cluster) -> Reduction:
    legs = [(launch, *ir.group_of(launch)) for launch in flight.launches]
    links = [cluster.link(group, world) for _, group, world in legs]
    times = [
        link.collective_us(size_bytes(ir.source_of(launch)), world, reduces=True)
        for (launch, _, world), link in zip(legs, links, strict=True)
    ]
    return Reduction(
        parts=tuple(
            (compute.after([source]) - 1, size)
            for source, size in zip(flight.sources(), flight.bundle.sizes, strict=True)
        ),
        us=times[0],
        needed=compute.reads(flight.waits[-1:]).first,
        lane=cluster.lane(links[0]),
        second_us=times[1] if len(times) > 1 else 0.0,
        second_lane=cluster.lane(links[-1]),
        pack_us=cluster.packing_us(sum(flight.bundle.sizes)) if _is_packed(flight) else 0.0,
        host_us=sum(cluster.host_us(size_bytes(node)) for node in filter(ir.is_sent_to_host, flight.nodes)),
    )


def _is_packed(flight: Flight) -> bool:
    return len(flight.bundle.params) > 1 or any(map(ir.copies_in_gradients, flight.nodes))


def actions_of(graph: fx.Graph, compute: Compute, found: Sequence[Flight]) -> list[Action]:
    """Return the launches and waits of ``found`` as they stand in ``graph``."""
    known: dict[fx.Node, tuple[Literal["launch", "wait"], Kind, int]] = {}
    for index, flight in [*_numbered(found, False), *_numbered(found, True)]:
        kinds: tuple[Kind, ...] = ("reduction", "second") if flight.bundle.reduces else ("gather",)
        for kind, launch, wait in zip(kinds, flight.launches, flight.waits, strict=False):
            known |= {launch: ("launch", kind, index), wait: ("wait", kind, index)}
    actions, position = [], 0
    for node in graph.nodes:
        position = compute.position.get(node, position - 1) + 1
        if node in known:
            actions.append(Action(position, *known[node]))
    return actions


def _numbered(found: Sequence[Flight], reduces: bool) -> Iterable[tuple[int, Flight]]:
    return enumerate(flight for flight in found if flight.bundle.reduces == reduces)
