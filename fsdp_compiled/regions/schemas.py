"""What a region does to its operands, derived once per trace.

At every call of a region that needs gradients, torch traces the region once more to see whether it writes to its
operands, which costs more than all else of a block that is stamped. So torch's operator remembers here what it found,
by the key that torch itself uses where it remembers (torch 2.13 does, in functionalization). It knows regions of any
kind; it must not know what a block is.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._guards import TracingContext

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
_operator: Any = torch.ops.higher_order.invoke_subgraph
_derive = _operator.gen_schema

_Key = tuple[int, str, tuple[type, ...]]
_found: WeakKeyDictionary[TracingContext, dict[_Key, tuple[Any, Any]]] = WeakKeyDictionary()


def derive_once() -> None:
    """Let the operator that calls regions remember schemas, each for as long as its trace lasts."""
    _operator.gen_schema = _remembered


def _remembered(subgraph: Any, identifier: str, *operands: Any) -> Any:
    trace = TracingContext.try_get()
    if trace is None:
        return _derive(subgraph, identifier, *operands)
    known = _found.setdefault(trace, {})
    key = id(subgraph), identifier, tuple(map(type, operands))
    if key not in known:
        known[key] = subgraph, _derive(subgraph, identifier, *operands)  # the subgraph, so that its id stays its own
    return known[key][1]
