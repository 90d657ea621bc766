"""Replaces operators on several parameters, which are cheap to trace, by those on one, which the other passes know.

It must not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .graph import emit, nodes


@dataclass(frozen=True)
class Expand:
    """One operator for each parameter. Numerics cannot change.

    ::

        w1, w2 = unshard_all([s1, s2])  ->  w1 = unshard(s1); w2 = unshard(s2)
        d1, d2 = reduce_all([g1, g2])   ->  d1 = reduce_grad(g1); d2 = reduce_grad(g2)
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if nodes.is_unshard_all(node) or nodes.is_reduce_all(node):
                emit.expand(node)
