"""Times the graph passes on deep models, and says how their time grows with the number of layers.

    python examples/bench/bench_passes.py
    python examples/bench/bench_passes.py --layers --compile 4

One process, rank 0 of a simulated group of 64, traces the example Llama at several depths and runs each pass on the
joint, forward and backward graph. Inductor generates no code, which would take an hour; all of it takes 4 minutes on
2 cores. Prints each pass's CPU time, that per 1000 nodes, and how much that has grown since the shallowest model:
1.00 is linear. ``--compile LAYERS`` also has Inductor compile one model with empty caches, and prints which share
of the time the passes take. ``--json FILE`` keeps the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compare import ours_eager
from torch import Tensor, fx

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compiled import SchedulePolicy, passes
from fsdp_compiled.passes import CLUSTERS
from fsdp_compiled.testing.llama import Config, Llama

WIDTH, HEAD_WIDTH, SEQ, WORLD = 64, 32, 8, 64
JOINT, BEFORE, AFTER = "joint_custom_pre_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"
SLOTS = (JOINT, BEFORE, AFTER)


@dataclass(frozen=True)
class Run:
    """One run of a pass, or under the name of a slot, of a complete pipeline."""

    name: str
    nodes: int  # of the graph that it got
    seconds: float


@dataclass(frozen=True)
class Timed(CustomGraphPass):
    """A pass that records its time. It has no uuid, so that no compile cache can keep it from running."""

    name: str
    run: passes.Pass
    clock: Callable[[], float]
    note: Callable[[Run], None] = field(repr=False)

    def __call__(self, graph: fx.Graph) -> None:
        nodes, start = len(graph.nodes), self.clock()
        self.run(graph)
        self.note(Run(self.name, nodes, self.clock() - start))

    def uuid(self) -> None:
        return None


Timed.__module__ = passes.__name__  # a pass of ours, after which rules are not checked unless the policy asks for it


def timed(policy: SchedulePolicy, clock: Callable[[], float], note: Callable[[Run], None]) -> dict[str, Timed]:
    """Return the pipeline of each slot, with a record of its time and each pass's."""
    slots = {}
    for slot, pipeline in passes.slots(policy).items():
        each = tuple(Timed(type(run).__name__, run, clock, note) for run in pipeline.passes)
        slots[slot] = Timed(slot, passes.Pipeline(each), clock, note)
    return slots


# ---- tracing ----


@dataclass
class Tracer:
    """A backend that runs the passes where Inductor does, and then the graphs node by node."""

    policy: SchedulePolicy
    runs: list[Run] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        to_graphs = aot_autograd(
            fw_compiler=self._compile,
            partition_fn=self._partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        return to_graphs(module, inputs)

    def _partition(self, joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        self._time(joint.graph, JOINT)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **kwargs)

    def _compile(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        module.graph.eliminate_dead_code()  # as Inductor does first
        self._time(module.graph, BEFORE)
        runnable = fx.Graph()  # without Pin, whose control dependencies torch 2.11 can only compile
        runnable.output(runnable.graph_copy(module.graph, {}))
        self._time(module.graph, AFTER)
        return make_boxed_func(fx.GraphModule(module, runnable).forward)

    def _time(self, graph: fx.Graph, slot: str) -> None:
        pipeline = timed(self.policy, time.process_time, self.runs.append)[slot]
        gc.collect()
        gc.disable()  # it walks all objects of the process, at the cost of whichever pass is running
        pipeline(graph)
        gc.enable()


def build(layers: int) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Return a sharded model with a unit for each block, and inputs for its forward: tokens and targets."""
    heads = WIDTH // HEAD_WIDTH
    with torch.device("meta"):
        model = Llama(Config(256, WIDTH, layers, heads, kv_heads=heads, hidden=3 * WIDTH, max_seq=SEQ))
    ours_eager(model)
    model.to_empty(device="cpu")
    model.init_weights()
    tokens = torch.zeros(2, SEQ, dtype=torch.int64)
    return model, (tokens, tokens)


def one_step(layers: int, **kwargs: Any) -> float:
    """Compile a model with ``kwargs``, run it forward and backward, and return the seconds that took."""
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()  # as if each model had a process of its own
    model, batch = build(layers)
    start = time.perf_counter()
    torch.compile(model, fullgraph=True, **kwargs)(*batch).backward()
    return time.perf_counter() - start


# ---- figures ----


@dataclass(frozen=True)
class Row:
    """A pass on all graphs of a model."""

    name: str
    layers: int
    nodes: int
    seconds: float
    growth: float = 1.0  # of the seconds per node, over the shallowest model's

    @property
    def per_node(self) -> float:
        """Seconds."""
        return self.seconds / self.nodes


def summed(layers: int, runs: Sequence[Run]) -> Iterator[Row]:
    """Yield each pass, what the pipelines do around them, and the total."""
    of_passes = [run for run in runs if run.name not in SLOTS]
    for name in dict.fromkeys(run.name for run in of_passes):
        mine = [run for run in of_passes if run.name == name]
        yield Row(name, layers, sum(run.nodes for run in mine), sum(run.seconds for run in mine))
    nodes = sum(run.nodes for run in runs if run.name == BEFORE)  # of forward and backward as traced
    total = sum(run.seconds for run in runs if run.name in SLOTS)
    yield Row("(checks)", layers, nodes, total - sum(run.seconds for run in of_passes))
    yield Row("total", layers, nodes, total)


def with_growth(rows: Sequence[Row]) -> list[Row]:
    """Return the rows pass by pass, each compared with the first of its pass."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    return [replace(row, growth=row.per_node / same[0].per_node) for same in found.values() for row in same]


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'pass':12}{'layers':>8}{'nodes':>9}{'seconds':>10}{'s / 1000 nodes':>16}{'growth':>8}"]
    for row in rows:
        cells = f"{row.layers:8}{row.nodes:9}{row.seconds:10.3f}{1000 * row.per_node:16.5f}{row.growth:8.2f}"
        lines.append(f"{row.name:12}{cells}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Share:
    """The passes' part of compiling a model with Inductor."""

    layers: int
    compile_seconds: float
    passes_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.layers} layers: {self.compile_seconds:.1f} s to compile, of which the passes take "
            f"{self.passes_seconds:.2f} s or {self.passes_seconds / self.compile_seconds:.2%}"
        )


def share(layers: int, policy: SchedulePolicy) -> Share:
    runs: list[Run] = []
    with fresh_cache():
        seconds = one_step(layers, options=timed(policy, time.perf_counter, runs.append))
    return Share(layers, seconds, sum(run.seconds for run in runs if run.name in SLOTS))


def main() -> None:
    args = parse()
    policy = SchedulePolicy(cluster=CLUSTERS[args.cluster] if args.cluster else None)
    dist.init_process_group("fake", rank=0, world_size=WORLD)
    print(
        f"Llama of width {WIDTH}, sequence {SEQ}, {WORLD} ranks, cluster {args.cluster or 'of this machine'}, "
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    rows: list[Row] = []
    for layers in sorted(args.layers):
        tracer = Tracer(policy)
        one_step(layers, backend=tracer)
        rows += summed(layers, tracer.runs)
    rows = with_growth(rows)
    if rows:
        print(table(rows))
    found = share(args.compile, policy) if args.compile else None
    if found:
        print(found)
    if args.json:
        kept = {"torch": torch.__version__, "rows": [asdict(row) for row in rows], "share": found and asdict(found)}
        args.json.write_text(json.dumps(kept, indent=1) + "\n")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[8, 32, 128], help="depths to trace, perhaps none")
    parser.add_argument(
        "--cluster", choices=list(CLUSTERS), help="that schedules are made for; default: this machine"
    )
    parser.add_argument("--compile", type=int, nargs="?", const=4, metavar="LAYERS", help="4 if LAYERS is left out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
