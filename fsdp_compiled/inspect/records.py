"""What a capture holds: frozen records of graphs, their collectives and their estimated timeline.

It must not know how they are found or drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]
Copies = Literal["none", "compute", "side stream"]
GraphKind = Literal["forward", "backward", "inference"]


@dataclass(frozen=True)
class Collective:
    """One collective of a graph. Positions count the nodes of :attr:`CapturedGraph.module`'s graph from 0.

    Args:
        kind: what it does.
        params: full names of the parameters whose data it carries.
        dtype: in which it travels.
        bytes: of the unsharded side: an all-gather's output, a reduce-scatter's input, an all-reduce's tensor.
        group: name of the process group.
        world: ranks in that group.
        launch: position of the node that starts it.
        wait: position of the node that waits for it.
        first_use: position of the first node that computes with the result; the output node's where none does.
        estimate_us: how long the link is busy with it.
        exposed_us: how long compute stands still for it.
        start_us: on the graph's timeline, when the link begins with it.
        end_us: when the link is done.
        copies: who copies into and out of its buffers; nobody where it gathers each parameter straight into place.
            What the graph itself has computed is copied in by compute in any case.
        verdict: "hidden", or "exposed: " and by what it is limited.
    """

    kind: CollectiveKind
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
    verdict: str


@dataclass(frozen=True)
class ComputeSpan:
    """Compute that runs without a collective being launched or waited for: ``nodes`` nodes from ``first`` on."""

    first: str
    nodes: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class MemoryStep:
    """From ``start_us`` on, ``bytes`` are gathered and not yet freed, or are gradients not yet reduced."""

    start_us: float
    bytes: int


@dataclass(frozen=True)
class CapturedGraph:
    """One graph that Inductor compiled.

    Args:
        kind: forward, backward or inference.
        module: the graph after our passes.
        before: the graph as traced, with one operator per parameter read.
        collectives: in order of launch.
        compute: the compute lane of the timeline.
        memory: unsharded bytes in flight over the timeline, a step function.
        peak_unsharded_bytes: the largest value of ``memory``.
        bound_bytes: which ``peak_unsharded_bytes`` may not exceed.
        kept_bytes: of parameters that stay unsharded until backward by the user's decision; beside the peak.
        code: what Inductor generated.
    """

    kind: GraphKind
    module: fx.GraphModule
    before: fx.GraphModule
    collectives: tuple[Collective, ...]
    compute: tuple[ComputeSpan, ...]
    memory: tuple[MemoryStep, ...]
    peak_unsharded_bytes: int
    bound_bytes: int
    kept_bytes: int
    code: str

    @property
    def compute_us(self) -> float:
        """Estimated compute, without standing still."""
        return sum(span.end_us - span.start_us for span in self.compute)

    @property
    def communication_us(self) -> float:
        """Estimated time of all collectives."""
        return sum(collective.estimate_us for collective in self.collectives)

    @property
    def exposed_us(self) -> float:
        """Estimated time that compute stands still."""
        return sum(collective.exposed_us for collective in self.collectives)

    @property
    def total_us(self) -> float:
        """Estimated end of the timeline."""
        ends = [span.end_us for span in self.compute] + [collective.end_us for collective in self.collectives]
        return max(ends, default=0.0)
