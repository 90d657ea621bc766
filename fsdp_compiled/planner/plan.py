"""Tries meshes, batches and checkpointing on captured graphs. It must not know how a plan is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from ..expect import expect, shown, unexpected
from ..inspect.optimizer_cost import check_optimizer
from ..passes.cost import Cluster, named
from ..policy import MixedPrecisionPolicy
from .training_plan import CHECKPOINTING, Checkpointing, Layout, Option, TrainingPlan
from .trials import Build, Trial, ranks_to_capture, trial

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LARGEST_BATCH = 64  # sequences of a rank at a time


def plan(
    build: Build,
    *,
    cluster: str | Cluster = "H100",
    ranks: Sequence[int] = (8, 64, 512),
    tokens_per_step: int = 4_000_000,
    optimizer: str = "adamw",
    mp_policy: MixedPrecisionPolicy = BF16,
    memory_bytes: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> TrainingPlan:
    """Estimate, for each number of ranks, what trains fastest and what fits: nothing is computed or communicated.

    Tried are the mesh (fully sharded; shards within a node, 8 nodes, 64 and so on, with replicas), the batch of a
    rank and how often it is accumulated, activation checkpointing (none; selective; of blocks) and
    ``reshard_after_forward``. The model is captured once for each kind of checkpointing, with regions; buckets are
    decided anew for each mesh, as they would be there. Compute and activations are taken to grow with the batch.

    Args:
        build: given a number of sequences, returns ``(model, args)`` or ``(model, args, kwargs)``: a model that is
            not sharded, whose forward returns the loss, and inputs, that many sequences in dimension 0. It is called
            with torch's default device "meta". What modules hold in a ModuleList is a block, and sharded by itself.
        cluster: a name, a cluster file, or a record.
        ranks: numbers of ranks, each by itself.
        tokens_per_step: of all ranks; as near as equal numbers of sequences for each rank come, at least one each.
            Where no input is an integer, a sample counts as one token.
        optimizer: as of ``capture``.
        mp_policy: of every unit.
        memory_bytes: of each rank; None takes the cluster's.
        progress: is told what happens, a line at a time.

    Raises:
        ValueError, TypeError: an argument is wrong, or what ``build`` returns.
        RuntimeError: there is a default process group: a simulated one is started here.
    """
    if not callable(build) or isinstance(build, nn.Module):
        raise unexpected("build", "a function of a number of sequences", shown(build), error=TypeError)
    expect("cluster", cluster, str | Cluster, "a name, a cluster file or a Cluster")
    expect("memory_bytes", memory_bytes, int | float | None, "a number or None")
    cluster = named(cluster) if isinstance(cluster, str) else cluster
    _check_counts("ranks", ranks)
    _check_counts("tokens_per_step", [tokens_per_step])
    check_optimizer(optimizer)
    memory_bytes = cluster.memory_bytes if memory_bytes is None else memory_bytes
    if memory_bytes < 1:
        do = "give memory_bytes, or a cluster that has it"
        raise unexpected("memory_bytes", "the bytes of a rank's device memory", memory_bytes, do)
    trials = dict[Checkpointing, Trial]()
    with simulated_group(ranks_to_capture(build, max(2, cluster.ranks_per_node))):
        for checkpointing in CHECKPOINTING:
            progress(f"capturing with {CHECKPOINTING[checkpointing]}")
            trials[checkpointing] = trial(build, checkpointing, cluster, mp_policy, optimizer)
    first = trials["none"]
    found = dict[int, tuple[Option, ...]]()
    for count in ranks:
        progress(f"deciding for {count} ranks")
        each = _options(trials, count, tokens_per_step, optimizer, memory_bytes)
        found[count] = tuple(sorted(each, key=lambda option: (-option.tokens_per_s, option.peak_bytes)))
    model, parameters = first.traced.capture.model, first.traced.capture.parameters
    return TrainingPlan(model, parameters, cluster, memory_bytes, first.tokens, tokens_per_step, found)


@contextmanager
def simulated_group(world: int, rank: int = 0) -> Iterator[None]:
    """Start a process group that communicates nothing. RuntimeError: there is one already."""
    if dist.is_initialized():
        raise RuntimeError("plan: starts a simulated process group of its own; call it where there is none")
    dist.init_process_group("fake", rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _options(
    trials: dict[Checkpointing, Trial], ranks: int, tokens_per_step: int, optimizer: str, memory_bytes: int
) -> Iterator[Option]:
    """Yield what can be tried: of each mesh and kind of checkpointing all batches that fit, and one that does not."""
    first = trials["none"]
    sequences = max(1, round(tokens_per_step / (ranks * first.tokens)))
    for (kind, each), layout, reshards in product(
        trials.items(), layouts(ranks, first.traced.capture.cluster.ranks_per_node), (True, False)
    ):
        plans = each.plans(layout, reshards)
        for batch, accumulation in batches(sequences):
            parts_us = {part: accumulation * us for part, us in each.parts_us(plans, batch).items()}
            parts_us["optimizer"] = each.optimizer_us(layout, optimizer)
            if host_us := each.host_us(sum(parts_us.values()), accumulation):
                parts_us["host"] = host_us
            option = Option(
                ranks=ranks,
                layout=layout,
                checkpointing=kind,
                reshard_after_forward=reshards,
                batch=batch,
                accumulation=accumulation,
                tokens=ranks * batch * accumulation * first.tokens,
                parts_us=parts_us,
                parts_bytes=each.memory(layout, reshards, batch, accumulation > 1),
                flops=batch * accumulation * first.flops,
            )
            yield option
            if option.peak_bytes > memory_bytes:
                break


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


def _check_counts(name: str, values: Sequence[int]) -> None:
    """Raise ValueError unless there are values, all positive integers."""
    if not isinstance(values, Sequence) or not values or not all(isinstance(n, int) and n >= 1 for n in values):
        got = list(values) if isinstance(values, Sequence) else values
        raise ValueError(f"plan: {name}: expected integers of at least 1, got {got}")
