"""Modules that own sharded parameters: what reading ``module.weight`` gives, eagerly and while Dynamo traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from enum import IntEnum
from functools import cache
from inspect import unwrap
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..expect import unexpected
from ..param.param import FSDPParam
from ..param.placement import ShardedState
from ..param.unit import Unit
from ..sharding.dtensor import laid_out_like
from ..subclasses import Unannounced, layout_base
from ..torch_fsdp.registry import note_unit
from . import reads
from .dynamo import comptime, skipped


class MixinOrder(IntEnum):
    """Which of a sharded module's mixins comes before which; each declares its place as ``_fsdp_order``."""

    METHODS = 0  # FSDPModule first, as users of FSDP2 know it
    ROOT_CALL = 1  # the traced call before the one that Dynamo skips
    REGION = 2
    READS = 3


class UnitOfModule(Protocol):
    """What modules ask of ``FSDPState``, which this package may not import."""

    @property
    def unit(self) -> Unit: ...
    @property
    def is_root(self) -> bool: ...
    @property
    def can_reshard(self) -> bool: ...
    @property
    def run(self) -> Callable[..., Any]: ...  # a call of the outermost unit, without regions that fail
    def reshard(self) -> None: ...
    def regroup(self) -> None: ...
    def enter_thread(self) -> None: ...
    def begin_call(self) -> None: ...
    def end_call(self) -> None: ...
    def reset_iteration(self, drop_accumulated: bool) -> None: ...


class ShardedModule:
    """Mixin of every module that owns sharded parameters; it comes before the module's class.

    ``param/README.md`` draws what a read of ``module.weight`` gives, traced and eager.
    """

    _fsdp_order = MixinOrder.READS
    _fsdp_params: dict[str, FSDPParam]
    _fsdp_units: tuple[UnitOfModule, ...]
    _fsdp_calling = False

    @skipped
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Not by super(): Dynamo would guard its result for every module in every step.
            return nn.Module.__call__(self, *args, **kwargs)  # type: ignore[arg-type]
        return _call(self, super().__call__, args, kwargs)  # type: ignore[misc]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if getattr(fn, "__code__", None) in nn.Module.share_memory.__code__.co_consts:
            raise TypeError(
                f"{type(self).__name__}: a sharded module cannot share its memory with other processes, which would "
                "have no part in its process groups; share what full_tensor() returns for each value of state_dict()"
            )
        is_running = any(state.unit.hooked and state.unit.config.has_hooks for state in self._fsdp_units)
        if is_running and all(fn(param) is param for param in self._parameters.values() if param is not None):  # type: ignore[attr-defined]
            return super()._apply(fn, recurse)  # type: ignore[misc]  # as routers do that convert a layer in forward
        _reshard_units(self)
        with _gradients_aside(self._fsdp_params.values()):
            try:
                super()._apply(fn, recurse)  # type: ignore[misc]
            finally:
                _relink(self)  # also what an exception has left converted
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Take ``param`` in place of a sharded one, as ``module.weight = ...`` and ``assign=True`` do."""
        replaced = self.__dict__.get("_fsdp_params", {}).get(name)
        is_ours = replaced is None or self._parameters.get(name) is param  # type: ignore[attr-defined]  # by FSDPParam
        if is_ours or (replaced.state is ShardedState.UNSHARDED and replaced.unsharded.is_also(param)):
            super().register_parameter(name, param)  # type: ignore[misc]
            return
        replaced.check_replacement(param)
        _reshard_units(self)
        replaced.register(param)
        _relink(self)

    def __delattr__(self, name: str) -> None:
        sharded = self.__dict__.get("_fsdp_params", {}).get(name)
        if sharded is not None and sharded.state is not ShardedState.UNSHARDED:
            why = "expected to stay after fully_shard, which all-gathers it with its unit"
            raise AttributeError(f"{sharded.name}: {why}; delete it before")
        super().__delattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save sharded parameters, even if another thread is in a step, where they are unsharded."""
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for name, param in self._fsdp_params.items():
            registered, sharded = self._parameters.get(name), param.sharded_param  # type: ignore[attr-defined]
            if prefix + name in destination and (registered is sharded or registered is param.unsharded.param):
                destination[prefix + name] = sharded if keep_vars else sharded.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied_module(self, memo)


class ShardedModuleWithCall(ShardedModule):
    """The mixin of modules whose class has a ``__call__`` of its own."""

    @skipped
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super(ShardedModule, self).__call__  # type: ignore[misc]
        return call(*args, **kwargs) if torch.compiler.is_compiling() else _call(self, call, args, kwargs)


@skipped
def _call(module: ShardedModule, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make the call of a module; a read of its parameters all-gathers them if no hook has done that."""
    if module._fsdp_calling:
        return call(*args, **kwargs)
    try:
        module.__dict__["_fsdp_calling"] = True
        return call(*args, **kwargs)
    finally:
        module.__dict__["_fsdp_calling"] = False


def _reader(name: str) -> property:
    @skipped
    def read(module: ShardedModule) -> Tensor | None:
        param = module._fsdp_params[name]
        if torch.compiler.is_compiling():
            operand: Tensor | None = None
            comptime(reads.begin)  # sets it in a region that has the parameter
            if operand is not None:
                return operand if param.outer is None else param.outer.wrap(operand)
            operand = reads.unless_held(param)
            if operand is not None:
                if not torch.compiler.is_dynamo_compiling():
                    reads.check_registered(module._parameters[name], param)  # type: ignore[attr-defined]
                return operand
        elif module._fsdp_calling and param.state is not ShardedState.UNSHARDED:
            return reads.unsharded(param)
        try:
            return module._parameters[name]  # type: ignore[attr-defined]
        except KeyError:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}") from None

    return property(read)


def _relink(module: ShardedModule, *_: object) -> None:
    """Follow whatever replaced the module's sharded parameters or their storage."""
    replaced = [param.relink() for param in dict.fromkeys(module._fsdp_params.values())]
    for unit in module._fsdp_units if any(replaced) else ():
        unit.regroup()


@contextmanager
def _gradients_aside(params: Iterable[FSDPParam]) -> Iterator[None]:
    """Keep gradients whose dtype the user has set from a conversion; they follow to another device."""
    kept = dict[FSDPParam, Tensor]()
    for param in params:
        if param.placement.sets_grad_dtype and param.sharded_param.grad is not None:
            kept[param], param.sharded_param.grad = param.sharded_param.grad, None
    try:
        yield
    finally:
        for param, grad in kept.items():
            param.sharded_param.grad = grad.to(device=param.sharded_param.device)


def is_managed(module: nn.Module, name: str) -> bool:
    """Tell whether a unit has taken the parameter registered here."""
    return isinstance(module, ShardedModule) and name in module._fsdp_params


def own(module: nn.Module, params: dict[str, FSDPParam], unit: UnitOfModule) -> None:
    """Make ``module`` read ``params`` through properties, besides those that it owns already."""
    state = module.__dict__
    if not isinstance(module, ShardedModule):
        state |= {"_fsdp_params": {}, "_fsdp_units": ()}
        note_unit(module, unit.unit)
        module.register_state_dict_pre_hook(_before_save)
        module.register_load_state_dict_pre_hook(_before_load)
        module.register_load_state_dict_post_hook(_relink)
    state["_fsdp_params"].update(params)
    state["_fsdp_units"] += (unit,)
    has_call = user_class(module).__call__ is not nn.Module.__call__
    rebase(module, add=(ShardedModuleWithCall if has_call else ShardedModule,), names=tuple(state["_fsdp_params"]))


def user_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the user wrote: for a module that holds sharded parameters, not the one made of it."""
    return getattr(type(module), "_fsdp_user_class", type(module))


def rebase(
    module: nn.Module, add: tuple[type, ...] = (), drop: type | None = None, names: tuple[str, ...] = ()
) -> None:
    """Put mixins before the class that the user gave ``module``, and properties for ``names``."""
    cls, user_cls = type(module), cast(Any, user_class(module))
    mixins: set[Any] = {*add, *cls.__dict__.get("_fsdp_mixins", ())} - {drop}
    in_order = tuple(sorted(mixins, key=lambda mixin: mixin._fsdp_order))
    module.__class__ = _subclass(user_cls, in_order, names or cls.__dict__.get("_fsdp_names", ()))


@cache
def _subclass(user_cls: type[Any], mixins: tuple[type, ...], names: tuple[str, ...]) -> type:
    """Return the one subclass of ``user_cls`` with these mixins and sharded names; all state is on instances."""
    prefix, *_ = mixins[0].__name__.split("Module")
    body: dict[str, Any] = {name: _reader(name) for name in names}
    body |= {"_fsdp_user_class": user_cls, "_fsdp_mixins": mixins, "_fsdp_names": names}
    body |= {"__module__": user_cls.__module__, "__reduce_ex__": _refuse_pickle, "__new__": new_of_user_class}
    if issubclass(user_cls, nn.RNNBase):
        body["flatten_parameters"] = _flatten_parameters
    for mixin in mixins:
        if hasattr(mixin, "_fsdp_class_body"):
            body |= mixin._fsdp_class_body(user_cls)
    before = type("_Mixins", (*mixins, Unannounced), {})  # one: Opacus reads __bases__[1]
    return type(f"{prefix}{user_cls.__name__}", (*layout_base(user_cls), before, user_cls), body)


def new_of_user_class(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Make a module of the user's class, for code such as ``nn.Sequential``'s that calls ``type(self)(...)``."""
    return cls._fsdp_user_class(*args, **kwargs)


def copied_module(module: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a module whose units' copies are in ``memo``; ValueError if one is not.

    TypeError if the module has a function that would refer to the original in the copy.
    """
    cls = user_class(module).__name__
    for unit in module.__dict__.get("_fsdp_units", ()):
        if id(unit) not in memo:
            expected = f"all modules with parameters of unit {unit.unit.config.name} to be deep-copied"
            do = "deep-copy the module that was given to fully_shard, or one around it"
            raise unexpected(cls, expected, "this one alone", do)
    copied, state = object.__new__(type(module)), dict(module.__getstate__())
    for name, value in state.items():
        if hasattr(value, "_torchdynamo_orig_callable") and getattr(unwrap(value), "__self__", None) is module:
            value = state[name] = unwrap(value)  # the method of which torch.compile made it
        cells = getattr(getattr(value, "__func__", value), "__closure__", None) or ()
        if any(getattr(cell.cell_contents, "__self__", cell.cell_contents) is module for cell in cells):
            got = f"a {type(value).__name__}, which would still refer to it in a copy"
            expected, do = "no function that refers to the module", "put it there after deep-copying"
            raise unexpected(f"{cls}.{name}", expected, got, do, TypeError)
    memo[id(module)] = copied
    copied.__setstate__(deepcopy(state, memo))
    copied.__dict__.pop("_fsdp_calling", None)
    return copied


def _flatten_parameters(module: nn.RNNBase) -> None:
    """Move a recurrent module's parameters into one memory, but not in a graph, to which they are all-gathered."""
    if not torch.compiler.is_compiling():
        cast(Any, user_class(module)).flatten_parameters(module)


def _refuse_pickle(module: nn.Module, protocol: object) -> None:
    raise TypeError(
        f"{type(module).__name__}: a sharded module cannot be pickled or copied, because it refers to process "
        "groups; save state_dict(), for example by torch.distributed.checkpoint, and load it into another such model"
    )


def _reshard_units(module: ShardedModule, *_: object) -> None:
    for unit in module._fsdp_units:
        unit.reshard()


def _before_save(module: ShardedModule, *_: object) -> None:
    for unit in module._fsdp_units:
        if unit.can_reshard:
            unit.reshard()


def _before_load(module: ShardedModule, state: dict[str, Tensor], prefix: str, metadata: Any, *_: object) -> None:
    """Refuse what cannot be assigned before any of it is: an outer module's load would not see the failure."""
    _reshard_units(module)
    if metadata.get("assign_to_params_buffers"):
        for name, param in module._fsdp_params.items():
            given, sharded = state.get(prefix + name), param.sharded_param
            if isinstance(given, Tensor) and not isinstance(given, DTensor) and given.dim() == sharded.dim() == 0:
                # Torch's full state dicts leave tensors of scalars.
                given = state[prefix + name] = laid_out_like(sharded, given.detach())
            if given is not None:
                param.check_replacement(given)
