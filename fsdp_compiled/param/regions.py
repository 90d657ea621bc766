"""A block as a region of a graph: compiled once, and stamped wherever an equal block is called.

It knows one block and the parameters that are read in it; it must not know which blocks are equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.comptime import comptime
from torch._dynamo.eval_frame import set_eval_frame, skip_code  # type: ignore[attr-defined]
from torch._dynamo.exc import TorchDynamoException
from torch.compiler import nested_compile_region

from .. import collectives
from .param import FSDPParam
from .properties import rebase
from .unit import Unit

T = TypeVar("T")


class RegionModule:
    """Mixin of a module whose forward is a region of the graph that Dynamo traces.

    The all-gathers stay in the graph around it, where buckets and their order are decided: the region takes the
    unsharded parameters as arguments. Hooks of the module stay outside, too.
    """

    _fsdp_region: tuple[FSDPParam, ...]  # all parameters that are read below the module
    _fsdp_region_unit: Unit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() or self._fsdp_region_unit.hooked:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        comptime(_note)
        return _region(self, *_unsharded_together(self._fsdp_region), *args, **kwargs)

    def _fsdp_body(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def make_region(module: nn.Module, unit: Unit) -> None:
    """Let ``module``, which belongs to ``unit``, be a region of graphs that are traced from now on."""
    read = (param for below in module.modules() for param in below.__dict__.get("_fsdp_params", {}).values())
    module.__dict__.update(_fsdp_region=tuple(dict.fromkeys(read)), _fsdp_region_unit=unit)
    rebase(module, add=(RegionModule,))


def drop_region(module: nn.Module) -> None:
    """Let ``module`` be traced as a part of the graph around it again."""
    for name in ("_fsdp_region", "_fsdp_region_unit"):
        module.__dict__.pop(name, None)
    rebase(module, drop=RegionModule)


def has_regions(model: nn.Module) -> bool:
    """Tell whether graphs of ``model`` call regions."""
    return any(isinstance(module, RegionModule) for module in model.modules())


def _unsharded_together(params: Sequence[FSDPParam]) -> list[Tensor]:
    """Return the unsharded parameters; one operator all-gathers them, since tracing it costs time in every block."""
    plain = [param for param in params if param.extension is None]
    together = iter(collectives.unshard_all([(*param.leaves(), param.spec_text) for param in plain]) if plain else ())
    return [next(together) if param.extension is None else param.traced_local() for param in params]


@nested_compile_region
def _region(module: Any, *operands: Any, **kwargs: Any) -> Any:
    """Run the module's own forward on the unsharded parameters, which come before its arguments."""
    params = module._fsdp_region
    for param, unsharded in zip(params, operands, strict=False):
        param.given = unsharded
    output = module._fsdp_body(*operands[len(params) :], **kwargs)
    for param in params:
        param.given = None
    return output


_entered: list[type] = []  # the class of the region that Dynamo traced last, if any


def _note(context: Any) -> None:
    """Remember which region Dynamo is about to trace; ``torch._dynamo.comptime`` calls it then."""
    _entered[:] = [context.get_local("self").python_type()]


def without_failing_regions(model: nn.Module, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run; where torch cannot compile a region, compile its block as a part of the graph, and warn.

    An error that has nothing to do with regions leaves them as they are.
    """
    dropped: list[tuple[nn.Module, Unit]] = []
    why: TorchDynamoException | None = None
    dynamo = get_eval_frame_callback()
    while True:
        _entered.clear()
        try:
            result = run(*args, **kwargs)
        except TorchDynamoException as error:
            failing = _failing(model)
            if not failing:
                for module, unit in dropped:
                    make_region(module, unit)
                raise
            why = why or error
            dropped += [(module, module._fsdp_region_unit) for module in failing]
            for module in failing:
                drop_region(module)
            set_eval_frame(dynamo)  # which an error turns off
        else:
            if why is not None:
                _warn([module for module, _ in dropped], why)
            return result


skip_code(without_failing_regions.__code__)  # or Dynamo would trace it and what it calls as one


def _failing(model: nn.Module) -> list[Any]:
    """Return the regions of the class that Dynamo traced last, or all if it had traced all of them."""
    regions = [module for module in model.modules() if isinstance(module, RegionModule)]
    return [module for module in regions if type(module) in _entered] or regions


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _warn(modules: Sequence[nn.Module], why: TorchDynamoException) -> None:
    classes = sorted({type(module)._fsdp_user_class.__name__ for module in modules})  # type: ignore[attr-defined]
    reason = next((line.strip() for line in str(why).splitlines() if line.strip()), type(why).__name__)
    warnings.warn(
        f"regions: {len(modules)} blocks ({', '.join(classes)}) are compiled as a part of the graph, because torch "
        f"cannot compile them as regions: {reason}",
        stacklevel=4,
    )
