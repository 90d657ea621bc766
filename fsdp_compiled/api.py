"""What users call: ``fully_shard`` and its relatives. It checks every argument before it changes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from . import passes
from .mesh import DataParallelMeshInfo, data_parallel_mesh
from .module import FSDPModule, make_fsdp_module
from .owner import ShardedModule, own
from .param import FSDPParam, ParamModuleInfo, ParamPlacement, UnitStatus
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .state import FSDPState, new_unit_name, states_below

ModuleOrModules = TypeVar("ModuleOrModules", bound="nn.Module | list[nn.Module]")
ShardPlacementFn = Callable[[nn.Parameter], Shard | None]


def fully_shard(
    module: ModuleOrModules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
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
            (True), or keep them (False). None is False for the outermost unit and True for all others.
        shard_placement_fn: called with each original parameter; returns the ``Shard`` to use, or None for
            ``Shard(0)``. Only dimension 0 may be uneven.
        mp_policy: dtypes of communication and compute.
        offload_policy: only the default, no offload, is implemented.
        ignored_params: parameters to leave alone: not sharded, not moved, not reduced.
        dp_mesh_dims: not implemented.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a container without forward, a module that is sharded already, a scalar or non-contiguous
            parameter, a mesh of the wrong shape or of a device this machine lacks, or a shard dimension that a
            parameter does not have or that is uneven. The model is left as it was.
        NotImplementedError: an option that does not exist yet.
    """
    modules = _checked_modules(module)
    _check_options(mp_policy, offload_policy, ignored_params, shard_placement_fn, dp_mesh_dims)
    mesh_info = data_parallel_mesh(mesh)
    reshard = _checked_reshard(reshard_after_forward, mesh_info)
    found = _managed_parameters(modules, ignored_params or set())
    plan = _PlacementPlan(mesh_info, mp_policy, shard_placement_fn)
    placements = [plan.placement(name, param) for name, param, _ in found]
    _check_device(mesh_info)

    _move_to_device(modules, mesh_info.device, ignored_params or set())
    status = UnitStatus(new_unit_name(modules), reshard_after_forward=bool(reshard))
    params = [
        FSDPParam(info, placement, status, name, param)
        for (name, param, info), placement in zip(found, placements, strict=True)
    ]
    state = FSDPState(modules, params, mp_policy, reshard, status, mesh_info.device)
    _take_over(modules, state)
    _adopt_units_below(modules, state)
    passes.install()
    return module


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
        TypeError: ``module`` is not one module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected one nn.Module, got {type(module).__name__}; call it on each module")
    fully_shard(module, **fully_shard_kwargs)
    module.forward = torch.compile(module.forward, **(compile_kwargs or {}))  # type: ignore[method-assign]
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


# ---- checks: nothing is changed before all have passed ----


def _checked_modules(module: Any) -> list[nn.Module]:
    given: list[nn.Module] = module if isinstance(module, list) else [module]
    if not given:
        raise ValueError("module: expected a module or a non-empty list of modules, got an empty list")
    for one in given:
        _check_module(one)
    below = {id(m) for one in given for m in list(one.modules())[1:]}
    return list({id(one): one for one in given if id(one) not in below}.values())


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected nn.Module or a list of them, got {type(module).__name__}")
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"{type(module).__name__}: expected a module that is not sharded yet, got one that fully_shard has "
            "already been applied to; apply it once to each module"
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and _lacks_forward(module):
        raise ValueError(
            f"{type(module).__name__}: expected a module with a forward, got a container without one, whose "
            "hooks would never run; apply fully_shard to each of its members"
        )


def _lacks_forward(module: nn.Module) -> bool:
    return type(module).forward in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def _check_options(
    mp_policy: object,
    offload_policy: object,
    ignored_params: object,
    shard_placement_fn: object,
    dp_mesh_dims: object,
) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy, got {mp_policy!r}")
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"offload_policy: expected an OffloadPolicy, got {offload_policy!r}")
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise NotImplementedError("offload_policy: CPUOffloadPolicy is not implemented yet")
    if dp_mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims is not implemented yet; pass a 1-D or 2-D mesh")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn: expected a function or None, got {shard_placement_fn!r}")
    if ignored_params is None:
        return
    if not isinstance(ignored_params, (set, frozenset)):
        raise TypeError(f"ignored_params: expected a set of parameters, got {type(ignored_params).__name__}")
    for param in ignored_params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"ignored_params: expected parameters, got a {type(param).__name__} among them")


def _checked_reshard(value: object, mesh_info: DataParallelMeshInfo) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise TypeError(
            f"reshard_after_forward: expected True, False, None or the size of a smaller group, got {value!r} of "
            f"{type(value).__name__}"
        )
    world = mesh_info.shard_world
    if value < 1 or world % value:
        raise ValueError(f"reshard_after_forward: expected a divisor of the shard world size {world}, got {value}")
    if value not in (1, world):
        raise NotImplementedError(
            f"reshard_after_forward={value}: resharding to a smaller group is not implemented yet; use True or False"
        )
    return value == world


def _check_device(mesh_info: DataParallelMeshInfo) -> None:
    device_type = mesh_info.mesh.device_type
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        raise ValueError(
            f"mesh: expected a mesh of a device that this machine has, got device type {device_type!r}; "
            "use init_device_mesh('cpu', ...) with gloo"
        )


FoundParameter = tuple[str, nn.Parameter, ParamModuleInfo]


def _managed_parameters(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[FoundParameter]:
    """Return (name, parameter, places) of every parameter below ``modules`` that no unit has taken yet."""
    places: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in _modules_outside_units(modules):
        for name, param in module._parameters.items():
            if param is not None and param not in ignored and not _is_managed(module, name):
                places.setdefault(param, []).append((f"{prefix}{name}", module, name))
    taken = _originals_taken_below(modules)
    found = []
    for param, ((full_name, module, name), *others) in places.items():
        _check_parameter(full_name, param, taken.get(id(param)))
        shared = tuple((m, n) for _, m, n in others)
        found.append((full_name, param, ParamModuleInfo(module, name, shared)))
    return found


def _modules_outside_units(modules: Sequence[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    """Yield (name prefix, module), skipping everything below another unit."""
    seen: set[int] = set()
    for index, root in enumerate(modules):
        stack = [(f"{index}." if len(modules) > 1 else "", root)]
        while stack:
            prefix, module = stack.pop()
            if id(module) in seen or isinstance(module, FSDPModule):
                continue
            seen.add(id(module))
            yield prefix, module
            stack += reversed([(f"{prefix}{name}.", child) for name, child in module.named_children()])


def _is_managed(module: nn.Module, name: str) -> bool:
    return isinstance(module, ShardedModule) and name in module._fsdp_params


def _originals_taken_below(modules: Sequence[nn.Module]) -> dict[int, str]:
    """Map the identity of each original parameter that a unit below took, and that still lives, to its name."""
    owners = [m for root in modules for m in root.modules() if isinstance(m, ShardedModule)]
    params = [param for owner in owners for param in owner._fsdp_params.values()]
    alive = ((param.original(), param.name) for param in params)
    return {id(original): name for original, name in alive if original is not None}


def _check_parameter(name: str, param: nn.Parameter, taken_as: str | None) -> None:
    if taken_as is not None:
        raise NotImplementedError(
            f"{name}: is the same parameter as {taken_as} of another unit; parameters tied across units are not "
            "implemented yet; give both modules to one call: fully_shard([a, b])"
        )
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"{name}: is already a DTensor with placements {param.placements}; sharding on top of tensor "
            "parallelism is not implemented yet"
        )
    if param.dim() == 0:
        raise ValueError(
            f"{name}: expected at least 1 dimension, got a scalar; make it a 1-D parameter of one element"
        )
    if not param.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous parameter, got shape {tuple(param.shape)} with strides "
            f"{param.stride()}; replace it by nn.Parameter(param.contiguous())"
        )


@dataclass(frozen=True)
class _PlacementPlan:
    """Decides each parameter's shard dimension."""

    mesh_info: DataParallelMeshInfo
    mp_policy: MixedPrecisionPolicy
    choose: ShardPlacementFn | None

    def placement(self, name: str, param: nn.Parameter) -> ParamPlacement:
        """Return how to shard ``param``.

        Raises:
            TypeError: ``choose`` returned something other than a Shard or None.
            ValueError: the parameter has no such dimension, or it is uneven and not dimension 0.
        """
        chosen = None if self.choose is None else self.choose(param)
        if chosen is None:
            return ParamPlacement(self.mesh_info, 0, self.mp_policy)
        if type(chosen) is not Shard:
            raise TypeError(f"{name}: expected shard_placement_fn to return a Shard or None, got {chosen!r}")
        return ParamPlacement(self.mesh_info, self._checked_dim(name, param, chosen.dim), self.mp_policy)

    def _checked_dim(self, name: str, param: nn.Parameter, dim: int) -> int:
        if not -param.dim() <= dim < param.dim():
            raise ValueError(
                f"{name}: expected a shard dimension of a {param.dim()}-D parameter, got Shard({dim}); use "
                f"Shard(0) to Shard({param.dim() - 1})"
            )
        dim %= param.dim()
        world = self.mesh_info.shard_world
        if dim > 0 and param.shape[dim] % world:
            raise ValueError(
                f"{name}: dim {dim} ({param.shape[dim]}) must be divisible by {world} shards for Shard({dim}); "
                "use Shard(0) or pad the parameter"
            )
        return dim


# ---- changes ----


def _move_to_device(modules: Sequence[nn.Module], device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Move what the unit manages, and the buffers beside it; meta tensors stay."""
    for _, module in _modules_outside_units(modules):
        for name, param in module._parameters.items():
            if param is not None and param not in ignored and not _is_managed(module, name):
                _move(param, device)
        for buffer in module._buffers.values():
            if buffer is not None:
                _move(buffer, device)


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device.type != "meta" and tensor.device != device:
        tensor.data = tensor.data.to(device)


def _take_over(modules: Sequence[nn.Module], state: FSDPState) -> None:
    owned: dict[nn.Module, dict[str, FSDPParam]] = {}
    for param in state.params:
        for module, name in param.info.places():
            owned.setdefault(module, {})[name] = param
    for module, params in owned.items():
        own(module, params, state)
    for module in modules:
        make_fsdp_module(module, state)


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
            below.adopt(names[below.modules[0]], params)
