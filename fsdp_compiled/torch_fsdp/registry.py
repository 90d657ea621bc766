"""PyTorch's records: on each module of what was applied to it, and those that ``fully_shard`` takes.

Ours are noted on modules, so that ``torch.distributed._composable.replicate`` skips them, PyTorch's ``fully_shard``
refuses them and ``torch.distributed.fsdp.fully_shard.state(module)`` returns our state; and what others noted there
is refused. It must not know what a unit does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch import nn

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common

from ..expect import unexpected
from ..param.unit import Unit
from ..policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ..sharding.mesh import DataParallelMeshDims, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

_FULLY_SHARD = torch_fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]  # what states are noted under
_OURS, _ONE_OF_TWO = "units of fsdp_compiled.fully_shard alone", "use one of the two for the whole model"
_POLICIES = (MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy)  # subclasses before the classes that they extend
_MESHES = (DataParallelMeshDims, ShardPlacementResult, HSDPMeshInfo, FSDPMeshInfo, DDPMeshInfo)


def applied(module: nn.Module) -> dict[str, RegistryItem]:
    """Return what was applied to ``module``, by the name of the function."""
    return dict(module.__dict__.get(REGISTRY_KEY, {}))


def check_composable(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if something else distributes ``modules``, or what lies below them and does not mix."""
    undistributed = "a module that nothing distributes yet"
    for root in modules:
        if "replicate" in applied(root):
            do = "use a 2-D mesh, or DataParallelMeshDims(replicate=...), to replicate"
            raise unexpected(type(root).__name__, undistributed, "one that replicate was applied to", do)
        for name, module in root.named_modules():
            where = name or type(root).__name__
            if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
                do = "shard its .module, with a 2-D mesh to replicate too"
                raise unexpected(where, undistributed, f"a {type(module).__name__}", do)
            if "fully_shard" in applied(module) and "_fsdp_state" not in module.__dict__:
                raise unexpected(where, _OURS, "one of torch.distributed.fsdp", _ONE_OF_TWO)


def note_unit(module: nn.Module, unit: Unit, state: object = None) -> None:
    """Let PyTorch's ``fully_shard`` refuse a module with parameters of ``unit``.

    If it was given to ours, its composable functions see that from ``state`` too.
    """
    registry = module.__dict__.setdefault(REGISTRY_KEY, _Registry(unit))
    if state is not None:
        registry["fully_shard"] = RegistryItem()
        module.__dict__.setdefault(STATE_KEY, {})[_FULLY_SHARD] = state


class _Registry(dict[str, RegistryItem]):
    """What was applied to a module with parameters of a unit."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __contains__(self, name: object) -> bool:
        # FSDP1 and checkpoints ask for the same. There is no other place to refuse from without changing PyTorch.
        if sys._getframe(1).f_code is torch_common._is_composable_with_fsdp.__code__:
            got = "torch.distributed.fsdp.fully_shard around or inside this one"
            raise unexpected(self._unit.config.name, _OURS, got, _ONE_OF_TWO)
        return super().__contains__(name)


def own_record(value: Any) -> Any:
    """Return our record with the fields of one of PyTorch's, and anything else as it is.

    Raises:
        NotImplementedError: a newer PyTorch's policy asks for what ours cannot do.
    """
    for ours in (*_POLICIES, *_MESHES):
        # torch 2.11 has neither DataParallelMeshDims nor ShardPlacementResult.
        theirs = getattr(torch_fsdp, ours.__name__, None) or getattr(torch_common, ours.__name__, None)
        if theirs is not None and isinstance(value, theirs):
            names = [field.name for field in fields(ours) if hasattr(value, field.name)]
            for field in fields(theirs) if ours in _POLICIES else ():
                if field.name not in names and (got := getattr(value, field.name)) != field.default:
                    where = f"{ours.__name__}.{field.name}"
                    raise NotImplementedError(f"{where}: fsdp_compiled does not have this option; got {got!r}")
            return ours(**{name: own_record(getattr(value, name)) for name in names})
    return value
