"""What may be tried on a number of ranks, and what each try costs: records and arithmetic. It knows no graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..inspect.lifetimes import Part
from ..inspect.memory import ALLOCATOR_FRACTION
from ..passes.cost import Cluster

Checkpointing = Literal["none", "selective", "blocks"]
CHECKPOINTING: Mapping[Checkpointing, str] = {
    "none": "no activation checkpointing",
    "selective": "attention and every second matrix product of a block saved",
    "blocks": "blocks recomputed",
}
LARGEST_BATCH = 64  # sequences of a rank at a time


@dataclass(frozen=True)
class Layout:
    """How ranks share the model: ``shards`` of them have a part each, and ``replicas`` of those groups the same."""

    shards: int
    replicas: int = 1

    @property
    def mesh(self) -> str:
        return f"{self.replicas} x {self.shards}" if self.replicas > 1 else str(self.shards)


def layouts(ranks: int, ranks_per_node: int) -> list[Layout]:
    """Return the meshes to try: fully sharded, and shards within a node, 8 nodes, 64 and so on, with replicas."""
    found, shards = [Layout(ranks)], ranks_per_node
    while shards < ranks:
        found += [Layout(shards, ranks // shards)] if ranks % shards == 0 else []
        shards *= 8
    return found


def batches(sequences: int) -> Iterator[tuple[int, int]]:
    """Yield batches and how often they are accumulated, for at least so many sequences of a rank in a step."""
    batch = 1
    while batch <= min(sequences, LARGEST_BATCH):
        yield batch, -(-sequences // batch)
        batch *= 2


@dataclass(frozen=True)
class Option:
    """How to train on ``ranks`` ranks, by estimate.

    Args:
        ranks: all of them.
        layout: how they share the model.
        checkpointing: see :data:`CHECKPOINTING`.
        reshard_after_forward: as of ``fully_shard``, for the blocks.
        batch: sequences of a rank at a time.
        accumulation: such batches in a step.
        tokens: of all ranks in a step.
        parts_us: what a step takes: compute, waits for collectives, copies of their buffers, the optimizer, the host.
        parts_bytes: of a rank's memory at its peak.
        flops: that a rank's step needs, without what is computed again.
    """

    ranks: int
    layout: Layout
    checkpointing: Checkpointing
    reshard_after_forward: bool
    batch: int
    accumulation: int
    tokens: int
    parts_us: Mapping[str, float]
    parts_bytes: Mapping[Part, int]
    flops: float

    @property
    def step_us(self) -> float:
        return sum(self.parts_us.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all ranks together train on in a second."""
        return 1e6 * self.tokens / self.step_us

    @property
    def peak_bytes(self) -> int:
        """The peak of live bytes with the allocator's share, see :data:`ALLOCATOR_FRACTION`."""
        return int((1 + ALLOCATOR_FRACTION) * sum(self.parts_bytes.values()))

    def mfu(self, cluster: Cluster) -> float:
        """Return which share of the peak FLOP/s of bf16 products the needed FLOPs take."""
        return self.flops / (self.step_us / 1e6) / cluster.flops_16bit

    def code(self) -> str:
        """Return what to write to get it."""
        made, given = "", f"reshard_after_forward={self.reshard_after_forward}, mp_policy=policy"
        if self.layout.replicas > 1:
            sizes = f"({self.layout.replicas}, {self.layout.shards})"
            made = f'mesh = init_device_mesh(device_type, {sizes}, mesh_dim_names=("replicate", "shard"))\n'
            given = f"mesh=mesh, {given}"
        root = given.replace("reshard_after_forward=True, ", "")  # the root stays unsharded unless told otherwise
        wrap = {"none": "block", "blocks": "checkpoint_wrapper(block)"}.get(self.checkpointing)
        wrap = wrap or "checkpoint_wrapper(block, context_fn=save_some)"
        return (
            f"{made}for index, block in enumerate(blocks):\n    blocks[index] = fully_shard({wrap}, {given})\n"
            f"model = fsdp_compiled.compile(fully_shard(model, {root}), fullgraph=True)\n"
            f"# batch {self.batch} x {self.accumulation} a rank"
        )


def describe(option: Option) -> str:
    """Return an option in a few words."""
    unsharded = "" if option.reshard_after_forward else ", kept unsharded until backward"
    return f"batch {option.batch} x {option.accumulation}, {CHECKPOINTING[option.checkpointing]}{unsharded}"


def check_counts(name: str, values: Sequence[int]) -> None:
    """Raise ValueError unless there are values, all positive integers."""
    if not isinstance(values, Sequence) or not values or not all(isinstance(n, int) and n >= 1 for n in values):
        got = list(values) if isinstance(values, Sequence) else values
        raise ValueError(f"plan: {name}: expected integers of at least 1, got {got}")
