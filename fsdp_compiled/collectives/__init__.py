"""The one collective stack: graph operators, launch and wait, copy-in and copy-out."""

from .comm import AllGather, Comm, Hook, ReduceScatter, register
from .launch import launch_gather, launch_reduction, launch_replica_reduction
from .ops import reduce_grad, unshard, with_gradient
from .reference import padded_shard, take_shard
from .streams import Pending

__all__ = [
    "AllGather",
    "Comm",
    "Hook",
    "Pending",
    "ReduceScatter",
    "launch_gather",
    "launch_reduction",
    "launch_replica_reduction",
    "padded_shard",
    "reduce_grad",
    "register",
    "take_shard",
    "unshard",
    "with_gradient",
]
