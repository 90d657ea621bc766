"""Reads requests out of a graph, as plain records for planning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache
from itertools import count

import torch
from torch import fx

from ...sharding.spec import ParamSpec
from ..cost import Cluster, detect
from ..cost.compute import is_view
from ..kinds import Request
from ..planning.tasks import Requests
from . import nodes
from .anchors import AnchoredCompute


def requests_of(opaque: Sequence[fx.Node], compute: AnchoredCompute, cluster: Cluster) -> Requests:
    """Return what the opaque nodes of a graph ask for; a request's index is its node's."""
    read = _Reader(compute, cluster)
    params = nodes.params_of(opaque)
    each = [read.request(index, node, param) for index, (node, param) in enumerate(zip(opaque, params, strict=True))]
    # What is started ahead comes first. Within a position by name: there the order of nodes may differ by rank.
    order = sorted(each, key=lambda r: (not r.kind.is_ahead, r.kind.noun, _place(r), r.param.name))
    return Requests(compute.time(cluster), tuple(order), cluster)


def _place(request: Request) -> int:
    return request.needed if request.kind.is_ahead else request.ready


class _Reader:
    """Makes requests of nodes."""

    def __init__(self, compute: AnchoredCompute, cluster: Cluster) -> None:
        self._compute = compute
        self._lane = cache(cluster.lane)
        self._key = defaultdict[Hashable, int](count().__next__)  # a number for each, which is faster to compare

    def request(self, index: int, node: fx.Node, param: ParamSpec) -> Request:
        kind, alone, source = nodes.opaque_kind(node), nodes.asked_of(node), nodes.source_of(node)
        assert kind is not None
        (size,), (first, last), ready = alone.sizes, self._compute.reads(node), self._compute.after(source)
        return Request(
            index,
            kind,
            param,
            alone.spec,
            size,
            ready=min(ready, first) if kind.is_ahead else ready,
            needed=first,
            last=last,
            lanes=tuple(self._lane(alone.group_of(stage)) for stage in alone.stages),
            made=None if kind.is_ahead else ready - 1,
            kept_bytes=size if kind.is_ahead and _is_returned(node) else 0,
            device=computes_on(node),
            inputs_persist=nodes.is_parameter(source),
            key=self._key[kind.opaque, alone.spec.key(param)],
        )


def computes_on(opaque: fx.Node) -> torch.device:
    """Return the device where compute uses what an opaque node makes, or makes what it takes."""
    kind = nodes.opaque_kind(opaque)
    return nodes.value_of(opaque if kind is not None and kind.is_ahead else nodes.source_of(opaque)).device


def _is_returned(node: fx.Node) -> bool:
    """Tell whether the graph returns ``node`` or a view of it, as forward does with what it keeps for backward."""
    return any(user.op == "output" or (is_view(user) and _is_returned(user)) for user in node.users)


def cluster_of(graph: fx.Graph, given: Cluster | None) -> Cluster:
    """Return ``given``, or the cluster that the graph computes on, though shards may live on the CPU."""
    if given is not None:
        return given
    devices = (value.device for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor))
    return detect(next((device for device in devices if device.type != "cpu"), torch.device("cpu")))
