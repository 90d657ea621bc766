"""Compiles a model while recording the graphs that Inductor gets, before and after the passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from fsdp_compiled import SchedulePolicy, options, passes
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.passes.schedule_policy import DEFAULT


def without_code(gm: fx.GraphModule, schedule: SchedulePolicy | None) -> Callable[..., Any]:
    """Return what runs a graph as it is, after the passes that a schedule has for it, if one is given."""
    for run in passes.post_grad(schedule) if schedule else ():
        run(gm.graph)
    gm.recompile()
    return make_boxed_func(gm.forward)


def after_inductors_passes(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Callable[..., Any]:
    """Stand in for ``compile_fx_inner`` as ``capture(code=False)`` does: the graph runs through Inductor's passes."""
    return import_module("fsdp_compiled.inspect.capture")._without_code(gm, inputs, **kwargs)


def copied(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph, which finds its regions where the original does."""
    result = copy.deepcopy(graph)
    result.owning_module = graph.owning_module
    return result


@dataclass
class Recorder:
    """A backend: Inductor, recording every forward, backward and inference graph in order of compilation."""

    before: list[tuple[str, fx.Graph]] = field(default_factory=list)
    after: list[tuple[str, fx.Graph]] = field(default_factory=list)
    dynamo_graphs: int = 0
    schedule: SchedulePolicy = DEFAULT
    lower: bool = True  # False: run graphs as they are before the post-grad passes
    code: bool = False  # let Inductor compile code, which takes most of the time
    compiler_name: str = ""  # "inductor": as ``torch.compile`` without a backend, with the options that follow
    config: dict[str, Any] = field(default_factory=dict)

    def __call__(self, gm: fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
        self.dynamo_graphs += 1
        # also while backward is compiled, later
        patches = {**options(self.schedule), **self.config, "force_disable_caches": True}
        return compile_fx(gm, example_inputs, inner_compile=self._inner, config_patches=patches)

    def _inner(self, gm: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        kind = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        self.before.append((kind, copied(gm.graph)))
        if self.lower and self.code:
            compiled = compile_fx_inner(gm, example_inputs, **kwargs)
        else:
            compiled = without_code(gm, self.schedule if self.lower else None)
        self.after.append((kind, gm.graph))
        return compiled

    def only(self, kind: str, after: bool = False) -> fx.Graph:
        """Return the one graph of this kind."""
        (graph,) = [graph for k, graph in (self.after if after else self.before) if k == kind]
        return graph


def record(
    model: nn.Module, schedule: SchedulePolicy = DEFAULT, lower: bool = True, code: bool = False, **kwargs: Any
) -> tuple[Callable[..., Any], Recorder]:
    torch._dynamo.reset()
    recorder = Recorder(schedule=schedule, lower=lower, code=code)
    return torch.compile(model, backend=recorder, fullgraph=True, **kwargs), recorder


def target_name(node: fx.Node) -> str:
    """``unshard``, ``wait_tensor``, ``mm``..., seen through the wrapper of a control dependency."""
    if "control_deps" in str(node.target):
        subgraph = getattr(node.graph.owning_module, node.args[1].target)
        (inner,) = [n for n in subgraph.graph.nodes if n.op == "call_function"]
        return target_name(inner)
    parts = str(node.target).split(".")
    return parts[-2] if len(parts) > 1 else parts[0]


def sequence(graph: fx.Graph, *names: str) -> list[str]:
    """The nodes with these target names, in order."""
    return [target_name(n) for n in graph.nodes if n.op == "call_function" and target_name(n) in names]


def regions_of(graph: fx.Graph) -> list[fx.Graph]:
    """The regions that a graph calls, in order."""
    return [region for node in graph.nodes if (region := nodes.region_of(node)) is not None]


def placeholders(graph: fx.Graph) -> list[tuple[int, ...]]:
    """Shapes of the graph's tensor inputs."""
    values = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    return [tuple(v.shape) for v in values if isinstance(v, torch.Tensor)]


def outputs(graph: fx.Graph) -> list[fx.Node]:
    (output,) = [n for n in graph.nodes if n.op == "output"]
    return [n for n in output.args[0] if isinstance(n, fx.Node)]
