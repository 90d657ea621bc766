"""What users call: ``fully_shard`` and its relatives, ``compile`` and ``options``.

Every argument is checked before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import collectives, passes, sharding
from .agreement.peers import is_failure
from .expect import expect, shown, unexpected
from .hooks.step import TrainingState
from .init.arguments import check_device, check_options, checked_modules, checked_reshard
from .init.parameters import ShardPlacementFn, checked_placements, managed_parameters
from .init.shard import shard
from .installed import install
from .module import FSDPModule, unit_state
from .param.placement import ParamPlacement
from .passes import Pass, mode_options, region_options
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, SchedulePolicy
from .regions.choose import set_regions
from .sharding.dtensor import data_parallel_mesh
from .sharding.mesh import DataParallelMeshDims
from .torch_fsdp.registry import check_composable, own_record
from .tracing.dynamo import renew_compiled

ModuleOrModules = TypeVar("ModuleOrModules", bound="nn.Module | list[nn.Module]")


def fully_shard(
    module: ModuleOrModules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> ModuleOrModules:
    """Shard a module's parameters over the ranks of a mesh; the module becomes one unit.

    Call it on the parts of a model first and on the model last, as with ``torch.distributed.fsdp.fully_shard``.
    A unit's parameters are those below ``module`` that no unit has taken yet. Each becomes a DTensor of the same
    shape and dtype; the module, changed in place, gets the methods of :class:`FSDPModule`. Then train it as it
    is, or compile it as one graph: ``torch.compile(model, fullgraph=True)``.

    Args:
        module: a module, or a list of modules that form one unit. A compiled module stands for the module inside.
        mesh: 1-D to shard, or 2-D with names to replicate over dimension 0 and shard over dimension 1. None
            shards over all ranks.
        reshard_after_forward: free unsharded parameters after forward and all-gather them again in backward
            (True), or keep them (False). None is False for the outermost unit and True for all others. With None, an
            uncompiled forward without gradients frees all, and a graph keeps up to
            ``SchedulePolicy.keep_unsharded_bytes``. A number N keeps parameters sharded over N neighbouring ranks,
            over which backward all-gathers.
        shard_placement_fn: called with each original parameter; returns the ``Shard`` to use, None for
            ``Shard(0)``, or a ``ShardPlacementResult`` for another mesh too. Only dimension 0 may be uneven.
        mp_policy: dtypes of communication and compute. PyTorch's own policies are accepted, here and below.
        offload_policy: where shards, gradients and optimizer state live. None offloads nothing, as in FSDP2.
        ignored_params: parameters to leave alone: not sharded, not moved, not reduced.
        dp_mesh_dims: which dimensions of ``mesh`` are data parallel, where it has others, and parameters are
            DTensors on it. With replicate dimensions only, parameters are replicated and gradients averaged.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a container, a scripted module, one that is distributed already, itself or by a unit around it, a
            sparse or non-contiguous parameter, a scalar that is a DTensor or on a full mesh, a mesh of the wrong
            shape or device, a shard dimension that is missing or uneven, or a list unit only partly below ``module``.
            The model is left as it was.
        NotImplementedError: an option that does not exist yet, or PEFT's LoRA of ``nn.MultiheadAttention``.
    """
    modules = checked_modules(module)
    mp_policy, offload_policy = own_record(mp_policy), own_record(offload_policy)
    check_options(mp_policy, offload_policy, ignored_params, shard_placement_fn)
    check_composable(modules)
    mesh_info = data_parallel_mesh(mesh, own_record(dp_mesh_dims))
    reshard = checked_reshard(reshard_after_forward, mesh_info)
    found = managed_parameters(modules, ignored_params or set())
    check_device(mesh_info)
    offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
    default = ParamPlacement(mesh_info, 0, mp_policy, mesh_info.device, offload)
    placements = checked_placements(found, default, shard_placement_fn, reshard)
    shard(modules, found, placements, default, reshard)
    _follow(module)
    return module


fully_shard.state = unit_state  # type: ignore[attr-defined]


def _follow(sharded: nn.Module | list[nn.Module]) -> None:
    """Install what the library puts into torch, and let compiled modules call their module's new class."""
    install(core_hash())
    passes.observe(_write_artifacts)
    for module in sharded if isinstance(sharded, list) else [sharded]:
        renew_compiled(module)


def _write_artifacts(*scheduled: Any) -> None:
    from .inspect.report import write_artifacts  # only here: nothing is drawn unless torch writes a trace

    write_artifacts(*scheduled)


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
    expect("module", module, nn.Module, "one nn.Module", "call it on each module")
    expect("compile_kwargs", compile_kwargs, Mapping | None, "a mapping of torch.compile's arguments")
    compiled = torch.compile(module.forward, **(compile_kwargs or {}))
    fully_shard(module, **fully_shard_kwargs)
    module.forward = compiled  # type: ignore[method-assign]
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` all-gather and reshard as ``module(...)`` does.

    A module that was not given to ``fully_shard`` is left alone.

    Raises:
        TypeError: not a module, or not a name.
        ValueError: the module has no such method.
    """
    expect("module", module, nn.Module, "an nn.Module")
    expect("method_name", method_name, str, "the name of a method")
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__}: expected a method {method_name!r}, found none")
    module.__dict__[method_name] = partial(_call_with_hooks, module, method)  # deepcopy would not copy a closure


def _call_with_hooks(module: FSDPModule, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    state = unit_state(module)
    try:
        args, kwargs = state.pre_forward.hook(module, args, kwargs)  # type: ignore[arg-type]
        with nullcontext() if torch.compiler.is_compiling() else state.unit.method():
            output = method(*args, **kwargs)
        return state.post_forward.hook(module, args, output)  # type: ignore[arg-type]
    except BaseException as error:
        is_in_forward = state.outermost.unit.training_state is TrainingState.FORWARD
        if is_failure(error) and (state.is_root or not is_in_forward):
            state.reset_iteration(drop_accumulated=False)
        raise


def options(schedule: SchedulePolicy | None = None, passes: Sequence[Pass] = ()) -> dict[str, Any]:
    """Return options for ``torch.compile(model, options=...)`` by which one compile uses ``schedule``.

    Passes that the user has in Inductor's custom-pass slots still run, after ours. Call it again after changing
    those slots.

    Args:
        schedule: None for the default policy, which plain ``torch.compile`` uses too.
        passes: your own graph passes, see :func:`compile`.

    Raises:
        TypeError: ``schedule`` is no SchedulePolicy, or ``passes`` no list of functions.
        ValueError: a pass names another one, to stand next to, that there is not.
    """
    return _options(schedule, more=passes)


def _options(
    schedule: SchedulePolicy | None, given: Mapping[str, Any] | None = None, more: Sequence[Pass] = ()
) -> dict[str, Any]:
    do = 'use for example SchedulePolicy(bucket="unit")'
    expect("schedule", schedule, SchedulePolicy | None, "a SchedulePolicy or None", do)
    return passes.options(schedule or SchedulePolicy(), core_hash(), given, more)


def compile(
    model: nn.Module | Callable[..., Any],
    *,
    schedule: SchedulePolicy | None = None,
    regions: Literal["off", "auto"] | Sequence[nn.Module] = "auto",
    passes: Sequence[Pass] = (),
    **torch_compile_kwargs: Any,
) -> Any:
    """Compile a sharded model as ``torch.compile`` does, with a schedule of its own.

    Args:
        model: a module given to ``fully_shard``, or a function that calls one.
        schedule: None for the default policy.
        regions: which blocks are compiled once and called several times: "auto", as in plain ``torch.compile`` from
            torch 2.13 on, for the units that occur at least four times with equal class and parameter shapes, "off"
            for none, or a list of modules given to ``fully_shard``. The graph's collectives stay outside them. The
            choice holds until the next call with this model. A block that torch cannot make a region of is compiled
            as a part of the graph: one of a list with a warning, one of "auto" with a line in the log
            ``fsdp_compiled``.
        passes: your own graph passes: each a function of a ``torch.fx.Graph`` that changes it in place, a frozen
            dataclass for its fields to enter the compile-cache keys. It runs after ``Schedule``, or where a class
            attribute ``before`` or ``after`` names another pass; the graph's rules are checked after it.
        torch_compile_kwargs: given to ``torch.compile``; ``options`` and ``mode`` are kept, and passes of the user's
            among the options run after ours.

    Returns:
        What ``torch.compile`` returns.

    Raises:
        TypeError: ``model`` cannot be called, ``schedule`` is no SchedulePolicy, ``regions`` something else,
            ``options`` no mapping, or ``passes`` no list of functions.
        ValueError: another backend than Inductor, which alone runs the passes, or both ``mode`` and ``options``;
            regions of a function, or modules that are no units of ``model``, or lie inside each other; a pass that
            names another one, to stand next to, that there is not.
        NotImplementedError: a list of regions, and a pass of the user's in Inductor's option
            ``_pre_fusion_custom_pass``.
    """
    expect("model", model, Callable, "a module or a function that calls one")
    backend = torch_compile_kwargs.get("backend", "inductor")
    if backend != "inductor":
        raise unexpected("backend", "'inductor'", repr(backend), "only Inductor runs the graph passes")
    mode, given = torch_compile_kwargs.pop("mode", None), torch_compile_kwargs.pop("options", None) or {}
    expect("options", given, Mapping, "a mapping of Inductor's options or None")
    if mode is not None and given:
        raise unexpected("mode", "None beside options", repr(mode), "put what the mode sets into options")
    chosen = {**mode_options(mode), **given, **_options(schedule, given, passes)}
    is_list = regions not in ("off", "auto")
    if is_list:
        region_options(given)
    if isinstance(model, nn.Module):
        set_regions(model, regions)
    elif is_list:
        do = "compile the model with regions first"
        raise unexpected("regions", "'auto' or 'off' for a function", shown(regions), do)
    return torch.compile(model, options=chosen, **torch_compile_kwargs)


def core_hash() -> str:
    """Return a hash of what the operators in a graph compute, for the compile-cache keys."""
    return "".join(passes.source_hash(Path(str(folder.__file__)).parent) for folder in (collectives, sharding))
