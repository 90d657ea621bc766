"""Checks that nothing else distributes the modules of a new unit. It changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..expect import unexpected
from ..module import FSDPModule
from ..param.composable import applied


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
            if "fully_shard" in applied(module) and not isinstance(module, FSDPModule):
                got, do = "one of torch.distributed.fsdp", "use one of the two for the whole model"
                raise unexpected(where, "units of fsdp_compiled.fully_shard alone", got, do)
