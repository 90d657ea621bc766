"""One test in every mode: eager, with compiled compute, and as a full graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import nn

from ..api import fully_shard, fully_shard_with_compiled_compute
from ..module import FSDPModule
from .patches import Place, replaced
from .threads import ranks_are_threads

Test = TypeVar("Test", bound=Callable[..., Any])


class FullyShardMode(Enum):
    """What ``fully_shard`` does in a test under :func:`compiled_fsdp_test`.

    EAGER: nothing more; hooks communicate and nothing is compiled.
    COMPILED_COMPUTE: compiles the compute of units that have no unit inside; hooks communicate.
    FULL_GRAPH: compiles the outermost unit with ``fullgraph=True``; collectives are in the graph.
    """

    EAGER = auto()
    COMPILED_COMPUTE = auto()
    FULL_GRAPH = auto()


def compiled_fsdp_test(
    compile_compute_on_module: type[nn.Module] | None = None,
    *,
    modes: Sequence[FullyShardMode] = tuple(FullyShardMode),
) -> Callable[[Test], Test]:
    """Run the decorated test once per mode, in this order, with compiled code dropped in between.

    During the test ``fully_shard`` does what the mode says, under that name in every module that has it, so that
    the test and its helpers need no change. List units are sharded but not compiled by themselves.

    Args:
        compile_compute_on_module: compile the compute of units of this class alone.
        modes: those to run.

    Raises:
        TypeError: the decorator is used without parentheses.
        RuntimeError: when run, where a mode compiles and ranks are threads; use FSDPTest.
    """
    if not (compile_compute_on_module is None or isinstance(compile_compute_on_module, type)):
        raise TypeError(
            f"compile_compute_on_module: expected a module class or None, got {compile_compute_on_module!r}; "
            "write @compiled_fsdp_test()"
        )

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            for mode in modes:
                _check_ranks(mode)
                torch.compiler.reset()
                with replaced(_uses(), functools.partial(_SHARD[mode], compile_compute_on_module)):
                    _run_noted(test, mode, *args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


def _run_noted(test: Callable[..., Any], mode: FullyShardMode, *args: Any, **kwargs: Any) -> None:
    try:
        test(*args, **kwargs)
    except Exception as error:
        error.add_note(f"mode: {mode.name}")
        raise


def _check_ranks(mode: FullyShardMode) -> None:
    if mode is not FullyShardMode.EAGER and ranks_are_threads():
        raise RuntimeError(
            f"compiled_fsdp_test: {mode.name} compiles, which ranks that are threads cannot; "
            "use FSDPTest, or modes=[FullyShardMode.EAGER]"
        )


def _uses() -> list[Place]:
    library = fully_shard.__module__  # whose own functions must go on calling the original
    modules = [module for name, module in list(sys.modules.items()) if name not in (library, __name__)]
    return [(module, "fully_shard") for module in modules if _variables(module).get("fully_shard") is fully_shard]


def _variables(module: Any) -> dict[str, Any]:
    return getattr(module, "__dict__", {})


def _eager(only: type[nn.Module] | None, module: Any, **kwargs: Any) -> Any:
    return fully_shard(module, **kwargs)


def _compiled_compute(only: type[nn.Module] | None, module: Any, **kwargs: Any) -> Any:
    chosen = isinstance(module, nn.Module) and (isinstance(module, only) if only else not _units(module))
    return fully_shard_with_compiled_compute(module, **kwargs) if chosen else fully_shard(module, **kwargs)


def _full_graph(only: type[nn.Module] | None, module: Any, **kwargs: Any) -> Any:
    fully_shard(module, **kwargs)
    for unit in [unit for part in (module if isinstance(module, list) else [module]) for unit in _units(part)]:
        unit._compiled_call_impl = None  # its collectives go into the outer unit's graph
    if isinstance(module, nn.Module):
        module.compile(fullgraph=True)
    return module


def _units(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


_SHARD = {
    FullyShardMode.EAGER: _eager,
    FullyShardMode.COMPILED_COMPUTE: _compiled_compute,
    FullyShardMode.FULL_GRAPH: _full_graph,
}
