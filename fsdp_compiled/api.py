"""What users call: ``fully_shard`` and its relatives. It checks every argument before it changes anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import passes
from .arguments import (
    PlacementPlan,
    ShardPlacementFn,
    check_device,
    check_options,
    check_shared,
    check_smaller_group,
    check_whole_units_below,
    checked_modules,
    checked_reshard,
    is_managed,
    managed_parameters,
    modules_outside_units,
)
from .compiling import core_hash
from .lookup import new_unit_name, states_below, unit_state, units_of
from .mesh import DataParallelMeshDims, data_parallel_mesh
from .module import FSDPModule, make_fsdp_module
from .owner import own
from .param import FSDPParam
from .policy import MixedPrecisionPolicy, OffloadPolicy
from .state import FSDPState
from .unit import UnitStatus

ModuleOrModules = TypeVar("ModuleOrModules", bound="nn.Module | list[nn.Module]")


def fully_shard(
    module: ModuleOrModules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> ModuleOrModules:
    """Shard a module's parameters over the ranks of a mesh; the module becomes one unit.

    Call it on the parts of a model first and on the model last, as with ``torch.distributed.fsdp.fully_shard``.
    A unit's parameters are those below ``module`` that no unit has taken yet. Each becomes a DTensor of the same
    shape and dtype; the module, changed in place, gets the methods of :class:`FSDPModule`. Then train it as it
    is, or compile it as a whole: ``torch.compile(model, fullgraph=True)``.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: 1-D to shard, or 2-D with names to replicate over dimension 0 and shard over dimension 1. None
            shards over all ranks.
        reshard_after_forward: free unsharded parameters after forward and gather them again in backward
            (True), or keep them (False). None is False for the outermost unit and True for all others; without
            gradients, where no backward will come, it is True for all in uncompiled forwards. A number N keeps
            parameters sharded over N neighbouring ranks, over which backward gathers.
        shard_placement_fn: called with each original parameter; returns the ``Shard`` to use, None for
            ``Shard(0)``, or a ``ShardPlacementResult`` for another mesh too. Only dimension 0 may be uneven.
        mp_policy: dtypes of communication and compute.
        offload_policy: where shards, gradients and optimizer state live.
        ignored_params: parameters to leave alone: not sharded, not moved, not reduced.
        dp_mesh_dims: which dimensions of ``mesh`` are data parallel, where it has others, and parameters are
            DTensors on it. With replicate dimensions only, parameters are replicated and gradients averaged.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a container without forward, a module that is sharded already, a scalar or non-contiguous
            parameter, a mesh of the wrong shape or of a device this machine lacks, a shard dimension that a
            parameter does not have or that is uneven, or a list unit only part of which lies below ``module``. The
            model is left as it was.
        NotImplementedError: an option that does not exist yet.
    """
    modules = checked_modules(module)
    check_options(mp_policy, offload_policy, ignored_params, shard_placement_fn)
    mesh_info = data_parallel_mesh(mesh, dp_mesh_dims)
    reshard = checked_reshard(reshard_after_forward, mesh_info)
    found = managed_parameters(modules, ignored_params or set())
    check_device(mesh_info)
    plan = PlacementPlan(mesh_info, mp_policy, offload_policy, shard_placement_fn)
    placements = [plan.placement(name, param) for name, param, _ in found.own]
    for name, taken, _ in found.shared:
        check_shared(name, taken, plan.default)
    check_whole_units_below(modules)
    size = 0 if isinstance(reshard, bool | None) else reshard
    if size:
        for (name, param, _), placement in zip(found.own, placements, strict=True):
            check_smaller_group(name, param, placement, size)

    _move_to_device(modules, mesh_info.device, ignored_params or set())
    status = UnitStatus(new_unit_name(modules), reshard_after_forward=bool(reshard), post_forward_size=size)
    params = [
        FSDPParam(info, placement, status, name, param)
        for (name, param, info), placement in zip(found.own, placements, strict=True)
    ]
    state = FSDPState(modules, params, mp_policy, reshard is None, status, mesh_info.device)
    _take_over(modules, state)
    for _, taken, places in found.shared:
        _borrow(state, taken, places)
    _adopt_units_below(modules, state)
    passes.install(core_hash())
    return module


fully_shard.state = unit_state  # type: ignore[attr-defined]


def fully_shard_with_compiled_compute(
    module: nn.Module, *, compile_kwargs: Mapping[str, Any] | None = None, **fully_shard_kwargs: Any
) -> nn.Module:
    """Shard a module with eager hooks, and compile only its compute: regional compilation.

    Collectives stay outside the graphs. Modules of one class share one compiled graph, so that a model of many
    equal layers compiles in the time of one.

    Args:
        module: one module; call this on every layer, then ``fully_shard`` on the model.
        compile_kwargs: given to ``torch.compile``.
        fully_shard_kwargs: given to :func:`fully_shard`.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: ``module`` is not one module, or ``torch.compile`` does not take ``compile_kwargs``.
        Others: see :func:`fully_shard`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected one nn.Module, got {type(module).__name__}; call it on each module")
    compiled = torch.compile(module.forward, **(compile_kwargs or {}))
    fully_shard(module, **fully_shard_kwargs)
    module.forward = compiled  # type: ignore[method-assign]
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather and reshard as ``module(...)`` does.

    A module that was not given to ``fully_shard`` is left alone.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__}: expected a method {method_name!r}, found none")
    state = module._get_fsdp_state()

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state._pre_forward(module, args, kwargs)
        return state._post_forward(module, args, method(*args, **kwargs))

    module.__dict__[method_name] = call


def _move_to_device(modules: Sequence[nn.Module], device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Move what the unit manages, and the buffers beside it; meta tensors stay."""
    for _, module in modules_outside_units(modules):
        for name, param in module._parameters.items():
            if param is not None and param not in ignored and not is_managed(module, name):
                _move(param, device)
        for buffer in module._buffers.values():
            if buffer is not None:
                _move(buffer, device)


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device.type != "meta" and tensor.device != device:
        tensor.data = tensor.data.to(device)


def _take_over(modules: Sequence[nn.Module], state: FSDPState) -> None:
    _own(((place, param) for param in state.params for place in param.info.places()), state)
    for module in modules:
        make_fsdp_module(module, state)


def _borrow(state: FSDPState, param: FSDPParam, places: Sequence[tuple[nn.Module, str]]) -> None:
    """Share a parameter of another unit with modules of this one."""
    (lender,) = [unit for unit in units_of(param.info.module) if param in unit.params]
    state.borrow(lender, param, places)
    _own(((place, param) for place in places), state)


def _own(params: Iterable[tuple[tuple[nn.Module, str], FSDPParam]], state: FSDPState) -> None:
    """Make modules read parameters of ``state`` at these places, all of a module's at once."""
    owned: dict[nn.Module, dict[str, FSDPParam]] = {}
    for (module, name), param in params:
        owned.setdefault(module, {})[name] = param
    for module, by_name in owned.items():
        own(module, by_name, state)


def _adopt_units_below(modules: Sequence[nn.Module], state: FSDPState) -> None:
    """Give the units below their full names, now that there is an outer one."""
    names: dict[nn.Module, str] = {}
    for index, root in enumerate(modules):
        prefix = str(index) if len(modules) > 1 else ""
        for name, module in root.named_modules(prefix=prefix):
            names.setdefault(module, name)
    for below in states_below(modules):
        if below is not state:
            params = {param: f"{names[param.info.module]}.{param.info.name}" for param in below.params}
            below.adopt(state, names[below.modules[0]], params)
