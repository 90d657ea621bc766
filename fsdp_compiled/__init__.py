"""Fully sharded data parallel training that lives inside the compiled graph."""

from typing import Any

from .agreement.ledger import set_rank_agreement
from .api import compile, fully_shard, fully_shard_with_compiled_compute, options, register_fsdp_forward_method
from .collectives import AllGather, Comm, ReduceScatter
from .errors import FSDPError, RankFailureError, RankMismatchError
from .evaluation import unsharded
from .hooks.root import GradientReductionHandle
from .installed import uninstall
from .module import FSDPModule, UnshardHandle, share_comm_ctx
from .optim import step_on_shards
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, SchedulePolicy
from .sharding.mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from .torch_fsdp.switch import as_torch_fsdp, disable, enable
from .weights import stream_parameters, stream_shards


def __getattr__(name: str) -> Any:
    if name != "plan":  # the planner reads graphs, which training need not import
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .planner import plan

    return plan


__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "DataParallelMeshInfo",
    "FSDPError",
    "FSDPMeshInfo",
    "FSDPModule",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RankFailureError",
    "RankMismatchError",
    "ReduceScatter",
    "SchedulePolicy",
    "ShardPlacementResult",
    "UnshardHandle",
    "as_torch_fsdp",
    "compile",
    "disable",
    "enable",
    "fully_shard",
    "fully_shard_with_compiled_compute",
    "options",
    "plan",
    "register_fsdp_forward_method",
    "set_rank_agreement",
    "share_comm_ctx",
    "step_on_shards",
    "stream_parameters",
    "stream_shards",
    "uninstall",
    "unsharded",
]
