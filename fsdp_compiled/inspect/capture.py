"""Compiles a model once to look at its graphs. It must not know how a capture is drawn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from .. import passes
from ..api import core_hash
from ..hooks.casts import tensors_in
from ..hooks.context import states_below
from ..hooks.state import FSDPState
from ..param.properties import with_code_of_its_own
from ..passes import inductor
from ..passes.graph.liveness import cluster_of
from ..policy import SchedulePolicy
from .reading import Scheduled, collectives
from .records import CapturedGraph, GraphKind
from .report import Capture


def capture(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    schedule: SchedulePolicy | None = None,
    **kwargs: Any,
) -> Capture:
    """Compile ``model`` as ``torch.compile`` would, run it once, and return the graphs and what they cost.

    Compile caches are not read, so that the passes run. Gradients and the random state are as before
    afterwards; buffers that forward changes stay changed. Every rank must call it, with inputs of its own.

    Args:
        model: a sharded module; its outermost unit, so that all collectives are in its graphs.
        args: of its forward.
        loss: from the output to a scalar; None sums all floating-point tensors of the output. Under ``no_grad``
            there is no backward.
        schedule: None for the default policy.
        kwargs: of its forward.

    Raises:
        TypeError: ``model`` is no module, or ``schedule`` no SchedulePolicy.
        ValueError: no unit lies in ``model``.
    """
    states = _checked_states(model)
    policy = schedule or SchedulePolicy()
    if not isinstance(policy, SchedulePolicy):
        raise TypeError(f"schedule: expected a SchedulePolicy or None, got {type(schedule).__name__}")
    recorder = _Recorder(policy)
    before = dict(counters["graph_break"])
    with _gradients_put_back(model), torch.random.fork_rng():
        output = torch.compile(_entry(model), backend=recorder)(*args, **kwargs)
        total = loss(output) if loss is not None else _sum(output)
        if total is not None and total.requires_grad:
            total.backward()
    return Capture(
        model=getattr(type(model), "_fsdp_user_class", type(model)).__name__,
        parameters=sum(param.numel() for param in model.parameters()),
        world=max((_world(state) for state in states), default=1),
        torch_version=torch.__version__,
        cluster=policy.cluster or recorder.cluster(states),
        schedule=policy,
        graph_breaks=tuple(why for why, count in counters["graph_break"].items() if count > before.get(why, 0)),
        graphs=tuple(recorder.graphs),
    )


def _checked_states(model: nn.Module) -> list[FSDPState]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}; give the module, not its result")
    states = states_below([model])
    if not states:
        raise ValueError(f"{type(model).__name__}: expected a sharded model, found no unit; call fully_shard first")
    return states


def _entry(model: nn.Module) -> Callable[..., Any]:
    """Return a call of ``model`` that leaves nothing of this capture where Dynamo would find it for another."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return with_code_of_its_own(call)


def _world(state: FSDPState) -> int:
    infos = [param.placement.mesh_info for param in state.params]
    return max((info.shard_world * info.replicate_world for info in infos), default=1)


def _sum(output: Any) -> Tensor | None:
    terms = [tensor.sum() for tensor in tensors_in(output) if tensor.is_floating_point()]
    return torch.stack([term.float() for term in terms]).sum() if terms else None


@contextmanager
def _gradients_put_back(model: nn.Module) -> Iterator[None]:
    params = list(model.parameters())
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


@dataclass(frozen=True)
class _Observe:
    """A pass that changes nothing and hands on a copy of the graph."""

    take: Callable[[fx.Graph], None] = field(repr=False)

    def __call__(self, graph: fx.Graph) -> None:
        self.take(copy.deepcopy(graph))


@dataclass
class _Recorder:
    """A backend: Inductor with the passes of one policy, keeping every graph."""

    policy: SchedulePolicy
    graphs: list[CapturedGraph] = field(default_factory=list)
    _scheduled: fx.Graph | None = None

    def __call__(self, module: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        runs = passes.slots(self.policy, core_hash())
        observed = inductor.Pipeline((*passes.post_grad(self.policy), _Observe(self._take)), core_hash())
        runs["post_grad_custom_pre_pass"] = observed
        patches = {slot: inductor.beside_users_passes(slot, run) for slot, run in runs.items()}
        patches["force_disable_caches"] = True  # on a hit no pass would run
        return compile_fx(module, inputs, inner_compile=self._inner, config_patches=patches)

    def _take(self, graph: fx.Graph) -> None:
        self._scheduled = graph

    def _inner(self, module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        before = fx.GraphModule(module, copy.deepcopy(module.graph))
        self._scheduled = None
        compiled = compile_fx_inner(module, inputs, **kwargs)
        after = fx.GraphModule(module, copy.deepcopy(module.graph))
        kind: GraphKind = "inference" if kwargs.get("is_inference") else "forward"
        kind = "backward" if kwargs.get("is_backward") else kind
        code = getattr(compiled, "source_code", "") or ""
        self.graphs.append(self._record(kind, before, after, self._scheduled or after.graph, code))
        return compiled

    def _record(
        self, kind: GraphKind, before: fx.GraphModule, after: fx.GraphModule, scheduled: fx.Graph, code: str
    ) -> CapturedGraph:
        read = Scheduled(scheduled, cluster_of(scheduled, self.policy.cluster), self.policy)
        return CapturedGraph(
            kind=kind,
            module=after,
            before=before,
            collectives=collectives(read, after.graph),
            compute=read.spans(),
            memory=read.memory(),
            peak_unsharded_bytes=max(read.in_flight),
            bound_bytes=read.bound_bytes,
            kept_bytes=read.kept_bytes,
            code=code,
        )

    def cluster(self, states: list[FSDPState]) -> passes.Cluster:
        """Return the cluster that times were estimated for."""
        return passes.cost.detect(states[0].device)
