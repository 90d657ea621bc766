"""Fully sharded data parallel training that lives inside the compiled graph."""

from .api import (
    fully_shard,
    fully_shard_with_compiled_compute,
    register_fsdp_forward_method,
)
from .compiling import compile, options
from .errors import FSDPError
from .module import FSDPModule, UnshardHandle
from .optim import step_on_shards
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, SchedulePolicy

__all__ = [
    "CPUOffloadPolicy",
    "FSDPError",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "SchedulePolicy",
    "UnshardHandle",
    "compile",
    "fully_shard",
    "fully_shard_with_compiled_compute",
    "options",
    "register_fsdp_forward_method",
    "step_on_shards",
]
