"""Which units of a model become regions of its graph: blocks that are compiled once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import nn

from ..expect import shown, unexpected
from ..tracing.dynamo import saves_packages
from ..tracing.sharded_module import UnitOfModule, user_class
from .block import REUSES_TRACES, RegionModule, drop_region, make_region

# "auto" takes blocks that occur at least so often: a region costs about as much to compile as two flat blocks.
AUTO_COUNT = 4


@torch.compiler.disable  # type: ignore[untyped-decorator]
def set_default_regions(model: nn.Module) -> None:
    """Make the regions of "auto" if nobody has chosen regions of an outermost unit.

    Not before torch 2.13, which traces every block, refuses more of them, and has met fewer drawn ones.
    """
    if "_fsdp_regions" not in model.__dict__:
        set_regions(model, "auto" if REUSES_TRACES else "off")


def set_regions(model: nn.Module, regions: str | Sequence[nn.Module]) -> None:
    """Make the units of ``model`` that ``regions`` names its only regions; see ``fsdp_compiled.compile``."""
    if saves_packages():  # torch could not find the code of the outermost unit's call again
        do = "compile without it: Inductor's caches take these graphs"
        raise unexpected("torch._dynamo.config.caching_precompile", "False", "True", do, NotImplementedError)
    chosen = _chosen(model, regions)
    for module in model.modules():
        if isinstance(module, RegionModule) and module not in chosen:
            drop_region(module)
    for module in chosen:
        make_region(module, _state_of(module).unit, by_default=isinstance(regions, str))
    for module in model.modules():
        if "_fsdp_state" in module.__dict__ and _state_of(module).is_root:
            module.__dict__["_fsdp_regions"] = True  # somebody has chosen


def _chosen(model: nn.Module, regions: str | Sequence[nn.Module]) -> list[nn.Module]:
    if isinstance(regions, str) and regions in ("off", "auto"):
        return _equal_units(model) if regions == "auto" else []
    if isinstance(regions, str) or not isinstance(regions, (list, tuple, nn.ModuleList)):
        raise unexpected("regions", "'auto', 'off' or a list of modules", shown(regions), error=TypeError)
    units, chosen = dict(_units(model)), list(dict.fromkeys(regions))
    for module in chosen:
        if module not in units:
            expected = "modules of the model that were given to fully_shard below the outermost one"
            do = "call fully_shard on it first, before the modules around it"
            raise unexpected("regions", expected, type(module).__name__, do)
        if not _is_possible(module):
            raise ValueError(
                f"regions: {units[module]} has a forward of its own, {module.forward!r}; a region needs its class's"
            )
        inner = next((below for below in module.modules() if below is not module and below in set(chosen)), None)
        if inner is not None:
            raise ValueError(f"regions: {units[inner]} lies inside {units[module]}; give one of the two")
    return chosen


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules of units below the outermost one, and their names; outer ones first."""
    for name, module in model.named_modules():
        if module is not model and "_fsdp_state" in module.__dict__ and not _state_of(module).is_root:
            yield module, name


def _state_of(module: nn.Module) -> UnitOfModule:
    return module.__dict__["_fsdp_state"]  # type: ignore[no-any-return]


def _equal_units(model: nn.Module) -> list[nn.Module]:
    """Return the units that occur often enough with equal class and parameters, but for those inside of others."""
    units = [module for module, _ in _units(model) if _is_possible(module)]
    counts = Counter(map(_kind, units))
    frequent = [module for module in units if counts[_kind(module)] >= AUTO_COUNT]
    inside = {below for module in frequent for below in module.modules() if below is not module}
    return [module for module in frequent if module not in inside]


def _kind(module: nn.Module) -> Hashable:
    shapes = tuple((name, param.shape, param.dtype) for name, param in module.named_parameters())
    return user_class(module), shapes


def _is_possible(module: nn.Module) -> bool:
    """Tell whether the module runs its class's forward, rather than one assigned to the instance."""
    return "forward" not in module.__dict__
