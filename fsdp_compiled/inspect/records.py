"""What ``capture`` finds: frozen records of graphs, collectives and their timeline."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
from torch import fx

from ..passes.cost import Cluster
from ..passes.cost.compute import Work
from ..passes.schedule_policy import SchedulePolicy
from .memory import StepMemory

Copies = Literal["none", "compute", "side stream"]
GraphKind = Literal["forward", "backward", "inference"]


class Verdict(StrEnum):
    """Whether compute waits for a collective, the main reason, and what to try against it."""

    trial: str

    def __new__(cls, text: str, trial: str) -> Verdict:
        made = str.__new__(cls, text)
        made._value_, made.trial = text, trial
        return made

    HIDDEN = "hidden", "nothing"
    SHARES_CORES = (
        "exposed: it runs on the cores that compute needs",
        "a GPU's cluster in SchedulePolicy, if this model is meant for one",
    )
    LINK_BUSY = (
        "exposed: the link is busy with earlier collectives",
        "more tokens per rank, a smaller dtype in MixedPrecisionPolicy, or HSDP: the links are full",
    )
    LITTLE_AFTER = (
        "exposed: too little compute follows it",
        "a smaller first unit: its gradients are reduced last, behind nothing",
    )
    FIRST = (
        "exposed: nothing before it to hide behind",
        "a smaller first unit, or SchedulePolicy(bucket=...) in bytes: nothing hides the first one",
    )
    MEMORY_BOUND = (
        "exposed: the memory bound delays its launch",
        "a larger SchedulePolicy.in_flight_bytes: all-gathers wait for memory",
    )
    INPUT_LATE = (
        "exposed: its input is computed just before",
        "sharding in a dtype that travels as it is: what is sent is computed first",
    )
    LITTLE_BEFORE = (
        "exposed: too little compute before its first use",
        "more tokens per rank, or SchedulePolicy.keep_unsharded_bytes for fewer all-gathers",
    )


@dataclass(frozen=True)
class Collective:
    """One collective of a graph. Positions count the nodes of :attr:`CapturedGraph.module`'s graph from 0.

    Args:
        kind: such as "all_gather", "reduce_scatter" or "all_reduce".
        params: full names of the parameters in its bucket.
        dtype: of the data that it transfers.
        bytes: of the unsharded side: an all-gather's output, a reduce-scatter's input, an all-reduce's tensor.
        group: name of the process group.
        world: ranks in that group.
        launch, wait: positions of the nodes that launch it and wait for it.
        first_use: position of the first node that computes with the result; the output node's where none does.
        estimate_us: how long the link is busy with it: on the graph's timeline from ``start_us`` to ``end_us``.
        exposed_us: how long compute waits for it.
        copies: the stream that packs and unpacks its buffers; "none" where each parameter is all-gathered into its
            own memory. Shards that the graph itself computes are always packed on the compute stream.
    """

    kind: str
    params: tuple[str, ...]
    dtype: torch.dtype
    bytes: int
    group: str
    world: int
    launch: int
    wait: int
    first_use: int
    estimate_us: float
    exposed_us: float
    start_us: float
    end_us: float
    copies: Copies
    verdict: Verdict


@dataclass(frozen=True)
class ComputeSpan:
    """``nodes`` nodes from ``first`` on, between which no collective is launched or waited for.

    The call of a region is a span of its own; ``block`` is what it is called for, as in :attr:`Region.calls`.
    """

    first: str
    nodes: int
    start_us: float
    end_us: float
    block: str = ""


@dataclass(frozen=True)
class MemoryStep:
    """From ``start_us`` on, ``bytes`` are all-gathered and not yet freed, or are gradients not yet reduced."""

    start_us: float
    bytes: int


@dataclass(frozen=True)
class Region:
    """A block that a graph compiles once and calls several times.

    Args:
        name: of its own graph, ``module``.
        calls: the blocks that it is called for, in order: the path that the parameters of each call have in common,
            or the call's node where it reads none that the graph all-gathers.
        estimate_us: compute of one call.
    """

    name: str
    module: fx.GraphModule
    calls: tuple[str, ...]
    estimate_us: float


@dataclass(frozen=True)
class Kernel:
    """One kernel that a graph launches: of a GPU's program, where that was generated, else as the rules expect it.

    Args:
        name: as the wrapper of a GPU's program calls it; else an operator and the shapes of its operands, or the node
            whose result a fused kernel writes.
        bytes: read and written.
        estimate_us: by the cluster's memory bandwidth, and for matrix products and attention by their FLOPs; at least
            the shortest time of any kernel.
        registers: of a thread, in the first of the configurations that a GPU would try; None for torch's kernels.
        spills: registers' worth of memory that a thread spills into.
        shared_bytes: memory that the threads of a block share.
    """

    name: str
    bytes: int
    estimate_us: float
    work: Work = "fused kernels"
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None

    @property
    def is_generated(self) -> bool:
        """Whether Inductor generated it for this graph, in Triton."""
        return self.registers is not None


@dataclass(frozen=True)
class CapturedGraph:
    """One graph that Inductor compiled.

    Args:
        module: the graph after our passes.
        before: the graph as traced, with one operator per parameter read; None where it was not kept.
        collectives: in order of launch.
        compute: the compute lane of the timeline.
        memory: unsharded bytes in flight over the timeline, a step function.
        peak_unsharded_bytes: the largest value of ``memory``; ``bound_bytes`` is the limit on it.
        kept_bytes: of parameters that the user keeps unsharded until backward; not part of the peak.
        code: what Inductor generated.
        regions: in order of first call; the timeline counts each call as compute.
        passes: names of the passes that made ``module`` of ``before``, a user's among them.
        kernels: of compute, in order of launch, those of regions at every call; collectives and their copies are not
            among them.
    """

    kind: GraphKind
    module: fx.GraphModule
    collectives: tuple[Collective, ...]
    compute: tuple[ComputeSpan, ...]
    memory: tuple[MemoryStep, ...]
    peak_unsharded_bytes: int
    bound_bytes: int
    kept_bytes: int
    before: fx.GraphModule | None = None
    code: str = ""
    regions: tuple[Region, ...] = ()
    passes: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()

    @property
    def compute_us(self) -> float:
        """Estimated compute, without waits for collectives."""
        return sum(span.end_us - span.start_us for span in self.compute)

    def work_us(self, work: Work) -> float:
        """Return the estimated time of all kernels that do this work."""
        return sum(kernel.estimate_us for kernel in self.kernels if kernel.work == work)

    @property
    def has_program(self) -> bool:
        """Whether the program of a GPU was generated."""
        return any(kernel.is_generated for kernel in self.kernels)

    @property
    def communication_us(self) -> float:
        """Estimated time of all collectives."""
        return sum(collective.estimate_us for collective in self.collectives)

    @property
    def exposed_us(self) -> float:
        """Estimated time that compute waits for collectives."""
        return sum(collective.exposed_us for collective in self.collectives)

    @property
    def total_us(self) -> float:
        """Estimated end of the timeline."""
        ends = [span.end_us for span in self.compute] + [collective.end_us for collective in self.collectives]
        return max(ends, default=0.0)


@dataclass(frozen=True)
class CapturedModel:
    """The graphs that were compiled for a model, and the conditions they were compiled under.

    Args:
        model: the class name.
        parameters: number of elements of all parameters, unsharded.
        world: ranks that hold the model together, those of tensor parallelism and replicas too.
        cluster: that times are estimated for.
        schedule: the user's policy.
        graph_breaks: a reason for each.
        graphs: in order of compilation.
        memory: estimated, of one training step; None where only a graph of it is known.
        optimizer_us: estimated time of the optimizer's step, by the memory that it reads and writes, and of clipping
            gradients if asked.
        trained: number of parameters that require grad.
    """

    model: str
    parameters: int
    world: int
    torch_version: str
    cluster: Cluster
    schedule: SchedulePolicy
    graph_breaks: tuple[str, ...]
    graphs: tuple[CapturedGraph, ...]
    memory: StepMemory | None = None
    optimizer_us: float = 0.0
    trained: int = 0

    @property
    def step_us(self) -> float:
        """The estimated time of a step: forward and backward with what compute waits for, and the optimizer.

        A loss that is not compiled is not in it. The host counts as far as the cluster knows what it takes.
        """
        device_us = sum(graph.total_us for graph in self.graphs) + self.optimizer_us
        new_bytes = self.memory.new_bytes if self.memory else 0
        launches = sum(len(graph.kernels) for graph in self.graphs)
        return self.cluster.step_us(device_us, launches, self.trained, new_bytes)

    @property
    def step_parts_us(self) -> dict[str, float]:
        """What ``step_us`` is made of; compute is what neither waits nor copies buffers of collectives.

        Other collectives are those of other parallelism, for which compute waits.
        """
        total, waits, compute = (
            sum(getattr(graph, f"{name}_us") for graph in self.graphs) for name in ("total", "exposed", "compute")
        )
        products = sum(graph.work_us("matrix products") for graph in self.graphs)
        attention = sum(graph.work_us("attention") for graph in self.graphs)
        others = sum(graph.work_us("other collectives") for graph in self.graphs)
        return {
            "matrix products": products,
            "attention": attention,
            "fused kernels": compute - products - attention - others,
            **({"other collectives": others} if others else {}),
            "waits for collectives": waits,
            "copies of buffers": max(0.0, total - waits - compute),
            "optimizer": self.optimizer_us,
            "host": max(0.0, self.step_us - total - self.optimizer_us),
        }

    @property
    def peak_bytes(self) -> int | None:
        """The estimated peak of a step's live bytes, without the allocator's share, which ``memory`` has."""
        return self.memory.peak.bytes if self.memory else None

    @property
    def peak_unsharded_bytes(self) -> int:
        """The largest of all graphs."""
        return max((graph.peak_unsharded_bytes for graph in self.graphs), default=0)
