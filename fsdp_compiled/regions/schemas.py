"""What a region does to its operands, derived once per trace.

At every call of a region that needs gradients, torch traces the region once more to see whether it writes to its
operands, which costs more than all else of a block whose trace is reused. So torch's operator remembers here what it
found, by the key that torch itself uses where it remembers (torch 2.13 does, in functionalization). It knows regions
of any kind; it must not know what a block is.
"""

from __future__ import annotations

from typing import Any

import torch

from ..tracing.dynamo import of_trace

_operator: Any = torch.ops.higher_order.invoke_subgraph
_derive = _operator.gen_schema


class _Schemas(dict[tuple[int, str, tuple[type, ...]], tuple[Any, Any]]):
    """Those of one trace, each beside its subgraph, so that the subgraph's id stays its own."""


def derive_once() -> None:
    """Let the operator that calls regions remember schemas, each for as long as its trace lasts."""
    _operator.gen_schema = _remembered


def derive_always() -> None:
    """End that: the operator has its own method again."""
    if vars(_operator).get("gen_schema") is _remembered:
        del _operator.gen_schema


def _remembered(subgraph: Any, identifier: str, *operands: Any) -> Any:
    known = of_trace(_Schemas)
    if known is None:
        return _derive(subgraph, identifier, *operands)
    key = id(subgraph), identifier, tuple(map(type, operands))
    if key not in known:
        known[key] = subgraph, _derive(subgraph, identifier, *operands)
    return known[key][1]
