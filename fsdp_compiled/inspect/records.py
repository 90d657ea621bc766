"""What ``capture`` finds: frozen records of graphs, collectives and their timeline."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

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
    """One collective of a graph. Positions count the nodes of :attr:`CapturedGraph.module`'s graph from 0."""

    kind: str  # such as "all_gather", "reduce_scatter" or "all_reduce"
    params: tuple[str, ...]  # full names of the parameters in its bucket
    dtype: torch.dtype  # of the data that it transfers
    bytes: int  # of the unsharded side: an all-gather's output, a reduce-scatter's input, an all-reduce's tensor
    group: str  # name of the process group
    world: int  # ranks in that group
    launch: int  # position of the node that launches it
    wait: int  # of the one that waits for it
    first_use: int  # of the first that computes with the result; the output node's where none does
    estimate_us: float  # how long the link is busy with it: on the graph's timeline from start_us to end_us
    exposed_us: float  # how long compute waits for it
    start_us: float
    end_us: float
    # The stream that packs and unpacks its buffers; "none" where each parameter is all-gathered into its own memory.
    # Shards that the graph itself computes are always packed on the compute stream.
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
    """A block that a graph compiles once and calls several times."""

    name: str  # of its own graph, ``module``
    module: fx.GraphModule
    # The blocks that it is called for, in order: the path that the parameters of each call have in common, or the
    # call's node where it reads none that the graph all-gathers.
    calls: tuple[str, ...]
    estimate_us: float  # compute of one call


@dataclass(frozen=True)
class Kernel:
    """One kernel that a graph launches: of a GPU's program, where that was generated, else as the rules expect it.

    Its name is what the wrapper of a GPU's program calls it; else an operator and the shapes of its operands, or the
    node whose result a fused kernel writes. It takes at least the shortest time of any kernel.
    """

    name: str
    bytes: int  # read and written
    estimate_us: float  # by the cluster's memory bandwidth, and for matrix products and attention by their FLOPs
    work: Work = "fused kernels"
    registers: int | None = None  # of a thread, in the first configuration that a GPU would try; None: torch's kernel
    spills: int | None = None  # registers' worth of memory that a thread spills into
    shared_bytes: int | None = None  # memory that the threads of a block share

    @property
    def is_generated(self) -> bool:
        """Whether Inductor generated it for this graph, in Triton."""
        return self.registers is not None


@dataclass(frozen=True)
class CapturedGraph:
    """One graph that Inductor compiled."""

    kind: GraphKind
    module: fx.GraphModule  # the graph after our passes
    collectives: tuple[Collective, ...]  # in order of launch
    compute: tuple[ComputeSpan, ...]  # the compute lane of the timeline
    memory: tuple[MemoryStep, ...]  # unsharded bytes in flight over the timeline, a step function
    peak_unsharded_bytes: int  # the largest value of ``memory``
    bound_bytes: int  # the limit on it
    kept_bytes: int  # of parameters that the user keeps unsharded until backward; not part of the peak
    before: fx.GraphModule | None = None  # as traced, an operator for each parameter read; None where it was not kept
    code: str = ""  # what Inductor generated
    regions: tuple[Region, ...] = ()  # in order of first call; the timeline counts each call as compute
    passes: tuple[str, ...] = ()  # names of the passes that made ``module`` of ``before``, a user's among them
    # Of compute, in order of launch, those of regions at every call; without collectives and their copies.
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
    """The graphs that were compiled for a model, and the conditions they were compiled under."""

    model: str  # the class name
    parameters: int  # number of elements of all parameters, unsharded
    world: int  # ranks that hold the model together, those of tensor parallelism and replicas too
    torch_version: str
    cluster: Cluster  # that times are estimated for
    schedule: SchedulePolicy  # the user's
    graph_breaks: tuple[str, ...]  # a reason for each
    graphs: tuple[CapturedGraph, ...]  # in order of compilation
    memory: StepMemory | None = None  # estimated, of one training step; None where only a graph of it is known
    # Of the optimizer's step, estimated by the memory that it reads and writes, and of clipping gradients if asked.
    optimizer_us: float = 0.0
    trained: int = 0  # number of parameters that require grad

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
        work = {work: sum(graph.work_us(work) for graph in self.graphs) for work in get_args(Work)}
        others = work.pop("other collectives")
        work["fused kernels"] = compute - work["matrix products"] - work["attention"] - others
        return {
            **work,
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
