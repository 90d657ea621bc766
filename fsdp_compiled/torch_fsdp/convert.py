"""PyTorch's own policies, mesh dimensions and placements in the place of ours.

Libraries that drive ``fully_shard`` make those of ``torch.distributed.fsdp``. It changes nothing.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch.distributed.fsdp as torch_fsdp

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common

from ..policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ..sharding.mesh import DataParallelMeshDims, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

# Subclasses before the classes that they extend.
_POLICIES = (MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy)
_MESHES = (DataParallelMeshDims, ShardPlacementResult, HSDPMeshInfo, FSDPMeshInfo, DDPMeshInfo)


def own_record(value: Any) -> Any:
    """Return our record with the fields of one of PyTorch's, and anything else as it is."""
    for ours in (*_POLICIES, *_MESHES):
        # torch 2.11 has neither DataParallelMeshDims nor ShardPlacementResult.
        theirs = getattr(torch_fsdp, ours.__name__, None) or getattr(torch_common, ours.__name__, None)
        if theirs is not None and isinstance(value, theirs):
            names = [field.name for field in fields(ours) if hasattr(value, field.name)]
            return ours(**{name: own_record(getattr(value, name)) for name in names})
    return value
