"""Checks that nothing else distributes the modules of a new unit. It changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..module import FSDPModule
from ..param.composable import applied


def check_composable(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if something else distributes ``modules``, or what lies below them and does not mix."""
    for root in modules:
        if "replicate" in applied(root):
            raise ValueError(
                f"{type(root).__name__}: expected a module that nothing distributes yet, got one that replicate was "
                "applied to; use a 2-D mesh, or DataParallelMeshDims(replicate=...), to replicate"
            )
        for name, module in root.named_modules():
            where = f"{name or type(root).__name__}: expected"
            if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
                raise ValueError(
                    f"{where} a module that nothing distributes yet, got a {type(module).__name__}; shard its "
                    ".module, with a 2-D mesh to replicate too"
                )
            if "fully_shard" in applied(module) and not isinstance(module, FSDPModule):
                raise ValueError(
                    f"{where} units of fsdp_compiled.fully_shard alone, got one of torch.distributed.fsdp; "
                    "use one of the two for the whole model"
                )
