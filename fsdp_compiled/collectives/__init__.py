"""The one collective stack, which hooks and graph operators call: recipes, copies, streams, communicators."""

from .all_gather import all_gather_bucket, launch_all_gather
from .bucket_operators import define_kind
from .communicators import AllGather, Comm, Hook, ReduceScatter, register
from .operators import reduce_grad, unshard, unshard_all, with_gradient
from .reduction import launch_reduction, launch_replica_reduction
from .reference import padded_shard, take_shard
from .streams import Pending

__all__ = [
    "AllGather",
    "Comm",
    "Hook",
    "Pending",
    "ReduceScatter",
    "all_gather_bucket",
    "define_kind",
    "launch_all_gather",
    "launch_reduction",
    "launch_replica_reduction",
    "padded_shard",
    "reduce_grad",
    "register",
    "take_shard",
    "unshard",
    "unshard_all",
    "with_gradient",
]
