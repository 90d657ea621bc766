"""Refuses ``torch.func.functional_call`` with parameters of the user's where Dynamo traces it and the model together.

A traced read takes the shard, and a guard on what is registered would be slow in every step. So what the traced
program has registered is compared while Dynamo traces. It must not know how a parameter is read.
"""

from __future__ import annotations

from typing import Any

from ..param.param import not_registered
from .dynamo import changed_dict, known_internals, local_value

_WHAT = "tell whether functional_call gave a sharded model other parameters"


def check(context: Any) -> None:
    """Raise RuntimeError if the traced program has registered other parameters on the caller's ``module``.

    ``comptime`` calls it while Dynamo traces; it leaves nothing in the graph, and no guard.
    """
    with known_internals(_WHAT):
        _check(context, local_value(context, "module"))


def check_below(context: Any) -> None:
    """As :func:`check` for the caller's ``self`` and all modules below it, whose reads Dynamo may not trace."""
    with known_internals(_WHAT):
        for module in local_value(context, "self").modules():
            if "_fsdp_params" in module.__dict__:
                _check(context, module)


def _check(context: Any, module: Any) -> None:
    for name, variable in (changed_dict(context, module._parameters) or {}).items():
        if name in module._fsdp_params and not _is_registered(variable):
            raise not_registered(module._fsdp_params[name].name, "Tensor")


def _is_registered(variable: Any) -> bool:
    """Tell whether Dynamo has it from any module's parameters, or from ours; else the program has computed it.

    A tensor keeps the source by which the program reached it first, so what is registered here may name another one.
    """
    source = repr(variable.source)
    return "_parameters" in source or "_fsdp_params" in source
