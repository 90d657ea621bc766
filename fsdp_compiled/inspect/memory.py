"""Estimates the peak memory of a training step on one rank, from its graphs and by arithmetic.

It must not know how a capture is drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from .lifetimes import Allocation, Event, GraphMemory, Part
from .optimizer_cost import OPTIMIZERS, Updated

Graphs = Iterable[tuple[str, fx.Graph]]  # each with its kind

# What PyTorch's caching allocator reserves beyond live bytes. *Source:* vllm-project/compressed-tensors pull request
# 587, which allows 5% where 2.4% were seen with a Llama of 70 billion parameters on a full 80 GB card. It can be much
# more: meta-pytorch/torchrec pull request 4584 reports 21%.
ALLOCATOR_FRACTION = 0.05


@dataclass(frozen=True)
class MemoryLevel:
    """The most bytes that are alive while the node ``at`` of a graph runs."""

    graph: str
    at: str
    bytes: int


@dataclass(frozen=True)
class StepMemory:
    """The estimated memory of one step: forward, backward, optimizer. No gradients are left from a step before.

    Args:
        optimizer: whose state is counted.
        curve: live bytes over the step.
        alive: at the peak, the largest first.
        reduced_bytes: of all gradients that backward leaves.
    """

    optimizer: str
    curve: tuple[MemoryLevel, ...]
    alive: tuple[Allocation, ...]
    reduced_bytes: int

    @property
    def peak(self) -> MemoryLevel:
        """The highest level, the first of equal ones."""
        return max(self.curve, key=lambda level: level.bytes)

    @property
    def new_bytes(self) -> int:
        """What the peak has beyond what is there before the step."""
        return self.peak.bytes - self.curve[0].bytes

    @property
    def reserved_bytes(self) -> int:
        """The peak with the allocator's share, which is :data:`ALLOCATOR_FRACTION` of it."""
        return int((1 + ALLOCATOR_FRACTION) * self.peak.bytes)

    @property
    def parts(self) -> dict[Part, int]:
        """Bytes of each part at the peak, the largest first."""
        found = defaultdict[Part, int](int)
        for each in self.alive:
            found[each.part] += each.bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def step_memory(events: Sequence[Event], optimizer: str) -> StepMemory:
    """Return the memory of a step with these events, those of :func:`step_events`."""
    levels, curve = list(accumulate(event.sign * event.what.bytes for event in events)), dict[tuple[str, str], int]()
    for event, level in zip(events, levels, strict=True):
        curve[event.graph, event.at] = max(level, curve.get((event.graph, event.at), 0))
    alive = dict[Hashable, Allocation]()
    for event in events[: levels.index(max(levels)) + 1]:
        alive[event.key] = event.what
        if event.sign < 0:
            del alive[event.key]
    largest = sorted(alive.values(), key=lambda each: -each.bytes)
    return StepMemory(
        optimizer,
        tuple(MemoryLevel(*at, level) for at, level in curve.items()),
        tuple(largest),
        reduced_bytes(events),
    )


def reduced_bytes(events: Sequence[Event]) -> int:
    """Return the bytes of all gradients that backward leaves."""
    return sum(event.sign * event.what.bytes for event in events if event.what.part == "gradients")


def step_events(
    graphs: Graphs, held: Sequence[Allocation], optimizer: str, updated: Updated, world: int, copies: bool
) -> list[Event]:
    """Return what a step that runs these graphs in turn allocates and frees.

    Args:
        graphs: as scheduled, in order; each backward belongs to the last forward that has none yet.
        held: what is there before the step and after it.
        optimizer: a key of :data:`OPTIMIZERS`.
        world: ranks that share the parameters.
        copies: whether collectives work on copies of their buffers.
    """
    events, forwards = [Event("step", "start", each.name, each) for each in held], list[GraphMemory]()
    for kind, graph in graphs:
        read = GraphMemory(kind, graph, forwards.pop() if kind == "backward" and forwards else None, copies)
        events += read.events()
        forwards += [read] if kind == "forward" else []
    needed = OPTIMIZERS[optimizer].needed_bytes(reduced_bytes(events), updated, world)
    step = Allocation("intermediate results", "optimizer state", needed)
    return events + [Event("optimizer", "step", "step", step, sign) for sign in (1, -1)]
