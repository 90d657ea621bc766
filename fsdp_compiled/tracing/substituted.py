"""Refuses ``torch.func.functional_call`` with parameters of the user's where Dynamo traces it and the model together.

A traced read takes the shard, and a guard on what is registered would be slow in every step. So what the traced
program has registered is looked at while Dynamo traces, by its internals, checked on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..param.replaced import not_registered


def check(context: Any) -> None:
    """Raise RuntimeError if the traced program has registered other parameters on the caller's ``module``.

    ``torch._dynamo.comptime`` calls it while Dynamo traces; it leaves nothing in the graph, and no guard.
    """
    with suppress(AttributeError):  # Dynamo's internals are others in this version; then nothing is refused
        tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        _check(tracer, tracer.symbolic_locals["module"].value)


def check_below(context: Any) -> None:
    """As :func:`check` for the caller's ``self`` and all modules below it, whose reads Dynamo may not trace."""
    with suppress(AttributeError):
        tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        for module in tracer.symbolic_locals["self"].value.modules():
            if "_fsdp_params" in module.__dict__:
                _check(tracer, module)


def _check(tracer: Any, module: Any) -> None:
    registered = tracer.output.side_effects.id_to_variable.get(id(module._parameters))
    if registered is None:
        return  # the program has not touched them
    for key, variable in registered.items.items():
        name = key.vt.as_python_constant()
        if name in module._fsdp_params and not _is_registered(variable):
            raise not_registered(module._fsdp_params[name].name, "Tensor")


def _is_registered(variable: Any) -> bool:
    """Tell whether Dynamo has it from any module's parameters, or from ours; else the program has computed it.

    A tensor keeps the source by which the program reached it first, so what is registered here may name another one.
    """
    source = repr(variable.source)
    return "_parameters" in source or "_fsdp_params" in source
