"""A block as a region of a graph: compiled once, and called wherever an equal block is.

It knows one block and the parameters that are read in it; it must not know which blocks are equal.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from inspect import signature
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.compiler import nested_compile_region

from .. import collectives, passes
from ..expect import known_internals, unexpected
from ..param.param import FSDPParam
from ..param.unit import Unit
from ..passes.torch_internals import CONJUGATE, functorch_config, get_invoke_subgraph_cache
from ..tracing import dynamo, reads
from ..tracing.dynamo import comptime
from ..tracing.sharded_module import MixinOrder, rebase

T = TypeVar("T")


@dataclass(frozen=True)
class RegionBlock:
    """What is known of a block that is a region."""

    unit: Unit
    params: tuple[FSDPParam, ...]  # all that are read below the module
    names: str  # which of them is read under which names
    is_reused: bool  # a trace of an equal block may stand for this one's
    by_default: bool  # nobody has asked for it: nothing is lost without it but the time to compile


class RegionModule:
    """Mixin of a module whose forward is a region of the graph that Dynamo traces.

    The all-gathers stay in the graph around it, where buckets and their order are decided: the region takes the
    unsharded parameters as arguments. Hooks of the module stay outside, too.
    """

    _fsdp_order = MixinOrder.REGION
    _fsdp_region: RegionBlock

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region, call = self._fsdp_region, None
        is_region = torch.compiler.is_compiling() and (not region.unit.hooked or _is_unsharded(region))
        if is_region:
            comptime(_enter)  # sets both
        if not is_region:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        unsharded = _registered(region.params) if region.unit.hooked else _unsharded_together(region.params)
        if call is None:
            return _region(self, RegionBlock, *unsharded, *args, **kwargs)
        output = _region(self, region.names + call, *unsharded, *args, **kwargs)
        comptime(_guard)
        return output

    def _fsdp_body(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def make_region(module: nn.Module, unit: Unit, by_default: bool) -> None:
    """Let ``module``, which belongs to ``unit``, be a region of graphs that are traced from now on.

    ``by_default``: only of those that Inductor compiles for a call that can be made again if the region fails.
    """
    read: dict[FSDPParam, list[str]] = {}
    for path, below in module.named_modules(remove_duplicate=False):
        for name, param in below.__dict__.get("_fsdp_params", {}).items():
            read.setdefault(param, []).append(f"{path}.{name}")
    names = "; ".join(map(" = ".join, read.values()))
    module.__dict__["_fsdp_region"] = RegionBlock(unit, tuple(read), names, REUSES_TRACES, by_default)
    rebase(module, add=(RegionModule,))


def drop_region(module: nn.Module) -> None:
    """Let ``module`` be traced as a part of the graph around it again."""
    module.__dict__.pop("_fsdp_region", None)
    rebase(module, drop=RegionModule)


def _is_unsharded(region: RegionBlock) -> bool:
    """Tell whether what is registered while hooks hold the unit are the parameters as the region takes them."""
    is_plain = all(param.extension is None and param.outer is None for param in region.params)
    return is_plain and all(region.unit in param.users for param in region.params)


def _registered(params: Sequence[FSDPParam]) -> list[Any]:
    return [param.unsharded.param for param in params]


def _unsharded_together(params: Sequence[FSDPParam]) -> list[Tensor]:
    """Return the unsharded parameters; one operator all-gathers them, since tracing it costs time in every block."""
    plain = [param for param in params if param.extension is None]
    together = iter(collectives.unshard_all([reads.unshard_arguments(param) for param in plain]) if plain else ())
    return [next(together) if param.extension is None else reads.unsharded_local(param) for param in params]


def _body(module: Any, which: str | type, *operands: Any, **kwargs: Any) -> Any:
    """Run the module's own forward, whose reads of parameters give the first ``operands``.

    Torch reuses a trace of an equal ``which``: under which names each operand is read, and what the call is like. It
    does not compare classes, so the trace of a block that is called with one is not reused.
    """
    comptime(_enter_body)
    output = module._fsdp_body(*operands[len(module._fsdp_region.params) :], **kwargs)
    comptime(_leave_body)
    return output


def _enter_body(context: Any) -> None:
    if REUSES_TRACES:
        dynamo.begin_body(context)
    reads.enter_region(context, dynamo.local_value(context, "module")._fsdp_region.params)


def _leave_body(context: Any) -> None:
    if REUSES_TRACES:
        dynamo.end_body(context)
    _check_body(dynamo.local_value(context, "module"), context.graph())


def _check_body(block: Any, body: fx.Graph) -> None:
    """Raise RuntimeError for ``out=``: what it writes to a buffer torch (seen with 2.13) overlooks in a region."""
    for node in body.nodes:
        if isinstance(node.kwargs.get("out"), (fx.Node, tuple, list)):
            where, got = f"a region of {type(block)._fsdp_user_class.__name__}", f"one of {node.target.__name__}"
            raise unexpected(where, "no out=", got, "compile it outside of regions", RuntimeError)


# Blocks that differ in what they read need a trace each; each block is compared with all of them, so not with many.
# torch before 2.13 traces every block. Within a checkpoint, which allows no side effects, every block is traced, too.
_LIMIT: dict[str, Any] = (
    {"max_reuse_entries": 16} if "max_reuse_entries" in signature(nested_compile_region).parameters else {}
)
_region = nested_compile_region(_body, **_LIMIT)
REUSES_TRACES = bool(_LIMIT)


# ---- while Dynamo traces: comptime calls these, so that nothing of them is left in a graph ----


COMPILED_IN_PLACE = "_fsdp_compiled_in_place"  # an attribute of modules: the code with which Dynamo begins
_entered: ContextVar[type | None] = ContextVar("the class of the region that Dynamo traced last", default=None)
_repeated: ContextVar[tuple[CodeType, ...]] = ContextVar("the call that is made again if a region fails", default=())


@known_internals("compare the arguments of equal blocks")
def _enter(context: Any) -> None:
    """Set the caller's ``is_region``, and ``call`` if a trace of an equal block that is called alike may be reused.

    Torch lets regions of equal code share one graph, whatever modes they are called under. So a block is a part of
    the graph if the trace's first region was called under others, or in a torch function mode. In a branch or a loop
    it is a part of that.
    """
    block, first, here = dynamo.local_value(context, "self"), dynamo.of_trace(_modes), _modes()
    by_default = block._fsdp_region.by_default
    is_possible = not dynamo.branches_around(context) and not dynamo.entered_function_modes(context)
    is_possible = is_possible and (not by_default or _is_safe(context))
    if is_possible and first != here and not by_default:
        warnings.warn(
            f"regions: a block ({type(block)._fsdp_user_class.__name__}) is compiled as a part of the graph, "
            f"because it is called under other modes than the first region: {here}, not {first}",
            stacklevel=2,
        )
    if not is_possible or first != here:
        dynamo.set_local(context, "is_region", False)
        return
    _entered.set(type(block))
    if block._fsdp_region.is_reused and (call := dynamo.describe_arguments(context)) is not None:
        dynamo.set_local(context, "call", f"{_hooks_of(block)} {call}")
    reads.check_below(context)


def _is_safe(context: Any) -> bool:
    """Tell whether a region that nobody has asked for changes nothing but the time to compile."""
    options = dynamo.inductor_options(context)
    return options is not None and passes.suits_default(options) and dynamo.began_with(context, _repeated.get())


def _modes() -> str:
    accelerator = torch.accelerator.current_accelerator()
    devices = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    modes: dict[str, Any] = {f"autocast on {each}": torch.is_autocast_enabled(each) for each in sorted(devices)}
    modes |= {f"autocast dtype on {each}": torch.get_autocast_dtype(each) for each in sorted(devices)}
    modes["attention"] = [each.name for each in dynamo.attention_backends()]
    return f"gradients {torch.is_grad_enabled()}, {modes}, {torch.get_default_dtype()}"


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _hooks_of(block: nn.Module) -> str:
    """Return a text that is equal for blocks whose modules have the same hooks, for which torch has no guards.

    Those of the block run outside. Of hooks that are methods, torch compares what it reads of their objects.
    """
    functions = [
        (name, kind, id(getattr(hook, "__func__", hook)))
        for name, each in block.named_modules(remove_duplicate=False)
        if each is not block
        for kind in _HOOKS
        for hook in getattr(each, kind).values()
    ]
    return str(functions)


@known_internals("guard a block for which the trace of an equal one is reused")
def _guard(context: Any) -> None:
    dynamo.guard_as_reused(context, _body.__code__)


_operator: Any = torch.ops.higher_order.invoke_subgraph
_derive = _operator.gen_schema


class _Schemas(dict[tuple[int, str, tuple[type, ...]], tuple[Any, Any]]):
    """Those of one trace, each with its subgraph, so that the subgraph's id stays its own."""


def derive_schemas_once() -> None:
    """Let the operator that calls regions remember schemas, each for as long as its trace lasts.

    At every call of a region that needs gradients, torch traces the region once more to see whether it writes to its
    operands, which costs more than all else of a block whose trace is reused. The key is the one that torch itself
    uses where it remembers what it found (torch 2.13 does, in functionalization).
    """
    _operator.gen_schema = _remembered


def derive_schemas_always() -> None:
    """End that: the operator has its own method again."""
    if vars(_operator).get("gen_schema") is _remembered:
        del _operator.gen_schema


def take_conjugates() -> None:
    """Let regions be called with conjugates that are views, as an FFT's backward does: what they run resolves them.

    Torch (2.13 and 2.15) has no kernel for such a call.
    """
    _operator.fallthrough(CONJUGATE)


def refuse_conjugates() -> None:
    """End that."""
    _operator.non_fallthrough_keys = _operator.non_fallthrough_keys.add(CONJUGATE)


def _remembered(subgraph: Any, identifier: str, *operands: Any) -> Any:
    cache = get_invoke_subgraph_cache()
    if cache is not None and cache.get_effects(identifier):
        # What a second call returns would have no gradient, seen with torch 2.13 and 2.15.
        got, do = "one, as torch.linalg.inv, which checks what it found", "compile it outside of regions"
        raise unexpected("a region", "no operator with effects", got, do, RuntimeError)
    known, key = dynamo.of_trace(_Schemas), (id(subgraph), identifier, tuple(map(type, operands)))
    if key not in known:
        # Torch does it without gradients. Then DTensor.to_local() of an operand detaches it in place, which counts as
        # a write to the operand.
        with torch.enable_grad():
            known[key] = subgraph, _derive(subgraph, identifier, *operands)
    return known[key][1]


# Of torch's own errors: a guard that it cannot compare, more traces than the limit, a float that it made symbolic,
# a side effect in a checkpoint.
_REFUSES_REUSE = re.compile("subgraph_reuse|maximum reuse entries|Freevar has no source|Unsafe side effect")


@dynamo.skipped
def is_compiled(model: nn.Module) -> bool:
    """Tell whether Dynamo may trace a call of ``model`` that begins now."""
    return callable(dynamo.get_eval_frame_callback()) or COMPILED_IN_PLACE in model.__dict__


@dynamo.skipped  # or Dynamo would trace it and what it calls as one
def without_failing_regions(model: nn.Module, run: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Run; where torch cannot compile a region, compile its block as a part of the graph, and warn or log.

    An error that has nothing to do with regions leaves them as they are. A graph that recomputes random numbers, or
    attention on a GPU, does not take the states of their generators as arguments, for which CUDA graphs have a use:
    torch gives none to regions.
    """
    dropped: dict[nn.Module, RegionBlock] = {}
    why: Exception | None = None
    tracing = dynamo.get_eval_frame_callback()
    begins = (getattr(run, "__wrapped__", run).__code__, *model.__dict__.get(COMPILED_IN_PLACE, ()))  # type: ignore[attr-defined]
    as_arguments = functorch_config.graphsafe_rng_functionalization
    while True:
        before, call = _entered.set(None), _repeated.set(begins)
        functorch_config.graphsafe_rng_functionalization = as_arguments and not is_compiled(model)
        try:
            result = run(*args, **kwargs)
        except (dynamo.TorchDynamoException, AssertionError) as error:  # Dynamo lets assertions of its own out
            # After an error in compiled code Dynamo would trace what is called here. One of Dynamo's own unsets it.
            left = dynamo.set_eval_frame(None)
            is_running = tracing is not None and left is tracing
            failing = [] if is_running and isinstance(error, AssertionError) else _failing(model, error)
            if not failing:
                for module, region in dropped.items():
                    make_region(module, region.unit, region.by_default)
                dynamo.set_eval_frame(left)
                raise
            if not _trace_each(failing, error):
                why = why or error
                for module in failing:
                    dropped[module] = module._fsdp_region
                    drop_region(module)
            dynamo.set_eval_frame(tracing)
        else:
            if why is not None:
                _tell(dropped, why)
            return result
        finally:
            functorch_config.graphsafe_rng_functionalization = as_arguments
            _repeated.reset(call)
            _entered.reset(before)


def _failing(model: nn.Module, error: Exception) -> list[Any]:
    """Return the regions of the class that Dynamo traced last, or all if it had traced all of them."""
    entered = _entered.get()
    if entered is None and isinstance(error, AssertionError):
        return []  # nothing was compiled
    regions = [module for module in model.modules() if isinstance(module, RegionModule)]
    return [module for module in regions if type(module) is entered] or regions


def _trace_each(failing: list[Any], error: Exception) -> bool:
    """Let each of the blocks be traced by itself if what failed was to reuse a trace; tell whether it was."""
    if not _REFUSES_REUSE.search(str(error)) or not any(module._fsdp_region.is_reused for module in failing):
        return False
    for module in failing:
        module.__dict__["_fsdp_region"] = replace(module._fsdp_region, is_reused=False)
    return True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tell(modules: Mapping[nn.Module, RegionBlock], why: Exception) -> None:
    classes = sorted({type(module)._fsdp_user_class.__name__ for module in modules})  # type: ignore[attr-defined]
    first = re.split(r"(?<![:\n])\n", str(why).strip())[0]  # the first line, and what a colon at its end announces
    reason = " ".join(first.split()) or type(why).__name__
    configs = (getattr(below, "config", None) for module in modules for below in module.modules())
    if any(getattr(config, "use_cache", False) for config in configs):  # Hugging Face's
        reason += "; in training set config.use_cache = False, so that they keep no tensors in a cache"
    text = (
        f"regions: {len(modules)} blocks ({', '.join(classes)}) are compiled as a part of the graph, because torch "
        f"cannot compile them as regions: {reason}"
    )
    if all(region.by_default for region in modules.values()):
        passes.log.say(text)
    else:
        warnings.warn(text, stacklevel=4)
