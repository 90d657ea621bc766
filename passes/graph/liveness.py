"""Where compute stands in a graph, and where tensors are first and last read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ..cost import Cluster, detect
from ..cost.compute import is_view, node_us
from .nodes import region_of


class Compute:
    """The nodes of a graph that are not ``is_ours``, of a collective, in order, each with a position: its index."""

    def __init__(self, graph: fx.Graph, is_ours: Callable[[fx.Node], bool]) -> None:
        self.nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and not is_ours(n)]
        self.position = {node: index for index, node in enumerate(self.nodes)}

    @property
    def end(self) -> int:
        """The position after the last node."""
        return len(self.nodes)

    def time(self, cluster: Cluster) -> tuple[float, ...]:
        """Return the estimated time at each position in microseconds, for the sizes that were traced."""
        return tuple(map(_Clock(cluster).us, self.nodes))

    def after(self, source: fx.Node) -> int:
        """Return the first position at which ``source`` exists."""
        return self.position.get(source, -1) + 1

    def reads(self, tensor: fx.Node | None) -> tuple[int, int]:
        """Return the positions of the first and the last node that read ``tensor``, or a view of it.

        Nodes that have no position are looked through. Both are the end of the graph if nothing reads it.
        """
        first, last = self.end, -1
        stack, seen = [(tensor, True)] if tensor is not None else [], set[fx.Node]()
        while stack:
            source, is_direct = stack.pop()
            for user in source.users:
                place = self.position.get(user)
                if place is not None:
                    first, last = min(first, place) if is_direct else first, max(last, place)
                if user not in seen and (place is None or is_view(user)):
                    seen.add(user)
                    stack.append((user, is_direct and place is None))
        return first, max(first, last)


class _Clock:
    """Estimates nodes, and each region once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._regions: dict[fx.Graph, float] = {}

    def us(self, node: fx.Node) -> float:
        region = region_of(node)
        if region is None:
            return node_us(node, self._cluster)
        if region not in self._regions:
            self._regions[region] = sum(map(self.us, region.nodes))
        return self._regions[region]


def is_returned(node: fx.Node) -> bool:
    """Tell whether the graph returns ``node`` or a view of it, as forward does with what it keeps for backward."""
    return any(user.op == "output" or (is_view(user) and is_returned(user)) for user in node.users)


def cluster_of(graph: fx.Graph, given: Cluster | None) -> Cluster:
    """Return ``given``, or the cluster that the graph computes on, though shards may live on the CPU."""
    if given is not None:
        return given
    devices = (value.device for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor))
    return detect(next((device for device in devices if device.type != "cpu"), torch.device("cpu")))
