"""A block as a region of a graph: compiled once, and stamped wherever an equal block is called.

It knows one block and the parameters that are read in it; it must not know which blocks are equal.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.comptime import comptime
from torch._dynamo.eval_frame import set_eval_frame, skip_code  # type: ignore[attr-defined]
from torch._dynamo.exc import TorchDynamoException
from torch._guards import TracingContext
from torch.compiler import assume_constant_result, nested_compile_region

from .. import collectives
from ..param.param import FSDPParam
from ..param.unit import Unit
from ..tracing import reads, substituted
from ..tracing.sharded_module import rebase
from .guards import describe, guard_as
from .schemas import derive_once

T = TypeVar("T")


class RegionModule:
    """Mixin of a module whose forward is a region of the graph that Dynamo traces.

    The all-gathers stay in the graph around it, where buckets and their order are decided: the region takes the
    unsharded parameters as arguments. Hooks of the module stay outside, too.
    """

    _fsdp_region: tuple[FSDPParam, ...]  # all parameters that are read below the module
    _fsdp_region_names: str  # which of them is read under which names
    _fsdp_region_reused: bool  # a trace of an equal block may stand for this one's
    _fsdp_region_unit: Unit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() or self._fsdp_region_unit.hooked or not _is_as_the_first(type(self)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        comptime(_enter)
        params, unsharded = self._fsdp_region, _unsharded_together(self._fsdp_region)
        call = _described_call() if self._fsdp_region_reused else None
        if call is None:
            return _region_of_its_own(self, *unsharded, *args, **kwargs)
        around, reads.region.unsharded = reads.region.unsharded, dict(zip(params, unsharded, strict=True))
        output = _region(self, self._fsdp_region_names + call, *unsharded, *args, **kwargs)
        reads.region.unsharded = around
        comptime(_guard)
        return output

    def _fsdp_body(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def make_region(module: nn.Module, unit: Unit) -> None:
    """Let ``module``, which belongs to ``unit``, be a region of graphs that are traced from now on."""
    read: dict[FSDPParam, list[str]] = {}
    for path, below in module.named_modules(remove_duplicate=False):
        for name, param in below.__dict__.get("_fsdp_params", {}).items():
            read.setdefault(param, []).append(f"{path}.{name}")
    module.__dict__.update(
        _fsdp_region=tuple(read),
        _fsdp_region_names="; ".join(map(" = ".join, read.values())),
        _fsdp_region_reused=bool(_LIMIT),
        _fsdp_region_unit=unit,
    )
    rebase(module, add=(RegionModule,))
    derive_once()


def drop_region(module: nn.Module) -> None:
    """Let ``module`` be traced as a part of the graph around it again."""
    for name in ("_fsdp_region", "_fsdp_region_names", "_fsdp_region_reused", "_fsdp_region_unit"):
        module.__dict__.pop(name, None)
    rebase(module, drop=RegionModule)


def has_regions(model: nn.Module) -> bool:
    """Tell whether graphs of ``model`` call regions."""
    return any(isinstance(module, RegionModule) for module in model.modules())


def _unsharded_together(params: Sequence[FSDPParam]) -> list[Tensor]:
    """Return the unsharded parameters; one operator all-gathers them, since tracing it costs time in every block."""
    plain = [param for param in params if param.extension is None]
    together = iter(collectives.unshard_all([reads.unshard_arguments(param) for param in plain]) if plain else ())
    return [next(together) if param.extension is None else reads.unsharded_local(param) for param in params]


def _body(module: Any, names: str, *operands: Any, **kwargs: Any) -> Any:
    """Run the module's own forward; what it reads of ``operands``, it finds in ``reads.region``.

    They are operands all the same: torch reuses a trace only if all that it reads are, or have a source. It compares
    ``names``, too: under which names each operand is read, and what the call is like.
    """
    return module._fsdp_body(*operands[len(module._fsdp_region) :], **kwargs)


def _body_of_its_own(module: Any, *operands: Any, **kwargs: Any) -> Any:
    """As ``_body``, but it sets ``reads.region`` itself: a trace with side effects is not reused."""
    params = module._fsdp_region
    unsharded = dict(zip(params, operands[: len(params)], strict=True))
    around, reads.region.unsharded = reads.region.unsharded, unsharded
    output = _body(module, module._fsdp_region_names, *operands, **kwargs)
    reads.region.unsharded = around
    return output


# Blocks that differ in what they read need a trace each; each block is compared with all of them, so not with many.
# torch 2.11 traces every block. Within a checkpoint, which allows no side effects, every block is traced, too.
_LIMIT: dict[str, Any] = (
    {"max_reuse_entries": 16} if "max_reuse_entries" in signature(nested_compile_region).parameters else {}
)
_region = nested_compile_region(_body, **_LIMIT)
_region_of_its_own = nested_compile_region(_body_of_its_own)
_guard = guard_as(_body.__code__)


_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_surroundings: WeakKeyDictionary[TracingContext, str] = WeakKeyDictionary()  # of the first region of a trace


@assume_constant_result  # type: ignore[untyped-decorator]
def _is_as_the_first(cls: type) -> bool:
    """Tell whether a block is called under the same modes as the trace's first region; warn if not.

    Torch lets regions of equal code share one graph, whatever modes they are called under.
    """
    devices = {"cpu", torch._C._get_accelerator().type}
    modes: dict[str, Any] = {f"autocast on {each}": torch.is_autocast_enabled(each) for each in sorted(devices)}
    modes |= {f"autocast dtype on {each}": torch.get_autocast_dtype(each) for each in sorted(devices)}
    modes |= {f"{each} attention": getattr(torch.backends.cuda, f"{each}_sdp_enabled")() for each in _ATTENTION}
    here = f"gradients {torch.is_grad_enabled()}, {modes}, {torch.get_default_dtype()}"
    first = _surroundings.setdefault(TracingContext.get(), here)
    if first != here:
        warnings.warn(
            f"regions: a block ({cls._fsdp_user_class.__name__}) is compiled as a part of the graph, because it is "  # type: ignore[attr-defined]
            f"called under other modes than the first region: {here}, not {first}",
            stacklevel=2,
        )
    return first == here


_REFUSES_REUSE = re.compile("subgraph_reuse|maximum reuse entries|Unsafe side effect")
_entered: list[type] = []  # the class of the region that Dynamo traced last, if any
_calls: list[str | None] = []  # how it was called, see describe()


def _enter(context: Any) -> None:
    """Remember which region Dynamo is about to trace; ``torch._dynamo.comptime`` calls it then."""
    _entered[:] = [context.get_local("self").python_type()]
    _calls[:] = [describe(context) if _LIMIT else None]
    substituted.check_below(context)


@assume_constant_result  # type: ignore[untyped-decorator]
def _described_call() -> str | None:
    return _calls[0]


def without_failing_regions(model: nn.Module, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run; where torch cannot compile a region, compile its block as a part of the graph, and warn.

    An error that has nothing to do with regions leaves them as they are.
    """
    dropped: list[tuple[nn.Module, Unit]] = []
    why: Exception | None = None
    dynamo = get_eval_frame_callback()
    while True:
        _entered.clear()
        try:
            result = run(*args, **kwargs)
        except (TorchDynamoException, AssertionError) as error:  # torch 2.11's Dynamo lets assertions of its own out
            if isinstance(error, AssertionError) and not _entered:
                raise  # nothing was compiled
            failing = _failing(model)
            if not failing:
                for module, unit in dropped:
                    make_region(module, unit)
                raise
            if _REFUSES_REUSE.search(str(error)) and any(module._fsdp_region_reused for module in failing):
                for module in failing:
                    module.__dict__["_fsdp_region_reused"] = False
                set_eval_frame(dynamo)
                continue
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
def _warn(modules: Sequence[nn.Module], why: Exception) -> None:
    classes = sorted({type(module)._fsdp_user_class.__name__ for module in modules})  # type: ignore[attr-defined]
    first = re.split(r"(?<![:\n])\n", str(why).strip())[0]  # the first line, and what a colon at its end announces
    reason = " ".join(first.split()) or type(why).__name__
    configs = (getattr(below, "config", None) for module in modules for below in module.modules())
    if any(getattr(config, "use_cache", False) for config in configs):  # Hugging Face's
        reason += "; in training set config.use_cache = False, so that they keep no tensors in a cache"
    warnings.warn(
        f"regions: {len(modules)} blocks ({', '.join(classes)}) are compiled as a part of the graph, because torch "
        f"cannot compile them as regions: {reason}",
        stacklevel=4,
    )
