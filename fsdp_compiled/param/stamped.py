"""Guards of blocks for which torch has reused the trace of an equal block.

Torch compares such a block with the one that it traced, and installs no guards for it: what changes in the block
later, such as its training mode, would go unnoticed. So what was compared is guarded here, by Dynamo's internals,
checked on torch 2.13.0 and 2.15.0; torch 2.11 traces every block. It knows a block and its traces only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch._dynamo.guards import install_guard


def guard_as(code: CodeType) -> Callable[[Any], None]:
    """Return what ``torch._dynamo.comptime`` is to call after a region of the caller's ``self``.

    Args:
        code: of the region's function.

    Raises:
        RuntimeError: (when called) no trace is found that fits; the region must be traced by itself.
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
