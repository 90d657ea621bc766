"""Decides, in the joint graph, which unsharded parameters live from forward to backward.

It reads only the ``reshard`` argument that the core wrote into each node; it must not know units or memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from . import ir


@dataclass(frozen=True)
class Reshard:
    """Tags every unshard for AOTAutograd's partitioner. Numerics cannot change.

    ::

        unshard(reshard=True)    ->  MUST_RECOMPUTE: only the shard is saved, backward gathers again
        unshard(reshard=False)   ->  MUST_SAVE: the unsharded parameter is saved, backward gathers nothing

    An untagged custom operator would be saved, so without this pass every parameter would stay unsharded.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if not ir.is_unshard(node):
                continue
            keep = not ir.route_of(node).reshard
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
            # A parameter that two checkpointed regions read would otherwise be turned into MUST_SAVE.
            node.meta.pop("ac_graph_id", None)
