"""A block as a region of a graph: compiled once, and stamped wherever an equal block is called.

It knows one block and the parameters that are read in it; it must not know which blocks are equal.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result, nested_compile_region

from .. import collectives
from ..param.param import FSDPParam
from ..param.unit import Unit
from ..tracing import operands as region_operands
from ..tracing import reads, substituted
from ..tracing.dynamo import (
    TorchDynamoException,
    callback_in_force,
    comptime,
    describe_arguments,
    known_internals,
    local_value,
    of_trace,
    skipped,
    turn_on_again,
)
from ..tracing.sharded_module import MixinOrder, rebase
from .guards import guard_as, refused_reuse

T = TypeVar("T")


@dataclass(frozen=True)
class Region:
    """What is known of a block that is a region."""

    unit: Unit
    params: tuple[FSDPParam, ...]  # all that are read below the module
    names: str  # which of them is read under which names
    is_reused: bool  # a trace of an equal block may stand for this one's


class RegionModule:
    """Mixin of a module whose forward is a region of the graph that Dynamo traces.

    The all-gathers stay in the graph around it, where buckets and their order are decided: the region takes the
    unsharded parameters as arguments. Hooks of the module stay outside, too.
    """

    _fsdp_order = MixinOrder.REGION
    _fsdp_region: Region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() or self._fsdp_region.unit.hooked or not _is_as_the_first(type(self)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        comptime(_enter)
        region = self._fsdp_region
        unsharded = _unsharded_together(region.params)
        call = _described_call() if region.is_reused else None
        if call is None:
            return _region(self, region, *unsharded, *args, **kwargs)
        output = _region(self, region.names + call, *unsharded, *args, **kwargs)
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
    names = "; ".join(map(" = ".join, read.values()))
    module.__dict__["_fsdp_region"] = Region(unit, tuple(read), names, is_reused=bool(_LIMIT))
    rebase(module, add=(RegionModule,))


def drop_region(module: nn.Module) -> None:
    """Let ``module`` be traced as a part of the graph around it again."""
    module.__dict__.pop("_fsdp_region", None)
    rebase(module, drop=RegionModule)


def has_regions(model: nn.Module) -> bool:
    """Tell whether graphs of ``model`` call regions."""
    return any(isinstance(module, RegionModule) for module in model.modules())


def _unsharded_together(params: Sequence[FSDPParam]) -> list[Tensor]:
    """Return the unsharded parameters; one operator all-gathers them, since tracing it costs time in every block."""
    plain = [param for param in params if param.extension is None]
    together = iter(collectives.unshard_all([reads.unshard_arguments(param) for param in plain]) if plain else ())
    return [next(together) if param.extension is None else reads.unsharded_local(param) for param in params]


def _body(module: Any, which: str | Region, *operands: Any, **kwargs: Any) -> Any:
    """Run the module's own forward, whose reads of parameters give the first ``operands``.

    Torch reuses a trace of an equal ``which``: under which names each operand is read, and what the call is like. It
    cannot compare a Region, so the trace of a block that is called with one is not reused.
    """
    comptime(_enter_body)
    return module._fsdp_body(*operands[len(module._fsdp_region.params) :], **kwargs)


def _enter_body(context: Any) -> None:
    region_operands.enter(context, local_value(context, "module")._fsdp_region.params)


# Blocks that differ in what they read need a trace each; each block is compared with all of them, so not with many.
# torch 2.11 traces every block. Within a checkpoint, which allows no side effects, every block is traced, too.
_LIMIT: dict[str, Any] = (
    {"max_reuse_entries": 16} if "max_reuse_entries" in signature(nested_compile_region).parameters else {}
)
_region = nested_compile_region(_body, **_LIMIT)
_guard = guard_as(_body.__code__)


_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


@dataclass
class _Trace:
    """What is known of regions in the trace under way."""

    modes: str = ""  # that the first region is called under
    call: str | None = None  # how the last one is called, see describe_arguments()


@dataclass
class _Attempt:
    """One attempt to run a call of the outermost unit."""

    entered: type | None = None  # the class of the region that Dynamo traced last, if any


_attempt: ContextVar[_Attempt | None] = ContextVar("the attempt under way in this thread", default=None)


@assume_constant_result  # type: ignore[untyped-decorator]
def _is_as_the_first(cls: type) -> bool:
    """Tell whether a block is called under the same modes as the trace's first region; warn if not.

    Torch lets regions of equal code share one graph, whatever modes they are called under.
    """
    accelerator = torch.accelerator.current_accelerator()
    devices = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    modes: dict[str, Any] = {f"autocast on {each}": torch.is_autocast_enabled(each) for each in sorted(devices)}
    modes |= {f"autocast dtype on {each}": torch.get_autocast_dtype(each) for each in sorted(devices)}
    modes |= {f"{each} attention": getattr(torch.backends.cuda, f"{each}_sdp_enabled")() for each in _ATTENTION}
    here = f"gradients {torch.is_grad_enabled()}, {modes}, {torch.get_default_dtype()}"
    trace = of_trace(_Trace)
    if trace is None:  # nothing is traced
        return True
    first = trace.modes = trace.modes or here
    if first != here:
        warnings.warn(
            f"regions: a block ({cls._fsdp_user_class.__name__}) is compiled as a part of the graph, because it is "  # type: ignore[attr-defined]
            f"called under other modes than the first region: {here}, not {first}",
            stacklevel=2,
        )
    return first == here


def _enter(context: Any) -> None:
    """Note which region Dynamo is about to trace, and how it is called."""
    trace, attempt = of_trace(_Trace), _attempt.get()
    if attempt is not None:
        attempt.entered = context.get_local("self").python_type()
    if trace is not None and _LIMIT:
        with known_internals("compare the arguments of equal blocks"):
            trace.call = describe_arguments(context)
    substituted.check_below(context)


@assume_constant_result  # type: ignore[untyped-decorator]
def _described_call() -> str | None:
    trace = of_trace(_Trace)
    return None if trace is None else trace.call


# Of torch's own errors: a guard that it cannot compare, more traces than the limit, a side effect in a checkpoint.
_REFUSES_REUSE = re.compile("subgraph_reuse|maximum reuse entries|Unsafe side effect")


@skipped  # or Dynamo would trace it and what it calls as one
def without_failing_regions(model: nn.Module, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run; where torch cannot compile a region, compile its block as a part of the graph, and warn.

    An error that has nothing to do with regions leaves them as they are.
    """
    dropped: list[tuple[nn.Module, Unit]] = []
    why: Exception | None = None
    dynamo = callback_in_force()
    while True:
        attempt = _Attempt()
        outer = _attempt.set(attempt)
        try:
            result = run(*args, **kwargs)
        except (TorchDynamoException, AssertionError) as error:  # torch 2.11's Dynamo lets assertions of its own out
            if isinstance(error, AssertionError) and attempt.entered is None:
                raise  # nothing was compiled
            failing = _failing(model, attempt)
            if not failing:
                for module, unit in dropped:
                    make_region(module, unit)
                raise
            if _trace_each(failing, error):
                turn_on_again(dynamo)
                continue
            why = why or error
            dropped += [(module, module._fsdp_region.unit) for module in failing]
            for module in failing:
                drop_region(module)
            turn_on_again(dynamo)
        else:
            if why is not None:
                _warn([module for module, _ in dropped], why)
            return result
        finally:
            _attempt.reset(outer)


def _trace_each(failing: list[Any], error: Exception) -> bool:
    """Let each of the blocks be traced by itself if what failed was to reuse a trace; tell whether it was."""
    was_refused = refused_reuse(error) or _REFUSES_REUSE.search(str(error)) is not None
    if not was_refused or not any(module._fsdp_region.is_reused for module in failing):
        return False
    for module in failing:
        module.__dict__["_fsdp_region"] = replace(module._fsdp_region, is_reused=False)
    return True


def _failing(model: nn.Module, attempt: _Attempt) -> list[Any]:
    """Return the regions of the class that Dynamo traced last, or all if it had traced all of them."""
    regions = [module for module in model.modules() if isinstance(module, RegionModule)]
    return [module for module in regions if type(module) is attempt.entered] or regions


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
