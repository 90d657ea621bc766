"""Compiles a model once and records its graphs. It must not know how a capture is drawn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, compile_fx_inner
from torch._inductor.virtualized import V
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as checkpoint_wrapper

from ..api import options
from ..expect import expect, shown, unexpected
from ..hooks.forward import tensors_in
from ..hooks.state import FSDPState, states_of
from ..passes import Pass, beside_users_passes, slots
from ..passes.inductor import name_of
from ..policy import SchedulePolicy
from ..regions.block import without_failing_regions
from ..regions.choose import set_default_regions
from ..sharding.dtensor import groups_of, local_of
from ..sharding.spec import Group
from ..tracing.dynamo import counters, with_code_of_its_own
from ..tracing.sharded_module import user_class
from .gpu_program import GPU, OPTIONS, Gpu, generate, gpu_of
from .lifetimes import Allocation, Event, Part
from .memory import step_events, step_memory
from .optimizer_cost import OPTIMIZERS, Updated, check_optimizer, clipping_us
from .reading import Scheduled, captured_graph
from .records import CapturedGraph, GraphKind
from .report import Capture


def capture(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    schedule: SchedulePolicy | None = None,
    code: bool = True,
    device: str | None = None,
    passes: Sequence[Pass] = (),
    optimizer: str = "adamw",
    clip_gradients: bool = False,
    **kwargs: Any,
) -> Capture:
    """Compile ``model`` as ``torch.compile`` would, run it once, and return the graphs and what they cost.

    Compile caches are not read, so that the passes run. Gradients, the random state and, if nothing is computed,
    buffers that forward replaces are as before afterwards. Every rank must call it, with inputs of its own.

    Args:
        model: a sharded module; its outermost unit, so that all collectives are in its graphs.
        args: of its forward.
        loss: from the output to a scalar; None sums all floating-point tensors of the output. Under ``no_grad``
            there is no backward.
        schedule: None for the default policy.
        code: False generates no code and computes nothing: graphs return tensors of the right shape that take no
            memory. So a model can be captured that this machine could not run; its shards need no values.
        device: "A100", "B200", "H100" or "H200": generate and assemble, from a model on the CPU, the program of this
            GPU, which need not be there. Its cluster is the default. Nothing is computed, as with ``code=False``.
        passes: your own graph passes, as for ``fsdp_compiled.compile``.
        optimizer: whose state and step the estimates count: "adamw", "adam", "rmsprop", "sgd_momentum", "sgd" or
            "muon": of the matrices in units below the outermost one, by ``step_on_shards``, and AdamW of the others.
        clip_gradients: whether the optimizer's step counts ``clip_grad_norm_`` over all of them, too.
        kwargs: of its forward.

    Raises:
        TypeError: ``model`` is no module, ``schedule`` no SchedulePolicy, or ``passes`` no list of functions.
        ValueError: no unit lies in ``model``, or ``optimizer`` is unknown, or there is no such ``device``.
        ImportError: ``device`` is given and triton is not installed.
        NotImplementedError: ``device`` is given, and shards of CPUOffloadPolicy.
    """
    traced = trace(model, args, kwargs, loss, schedule or SchedulePolicy(), code, device, passes, optimizer)
    cluster, updated, memory = traced.capture.cluster, traced.updated, step_memory(traced.events, optimizer)
    optimizer_us = OPTIMIZERS[optimizer].step_us(cluster, memory.reduced_bytes, updated, traced.ranks, traced.shards)
    if clip_gradients:
        optimizer_us += clipping_us(cluster, memory.reduced_bytes, updated.parameters, traced.sharding)
    return replace(traced.capture, memory=memory, optimizer_us=optimizer_us)


class Traced(NamedTuple):
    """A capture without what the optimizer takes, and what that is computed from."""

    capture: Capture
    scheduled: list[tuple[GraphKind, Scheduled]]  # before Inductor's own passes
    events: list[Event]  # of memory in a step, in order
    updated: Updated  # by the optimizer
    ranks: list[int]  # of the largest data-parallel mesh
    shards: int  # of these, how many share the parameters
    sharding: list[Group]  # along each mesh dimension that shards, those of tensor parallelism too


def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None,
    schedule: SchedulePolicy,
    code: bool = False,
    device: str | None = None,
    passes: Sequence[Pass] = (),
    optimizer: str = "adamw",
) -> Traced:
    """Compile and run a model once and return its graphs. Parameters and errors as of :func:`capture`."""
    breaks = counters["graph_break"].copy()
    expect("model", model, nn.Module, "an nn.Module", "give the module, not its result")
    expect("loss", loss, Callable | None, "a function or None")  # type: ignore[arg-type]
    gpu = gpu_of(device)
    states = states_of(model)
    if gpu is not None:
        if any(param.placement.offload is not None for state in states for param in state.params):
            raise NotImplementedError("device: shards of CPUOffloadPolicy; capture it without device or offload")
        schedule = replace(schedule, cluster=schedule.cluster or gpu.name)
    if "_fsdp_state" in model.__dict__ and states[0].is_root:
        set_default_regions(model)
    updated = _updated(model, states)
    held = _held(model, states, tensors_in((args, kwargs)), optimizer, updated)
    recorder = _Recorder(schedule, passes, code, gpu)
    _run_once(model, recorder, loss or _sum, *args, **kwargs)
    params = [param for state in states for param in state.params]
    sharded: list[Any] = [param.sharded_param for param in params]  # DTensors
    meshes = [param.placement.mesh_info for param in params]
    largest = max(meshes, key=lambda info: (info.mesh.size(), info.shard_mesh_size), default=None)
    ranks, shards = (largest.mesh.mesh.flatten().tolist(), largest.shard_mesh_size) if largest else ([0], 1)
    found = Capture(
        model=user_class(model).__name__,
        parameters=sum(param.numel() for param in model.parameters()),
        world=max((each.device_mesh.size() for each in sharded), default=1),
        torch_version=torch.__version__,
        cluster=schedule.cluster_for(states[0].device),
        schedule=schedule,
        graph_breaks=tuple(counters["graph_break"] - breaks),
        graphs=tuple(recorder.graphs),
        trained=updated.parameters,
    )
    graphs = ((kind, read.graph) for kind, read in recorder.scheduled)
    events = step_events(graphs, held, optimizer, updated, shards, found.cluster.on_host)
    sharding = list(dict.fromkeys(group for param in sharded for group in groups_of(param)))
    return Traced(found, recorder.scheduled, events, updated, ranks, shards, sharding)


def _updated(model: nn.Module, states: Sequence[FSDPState]) -> Updated:
    """Return what an optimizer of a model updates, with the matrices of the units below the outermost ones."""
    trained = [param for param in model.parameters() if param.requires_grad]
    inner = {param.sharded_param for state in states if not state.is_root for param in state.params}
    shapes = [param.shape for param in trained if param in inner and param.dim() in (2, 3)]
    matrices = [(shape[-2], shape[-1]) for shape in shapes for _ in range(shape[0] if len(shape) == 3 else 1)]
    return Updated(len(trained), sum(param.numel() for param in trained), tuple(matrices))


def _run_once(
    model: nn.Module, backend: _Recorder, loss: Callable[[Any], Tensor], /, *args: Any, **kwargs: Any
) -> None:
    """Compile and run forward and backward; gradients and the random state are as before afterwards."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    grads = {param: param.grad for param in model.parameters()}
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    each = [param.gradients for state in states_of(model) for param in state.params]
    unreduced = {sums: sums.take() for of_one in each for sums in (of_one.unsharded, of_one.partial)}
    model.zero_grad()
    try:
        with torch.random.fork_rng():
            # Nothing of this capture remains where Dynamo would find it for another, and sizes that differ from an
            # earlier capture's are no sizes that vary.
            compiled = torch.compile(with_code_of_its_own(call), backend=backend, dynamic=False)
            total = loss(without_failing_regions(model, compiled, *args, **kwargs))
            if not isinstance(total, Tensor) or total.numel() != 1:
                got = f"a tensor {[*total.shape]}" if isinstance(total, Tensor) else shown(total)
                raise unexpected("loss", "a function that returns a tensor of one element", got)
            if total.requires_grad:
                total.backward()
    finally:
        for param, grad in grads.items():
            param.grad = grad
        for current, given in buffers if not backend.computes else ():
            current.update(given)
        for sums, earlier in unreduced.items():
            sums.take()
            if earlier is not None:
                sums.add(earlier)


def _held(
    model: nn.Module, states: Sequence[FSDPState], batch: Sequence[Tensor], kind: str, updated: Updated
) -> list[Allocation]:
    """Return what a rank holds before a step. ValueError: the optimizer's ``kind`` is unknown."""
    check_optimizer(kind)
    params = [param for state in states for param in state.params]
    padded = {each.sharded_param: each.storage.layout.shard_numel * each.leaf.dtype.itemsize for each in params}
    padded |= {each.sharded_param: 0 for each in params if each.placement.offload is not None}  # on the host
    sizes = {param: padded.get(param, local_of(param).nbytes) for param in model.parameters()}
    trained = sum(size for param, size in sizes.items() if param.requires_grad)
    others = sum({id(each): local_of(each).nbytes for each in (*model.buffers(), *batch)}.values())
    found: dict[Part, int] = {"parameters": sum(sizes.values()), "batch and buffers": others}
    found["optimizer state"] = OPTIMIZERS[kind].state_bytes(trained, updated)
    return [Allocation(part, part, size) for part, size in found.items()]


def _sum(output: Any) -> Tensor:
    terms = (tensor.float().sum() for tensor in tensors_in(output) if tensor.is_floating_point())
    return sum(terms, torch.zeros(()))


def _without_code(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """Stand in for ``compile_fx_inner``: run Inductor's passes only, and return what returns empty results."""
    with V.set_fake_mode(detect_fake_mode(inputs)):
        _recursive_post_grad_passes(module, is_inference=kwargs.get("is_inference", False))
    return _returns_empty(module)


def _returns_empty(module: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """Return what stands in for a compiled graph: it computes nothing and returns results of the right shapes."""
    (output,) = module.graph.find_nodes(op="output")
    values = [item.meta["val"] if isinstance(item, fx.Node) else item for item in output.args[0]]

    def run(inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return list(map(_empty, values))

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _empty(value: Any) -> Any:
    """Return zeros of a tensor's shape in the memory of one element, or another value as it is.

    Symbolic sizes are those of the inputs that the graph was traced with, with which it is run.
    """
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if not isinstance(value, Tensor):
        return value
    return torch.zeros((), dtype=value.dtype, device=value.device).expand([*map(_empty, value.shape)])


class _Recorder:
    """A backend: Inductor with the passes of one policy, keeping every graph."""

    compiler_name = "inductor"  # as the one of torch.compile says, for which there are regions by default

    def __init__(self, policy: SchedulePolicy, own: Sequence[Pass], code: bool, gpu: Gpu | None) -> None:
        self.graphs = list[CapturedGraph]()
        self.scheduled = list[tuple[GraphKind, Scheduled]]()
        self.config = options(policy, own) | {"force_disable_caches": True}  # on a hit no pass would run
        self.config |= OPTIONS if gpu else {}
        self._policy, self._code, self._gpu = policy, code, gpu
        self.computes = code and gpu is None
        self._scheduled: fx.Graph | None = None
        slot = "post_grad_custom_pre_pass"
        pipeline = slots(policy, more=own)[slot]
        self._passes = tuple(map(name_of, pipeline.passes))
        ran: tuple[Pass, ...] = (*pipeline.passes, self._observe)
        observed = replace(pipeline, passes=ran, slot="schedule" if code else "schedule only")
        self.config[slot] = beside_users_passes(slot, observed)

    def __call__(self, module: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        return compile_fx(module, inputs, inner_compile=self._compile, config_patches=self.config)

    def _observe(self, graph: fx.Graph) -> None:
        """Run as the last pass before Inductor's own."""
        self._scheduled = copy.deepcopy(graph)
        self._scheduled.owning_module = graph.owning_module  # which holds the regions that the graph calls

    def _compile(self, module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        before = fx.GraphModule(module, copy.deepcopy(module.graph))
        self._scheduled = None
        if self._gpu:
            compiled: Any = _returns_empty(module)
            code, kernels = generate(module, inputs, self._gpu, self._policy.cluster_for(GPU), **kwargs)
        else:
            compiled = (compile_fx_inner if self._code else _without_code)(module, inputs, **kwargs)
            code, kernels = getattr(compiled, "source_code", "") or "", ()
        after = fx.GraphModule(module, copy.deepcopy(module.graph))
        read = Scheduled(self._scheduled or after.graph, self._policy)
        kind: GraphKind = "inference" if kwargs.get("is_inference") else "forward"
        kind = "backward" if kwargs.get("is_backward") else kind
        self.scheduled.append((kind, read))
        found = captured_graph(read, kind, after)
        self.graphs.append(
            replace(found, before=before, code=code, passes=self._passes, kernels=kernels or found.kernels)
        )
        return compiled
