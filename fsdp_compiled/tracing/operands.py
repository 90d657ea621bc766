"""The operands of a region: what reads of sharded parameters give inside of it.

They are found while Dynamo traces, so that nothing of it is left for the steps. It must not know what is a region.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..param.param import FSDPParam
from .dynamo import graphs_around, known_internals, local_value, local_variable, of_trace, set_local

_WHAT = "compile blocks as regions"


class _Operands(dict[Any, dict[FSDPParam, Any]]):
    """Of each region that a trace is in or was in, by what traces its graph."""


def enter(context: Any, params: Iterable[FSDPParam]) -> None:
    """Let the first of the caller's ``operands`` be the unsharded ``params`` in the graph that it is in."""
    known = of_trace(_Operands)
    with known_internals(_WHAT):
        if known is not None:
            variables = local_variable(context, "operands").realize().items
            known[next(graphs_around(context))] = dict(zip(params, variables, strict=False))


def find(context: Any) -> None:
    """Set the caller's ``operand`` to the unsharded ``param`` if the innermost region that it is in has it."""
    known = of_trace(_Operands)
    if known:
        with known_internals(_WHAT):
            regions = [known[graph] for graph in graphs_around(context) if graph in known]
            param = local_value(context, "param") if regions else None
            if regions and param in regions[0]:
                set_local(context, "operand", regions[0][param])
