"""When torch may reuse the trace of an equal block, and the guards of a block for which it has.

Torch compares such a block with the one that it traced, but its arguments in part only; so a text that describes the
call is compared, too. And it installs no guards for the block: what changes in it later, such as its training mode,
would go unnoticed. So what was compared is guarded here. Both use Dynamo's internals, checked on torch 2.13.0 and
2.15.0; torch 2.11 traces every block. This module knows a block and its traces only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType
from typing import Any

import torch
from torch._dynamo.guards import install_guard
from torch._dynamo.source import LocalSource
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable


def describe(context: Any) -> str | None:
    """Return a text that is equal for two calls of equal blocks, the caller's ``self``, if their arguments are alike.

    These are alike in number, names, kinds, values but for tensors, and in which tensors are the same. It is None for
    other arguments, such as objects and functions: torch does not compare what a trace reads of them.
    """
    local = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().symbolic_locals
    seen: dict[Any, int] = {}
    with suppress(Exception):  # Dynamo's internals are others in this version, too
        return "".join(_described(local[name], local["self"].source, seen) for name in ("args", "kwargs"))
    return None


def _described(variable: Any, block: Any, seen: dict[Any, int]) -> str:
    variable = variable.realize()
    kind = variable.python_type()
    # Of an attribute, torch takes whatever the trace reads there from the other call's argument.
    where = str(variable.source and _of_block(variable.source, block, LocalSource("self")))
    text = f"{kind.__name__} {where if 'member=' in where or 'global_name=' in where else ''} "
    if isinstance(variable, ConstantVariable):
        return text + repr(variable.value)
    if isinstance(variable, (TensorVariable, SymNodeVariable)):
        return text + str(seen.setdefault(variable.as_proxy().node, len(seen)))
    if kind is dict:
        text += str([key.vt.as_python_constant() for key in variable.items])
    elif kind not in (tuple, list):
        raise NotImplementedError(text)
    items = variable.items.values() if kind is dict else variable.items
    return text + str([_described(each, block, seen) for each in items])


def guard_as(code: CodeType) -> Callable[[Any], None]:
    """Return what ``torch._dynamo.comptime`` is to call after a region of the caller's ``self``; ``code`` is its own.

    If no trace fits, that raises RuntimeError: the region must be traced by itself.
    """

    def guard(context: Any) -> None:
        tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        try:
            fits = _guard(tracer, code)
        except Exception as error:
            raise RuntimeError(f"subgraph_reuse: {type(error).__name__}: {error}") from error
        if not fits:
            raise RuntimeError("subgraph_reuse: no trace fits the block")

    return guard


def _guard(tracer: Any, code: CodeType) -> bool:
    """Install the guards of each trace that fits the block; tell whether there is one, or no trace is reused."""
    cache = tracer.output.tracing_context.hop_dispatch_set_cache.get_cache(torch.ops.higher_order.invoke_subgraph)
    traces = cache.subgraph_reuse_cache.get(code, [])
    block, ordered = tracer.symbolic_locals["self"].source, tracer.output.guard_on_key_order
    fitting = 0
    for condition, trace in traces:
        found = list(_guards(tracer, condition, trace.arg_sources[0], block))
        if all(handler.eval_fn(value, expected) for _, handler, value, expected in found):
            fitting += 1
            ordered.update([_of_block(source, trace.arg_sources[0], block) for source in ordered])
            install_guard(*(guard for guard, *_ in found if guard.create_fn_name() != "TENSOR_MATCH"))
    return fitting > 0 or not traces


def _guards(tracer: Any, condition: Any, traced: Any, block: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield each guard of a trace of block ``traced`` for another one, its check, the value, and what it must be."""
    scope = {"G": tracer.output.root_tx.f_globals, "L": tracer.output.root_tx.f_locals}
    known: dict[Any, Any] = {}  # values of sources, so that what several lead through is looked up once
    for source, handler, expected, guard in condition.guards:
        own = _of_block(source, traced, block)
        if own != source:
            yield own.make_guard(guard.create_fn), handler, own.get_value(scope, {}, known), expected


def _of_block(source: Any, traced: Any, block: Any) -> Any:
    """Return where ``block`` has what ``source`` leads to in the block ``traced``."""
    return source.clone(lambda each: block if each == traced else each)
