"""What lies below an outermost unit: other units, and what modules were added or swapped since it was sharded.

It must not know what units do in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from ..collectives.operators import meta_parameter
from ..expect import unexpected
from ..param.param import FSDPParam
from ..param.replaced import Registered
from ..torch_fsdp.registry import applied
from ..tracing.root_call import TracedCall
from ..tracing.sharded_module import is_managed, rebase
from .context import states_below

UnitState = Any  # an FSDPState, whose file imports this one


def adopt_units_below(state: UnitState) -> None:
    """Give the units below their full names, if ``state`` is not their outermost one yet."""
    names = _names(state.modules)
    for below in states_below(state.modules):
        if below is not state and below.outermost is not state:
            params = {param: f"{names[param.info.module]}.{param.info.name}" for param in below.params}
            for module in below.modules:
                rebase(module, drop=TracedCall)
            below.adopt(state, names[below.modules[0]], params)


def _names(modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    names: dict[nn.Module, str] = {}
    for index, root in enumerate(modules):
        for name, module in root.named_modules(prefix=str(index) if len(modules) > 1 else ""):
            names.setdefault(module, name)
    return names


class ModuleTree:
    """What lies below an outermost unit, to notice in every step whether the user has changed it since.

    It looks in every step, so it compares what is there with what was there, and knows no reasons.
    """

    def __init__(self, roots: Sequence[nn.Module], params: Sequence[FSDPParam]) -> None:
        self._params = params
        self._registered: Registered | None = None
        modules = {module: None for root in roots for module in root.modules()}
        self._parents: list[dict[str, nn.Module | None]] = [m._modules for m in modules if m._modules]
        self._dicts: list[dict[str, Any]] = [d for m in modules for d in (m._modules, m._parameters)]
        self._expected = self._now()

    def _now(self) -> tuple[list[int], list[tuple[nn.Module | None, ...]]]:
        # Parameters themselves are swapped in every step.
        return list(map(len, self._dicts)), list(map(tuple, map(dict.values, self._parents)))

    @property
    def has_changed(self) -> bool:
        """Whether a module or a parameter was added, removed or, a module, swapped."""
        return self._now() != self._expected

    def forget_params(self) -> None:
        """Let go of parameters that may have been replaced, so that their memory is not kept until the next step."""
        self._registered = None

    def check_untouched(self) -> None:
        """Raise RuntimeError if a parameter was replaced without its module hearing of it."""
        if self._registered is None or not self._registered.still():
            for param in self._params:
                param.check_untouched()
            self._registered = Registered(self._params)


def check_all_sharded(roots: Sequence[nn.Module], states: Sequence[UnitState]) -> None:
    """Raise ValueError if a trainable parameter below ``roots`` belongs to no unit and was not ignored."""
    ignored = {(module, name) for state in states for module, names in state.ignored.items() for name in names}
    for prefix, module in _modules_outside_replicate(roots):
        for name, param in module._parameters.items():
            if param is None or not param.requires_grad or is_managed(module, name) or (module, name) in ignored:
                continue
            where = f"{prefix.removesuffix('.')} ({type(module).__name__})" if prefix else type(module).__name__
            is_sharded = "_fsdp_units" in module.__dict__ or "_fsdp_state" in module.__dict__
            do = "add it before fully_shard" if is_sharded else f"call fully_shard on {where} first"
            got = "one that was added to the model afterwards and would train unsharded, without communication"
            expected = "a parameter that fully_shard has seen"
            raise unexpected(f"{prefix}{name}", expected, got, f"{do}, or freeze it")


def check_materialized(params: Iterable[FSDPParam]) -> None:
    """Raise RuntimeError if a parameter is on the meta device, or not on the CPU where it is offloaded."""
    for param in params:
        if param.device.type == "meta":
            raise RuntimeError(meta_parameter(param.name))
        if param.placement.offload is not None and param.device.type != "cpu":
            expected, got = "a shard on the CPU, as offload_policy says", f"one on {param.device}"
            do = "load it there, or move the model with model.cpu()"
            raise unexpected(param.name, expected, got, do, RuntimeError)


def _modules_outside_replicate(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen = set[nn.Module]()
    stack = [(f"{index}." if len(roots) > 1 else "", root) for index, root in enumerate(roots)]
    while stack:
        prefix, module = stack.pop()
        if module in seen or "replicate" in applied(module):
            continue
        seen.add(module)
        yield prefix, module
        stack += [(f"{prefix}{name}.", child) for name, child in module.named_children()]
