"""Says what each unit of a sharded model all-gathers, keeps and reduces, and why."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from torch import nn

from ..expect import expect, unexpected
from ..hooks.state import FSDPState, states_below
from ..param.param import FSDPParam
from ..passes.reshard import kept_by
from ..passes.schedule_policy import DEFAULT, SchedulePolicy
from ..sharding.spec import CommSpec
from ..tracing.dynamo import module_inside
from ..tracing.sharded_module import is_managed, user_class
from .records import UnitExplanation
from .render import figures
from .report import Explanation

NOTABLE_PADDING = 0.01  # of a unit's size


def explain(model: nn.Module, schedule: SchedulePolicy | None = None) -> Explanation:
    """Say for each unit of a sharded model what is all-gathered, kept and reduced, and why.

    Nothing is run, compiled or communicated; parameters may still be on the meta device.

    Args:
        model: with at least one module given to ``fully_shard``; it may be compiled.
        schedule: that the model will be compiled with; None for the default.

    Raises:
        TypeError: ``model`` is no module, or ``schedule`` no SchedulePolicy.
        ValueError: no unit lies below ``model``.
    """
    expect("model", model, nn.Module, "an nn.Module given to fully_shard")
    expect("schedule", schedule, SchedulePolicy | None, "a SchedulePolicy or None")
    model = module_inside(model)
    class_name = user_class(model).__name__
    states = states_below([model])
    if not states:
        do = "call fully_shard on its layers and then on the model"
        raise unexpected(class_name, "a model with at least one unit", "none", do)
    schedule = schedule or DEFAULT
    specs: dict[Hashable, CommSpec] = {param: param.spec for state in states for param in state.params}
    kept = kept_by(schedule, specs, schedule.cluster_for(states[0].device))
    names = {module: name or class_name for name, module in model.named_modules()}
    outside = tuple(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, param in module._parameters.items()
        if param is not None and not is_managed(module, name)
    )
    return Explanation(class_name, tuple(_unit(state, names, kept) for state in states), outside, schedule)


def _unit(state: FSDPState, names: Mapping[nn.Module, str], all_kept: set[Hashable]) -> UnitExplanation:
    params = state.params
    frozen = [param for param in params if not param.sharded_param.requires_grad]
    kept = [param for param in params if param in all_kept]
    name = next(names[module] for module in state.modules if module in names)
    return UnitExplanation(
        name=name,
        params=tuple(param.name for param in params),
        frozen=tuple(param.name for param in frozen),
        kept=tuple(param.name for param in kept),
        total_bytes=sum(param.storage.layout.numel * param.leaf.dtype.itemsize for param in params),
        rank_bytes=sum(param.storage.layout.shard_numel * param.leaf.dtype.itemsize for param in params),
        all_gather_bytes=sum(param.spec.all_gather_bytes for param in params),
        all_gather_dtypes=tuple(dict.fromkeys(param.spec.all_gather.dtype for param in params)),
        reduce_dtypes=tuple(dict.fromkeys(param.spec.reduction.dtype for param in params if param not in frozen)),
        shard_world=params[0].placement.mesh_info.shard_world if params else 1,
        replicate_world=params[0].placement.mesh_info.replicas.world if params else 1,
        reshards=state.unit.config.reshard_after_forward,
        why=_why(state),
        notes=tuple(_notes(state, name, frozen, kept)) if params else (),
    )


def _why(state: FSDPState) -> str:
    if not state.params:
        return "no parameters of its own: other units hold all of them"
    config = state.unit.config
    if not config.reshards_by_default:
        return f"reshard_after_forward={config.post_forward_size or config.reshard_after_forward}"
    if state.is_root:
        return "outermost unit: kept by default, as backward begins with it; freed where no gradients are recorded"
    return "inside another unit: freed by default, so that only units in use take memory"


def _notes(state: FSDPState, unit: str, frozen: Sequence[FSDPParam], kept: Sequence[FSDPParam]) -> Iterator[str]:
    config, params = state.unit.config, state.params
    info = params[0].placement.mesh_info
    if len(state.modules) > 1:
        yield f"list of {len(state.modules)} modules, all-gathered before the first of them runs"
    if len(frozen) == len(params):
        yield "no gradient: no parameter requires grad: all-gathered, also to pass gradients on, but never reduced"
    elif frozen:
        yield f"no gradient for {_within(frozen, unit)}: all-gathered, never reduced"
    if len(state.groups) > 1:
        yield f"different dtypes, meshes or sharing: {len(state.groups)} all-gathers in an uncompiled forward"
    for other in dict.fromkeys(param.placement.mesh_info for param in params if param.placement.mesh_info != info):
        there = [param for param in params if param.placement.mesh_info == other]
        yield f"on another mesh, sharded over {other.shard_world} ranks: {_within(there, unit)}"
    if info.shard_world == 1:
        yield "sharded over one rank: its all-gather sends nothing"
    if info.replicas.world > 1 and len(frozen) < len(params):
        yield f"gradients are reduced over {info.shard_world} shards, then over {info.replicas.world} replicas"
    if any(param.spec.post_forward.world > 1 for param in params):
        yield f"kept from forward sharded over {config.post_forward_size} ranks, where backward all-gathers it"
    if shared := [param for param in params if len(param.users) > 1]:
        yield f"{_within(shared, unit)} shared with other units: all-gathered for each of them"
    if extended := [param for param in params if param.extension is not None]:
        yield f"all-gather extension of {_within(extended, unit)}: sends what fsdp_pre_all_gather returns"
    if parallel := [param for param in params if param.outer is not None]:
        yield f"{_within(parallel, unit)} also sharded by other parallelism: bytes are those of this rank's part"
    if any(param.placement.offload is not None for param in params):
        yield "CPUOffloadPolicy: shards and gradients live on the CPU"
    if uncast := [param for param in params if param.placement.mp_policy.param_dtype != state.mp_policy.param_dtype]:
        yield f"param_dtype_override_fn: not cast to {state.mp_policy.param_dtype}: {_within(uncast, unit)}"
    if config.keep_unsharded_storage:
        yield "set_keep_unsharded_storage: a reshard leaves the memory of uncompiled units allocated"
    if config.divide_factor is not None:
        yield f"set_gradient_divide_factor: sums of gradients are divided by {config.divide_factor:g}"
    if config.all_gather_comm or config.reduce_scatter_comm:
        yield "set_custom_all_gather or set_custom_reduce_scatter: the user's own communication, an opaque node"
    if config.reduce_hook:
        yield "set_all_reduce_hook: the user's function sees reduced gradients"
    if config.reduce_grads and not config.all_reduce_grads and info.replicas.world > 1:
        yield "set_requires_all_reduce(False): gradients stay reduced over the shards only, until it is on again"
    if not config.reduce_grads:
        yield "set_requires_gradient_sync(False): gradients stay on their rank, unsharded, until sync is on again"
    if not config.reshard_after_backward:
        yield "set_reshard_after_backward(False): stays unsharded after an uncompiled backward"
    layouts = [param.storage.layout for param in params]
    padding = 1 - sum(each.numel for each in layouts) / sum(each.shard_numel * each.world for each in layouts)
    if padding >= NOTABLE_PADDING:
        yield f"{padding:.0%} of each all-gather is padding: dimensions do not divide by {info.shard_world} ranks"
    if any(param.leaf.device.type == "meta" for param in params):
        yield "on the meta device: call to_empty and initialise the parameters before running the model"
    if kept:
        size = figures.size(sum(param.spec.all_gather_bytes for param in kept))
        yield f"in one full graph, keep_unsharded_bytes keeps {_within(kept, unit)} ({size})"


def _within(params: Sequence[FSDPParam], unit: str) -> str:
    return figures.listed("parameter", [param.name.removeprefix(f"{unit}.") for param in params])
