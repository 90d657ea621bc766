"""The one collective stack: graph operators, launch and wait, copy-in and copy-out."""

from .launch import Group, PendingGather, PendingReduction, launch_gather, launch_reduction
from .ops import reduce_grad, unshard

__all__ = [
    "Group",
    "PendingGather",
    "PendingReduction",
    "launch_gather",
    "launch_reduction",
    "reduce_grad",
    "unshard",
]
