"""Says what each unit of a sharded model all-gathers, keeps and reduces, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..expect import expect
from ..hooks.state import FSDPState, states_of
from ..param.param import FSDPParam
from ..passes.reshard import kept_by
from ..passes.schedule_policy import DEFAULT, SchedulePolicy
from ..sharding.mesh import DataParallelMeshInfo, ScalarMeshInfo
from ..sharding.spec import CommSpec, word
from ..tracing.dynamo import module_inside
from ..tracing.sharded_module import is_managed, user_class
from .render import figures
from .render.text import joined, space_beside, table, wrapped

NOTABLE_PADDING = 0.01  # of a unit's size


@dataclass(frozen=True)
class UnitExplanation:
    """One unit, that is one ``fully_shard`` call.

    Args:
        name: path of its first module below the explained model; the class name for the model itself.
        params: full names of its parameters.
        frozen: of those, the ones that do not require grad: all-gathered, never reduced.
        kept: of those, the ones that ``keep_unsharded_bytes`` keeps from forward to backward in one full graph.
            Among parameters of equal size that do not all fit, the graph may choose others.
        total_bytes: of the unsharded parameters, in their original dtypes.
        rank_bytes: of the shards on one rank, in their original dtypes; equal on every rank, padding included.
        all_gather_bytes: of the all-gather outputs of one forward, padding included.
        all_gather_dtypes: dtypes of the all-gathers; an uncompiled forward launches one for each.
        reduce_dtypes: dtypes of the reductions; empty if nothing requires grad.
        shard_world: ranks over which each parameter is sharded.
        replicate_world: ranks that hold the same shard.
        reshards: whether forward frees the unsharded parameters, so that backward all-gathers them again.
        why: the reason for ``reshards``.
        notes: whatever else is special about the unit, each a sentence.
    """

    name: str
    params: tuple[str, ...]
    frozen: tuple[str, ...]
    kept: tuple[str, ...]
    total_bytes: int
    rank_bytes: int
    all_gather_bytes: int
    all_gather_dtypes: tuple[torch.dtype, ...]
    reduce_dtypes: tuple[torch.dtype, ...]
    shard_world: int
    replicate_world: int
    reshards: bool
    why: str
    notes: tuple[str, ...]

    @property
    def after_forward(self) -> str:
        """What happens to the unsharded parameters, in two or three words."""
        if not self.params:
            return "nothing to free"
        return "resharded" if self.reshards else "kept for backward"


@dataclass(frozen=True)
class Explanation:
    """The units of a model. ``print`` shows a table with the reasons below it.

    Args:
        model: the class name.
        units: the outermost first.
        outside: names of parameters that belong to no unit; every rank holds them unsharded.
        schedule: of compiled graphs.
    """

    model: str
    units: tuple[UnitExplanation, ...]
    outside: tuple[str, ...]
    schedule: SchedulePolicy

    @property
    def total_bytes(self) -> int:
        """Of all units' unsharded parameters."""
        return sum(unit.total_bytes for unit in self.units)

    @property
    def rank_bytes(self) -> int:
        """Of all units' shards on one rank."""
        return sum(unit.rank_bytes for unit in self.units)

    def __str__(self) -> str:
        schedule = self.schedule
        params = figures.counted(sum(len(unit.params) for unit in self.units), "parameter")
        size, per_rank = figures.size(self.total_bytes), figures.size(self.rank_bytes)
        count = figures.counted(len(self.units), "unit")
        head = f"{self.model}: {count}, {params} of {size}, of which each rank holds {per_rank}"
        decisions = figures.in_line(figures.schedule(schedule))
        graph = f"one full graph is scheduled with {decisions}: {_buckets(schedule.bucket)}"
        return joined(wrapped(head), _units(self.units), _reasons(self), wrapped(graph))


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
    states = states_of(model)
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
        shard_world=_mesh_info(params).shard_mesh_size if params else 1,
        replicate_world=_mesh_info(params).replicas.world if params else 1,
        reshards=state.unit.config.reshard_after_forward,
        why=_why(state),
        notes=tuple(_notes(state, name, frozen, kept)) if params else (),
    )


def _mesh_info(params: Sequence[FSDPParam]) -> DataParallelMeshInfo:
    """Return the mesh of a unit's first parameter that is no scalar, if there is one."""
    infos = [param.placement.mesh_info for param in params]
    return next((info for info in infos if not isinstance(info, ScalarMeshInfo)), infos[0])


def _where(other: DataParallelMeshInfo) -> str:
    """Say how parameters on another mesh than their unit's are sharded."""
    if isinstance(other, ScalarMeshInfo):
        return "scalar, on every rank"
    return f"on another mesh, sharded over {other.shard_mesh_size} ranks"


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
    info = _mesh_info(params)
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
        yield f"{_where(other)}: {_within(there, unit)}"
    if info.shard_mesh_size == 1:
        yield "sharded over one rank: its all-gather sends nothing"
    if info.replicas.world > 1 and len(frozen) < len(params):
        yield f"gradients are reduced over {info.shard_mesh_size} shards, then over {info.replicas.world} replicas"
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
    if uncast := [param for param in params if param.placement.mp_policy.param_dtype != state._mp_policy.param_dtype]:
        yield f"param_dtype_override_fn: not cast to {state._mp_policy.param_dtype}: {_within(uncast, unit)}"
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
    if state.unit.reduces_late:
        yield "set_requires_gradient_sync(False) after forward: graphs leave reductions to the end of backward"
    if not config.reshard_after_backward:
        yield "set_reshard_after_backward(False): stays unsharded after backward, compiled if it does after forward"
    layouts = [param.storage.layout for param in params]
    padded = sum(each.padded_numel for each in layouts)
    padding = padded - sum(each.numel for each in layouts)
    if padding > NOTABLE_PADDING * padded:
        share, ranks = f"{padding / padded:.0%}", info.shard_mesh_size
        yield f"{share} of each all-gather is padding: dimensions do not divide by {ranks} ranks"
    if any(param.leaf.device.type == "meta" for param in params):
        yield "on the meta device: call to_empty and initialise the parameters before running the model"
    if kept:
        size = figures.size(sum(param.spec.all_gather_bytes for param in kept))
        yield f"in one full graph, keep_unsharded_bytes keeps {_within(kept, unit)} ({size})"


def _within(params: Sequence[FSDPParam], unit: str) -> str:
    return figures.listed("parameter", [param.name.removeprefix(f"{unit}.") for param in params])


def _units(units: Sequence[UnitExplanation]) -> list[str]:
    """Return a table; units that differ only in their names share a line."""
    alike = defaultdict[tuple[tuple[str, str], ...], list[str]](list)
    for unit in units:
        alike[tuple(_cells(unit).items())].append(unit.name)
    width = space_beside([dict(cells) for cells in alike])
    items = []
    for cells, names in alike.items():
        count = f" (each of {len(names)})" if len(names) > 1 else ""
        items.append({"unit": figures.abbreviate(names, width - len(count)) + count, **dict(cells)})
    return table(items)


def _cells(unit: UnitExplanation) -> dict[str, str]:
    ranks = str(unit.shard_world) if unit.replicate_world == 1 else f"{unit.shard_world} x {unit.replicate_world}"
    return {
        "params": str(len(unit.params)),
        "size": figures.size(unit.total_bytes),
        "per rank": figures.size(unit.rank_bytes),
        "ranks": ranks if unit.params else "-",
        "all-gathers": figures.size(unit.all_gather_bytes),
        "in": ", ".join(map(word, unit.all_gather_dtypes)) or "-",
        "reduces in": ", ".join(map(word, unit.reduce_dtypes)) or "-",
        "after forward": unit.after_forward,
    }


def _reasons(explanation: Explanation) -> Iterator[str]:
    said = defaultdict[str, list[str]](list)
    for unit in explanation.units:
        for text in (unit.why, *unit.notes):
            said[text].append(unit.name)
    for text, names in said.items():
        who = "every unit" if len(names) == len(explanation.units) > 1 else figures.abbreviate(names)
        yield from wrapped(f"{who}: {text}")
    if explanation.outside:
        who = figures.listed("parameter", explanation.outside)
        why = "given as ignored_params, or fully_shard was not called on a module above"
        yield from wrapped(f"in no unit: {who}: unsharded on every rank, gradients not averaged; {why}")


def _buckets(bucket: str | int) -> str:
    words = {
        "auto": "buckets may span units, and their sizes follow from estimated times",
        "unit": "one bucket for each unit and dtype",
        "none": "every parameter is all-gathered and reduced alone",
    }
    return words[bucket] if isinstance(bucket, str) else f"buckets may span units, up to {figures.size(bucket)} each"
