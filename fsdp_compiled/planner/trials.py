"""A model's graphs, captured once for each kind of checkpointing, and what they cost on other ranks and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..api import compile, fully_shard
from ..expect import model_and_inputs, shown, unexpected
from ..hooks.forward import map_tensors, tensors_in
from ..hooks.state import states_below
from ..inspect.capture import Traced, checkpoint_wrapper, trace
from ..inspect.lifetimes import Part
from ..inspect.memory import reduced_bytes
from ..inspect.optimizer_cost import OPTIMIZERS
from ..inspect.reading import Scheduled, nodes_inside
from ..inspect.records import GraphKind
from ..passes.cost import Cluster
from ..passes.cost.compute import flops_of
from ..passes.kinds import Request
from ..passes.planning.buckets import decide
from ..passes.planning.tasks import Plan, Requests, in_order, simulate
from ..policy import MixedPrecisionPolicy, SchedulePolicy
from ..sharding.spec import Group
from .training_plan import Checkpointing, Layout

LARGEST_SHARDS = 5 * 2**30  # bytes: capturing writes gradients of one rank
BATCH = 2  # sequences that are traced; what depends on the batch is in proportion
Build = Callable[[int], tuple[Any, ...]]
_PARTS: tuple[Part, ...] = get_args(Part)
_OF_SHARDS: tuple[Part, ...] = ("parameters", "optimizer state", "gradients")
_OF_BATCH: tuple[Part, ...] = ("batch and buffers", "saved activations", "logits and loss", "temporaries")
_SAVED = ("scaled_dot_product", "flash_attention", "flex_attention", "_c10d_functional")


def save_some() -> Any:
    """Return the contexts of selective checkpointing, a ``context_fn``: attention and every second product saved."""
    products = {True: 0, False: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(operation)
        if name.startswith("aten.mm."):
            products[context.is_recompute] += 1
            saves = products[context.is_recompute] % 2 == 1
        else:
            saves = any(word in name for word in _SAVED)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


_WRAPPED: Mapping[Checkpointing, Callable[[nn.Module], nn.Module]] = {
    "none": lambda block: block,
    "selective": lambda block: checkpoint_wrapper(block, context_fn=save_some),
    "blocks": checkpoint_wrapper,
}


@dataclass(frozen=True, eq=False)
class Trial:
    """A model with one kind of checkpointing, as captured on ``traced.shards`` ranks."""

    tokens: int  # of a sequence
    flops: float  # of a sequence, forward and backward
    traced: Traced  # what was captured, with the graphs as read
    again: frozenset[str]  # parameters that backward all-gathers
    reduced_bytes: int  # of all gradients that backward leaves on one of these ranks
    buffer_bytes: int  # of the model's buffers, as many for any batch

    def plans(self, layout: Layout, reshards: bool) -> list[Plan]:
        """Return the schedule of each graph, decided as it would be there."""
        asked = (self._asked(kind, read, layout, reshards) for kind, read in self.traced.scheduled)
        return [decide(requests, self.traced.capture.schedule) for requests in asked]

    def _asked(self, kind: GraphKind, read: Scheduled, layout: Layout, reshards: bool) -> Requests:
        """Return requests as they would be for a layout; if not ``reshards``, backward all-gathers nothing."""
        cluster, ranks = self.traced.capture.cluster, range(layout.shards * layout.replicas)
        shards, replicas = Group("shards", layout.shards), Group("replicas", layout.replicas)
        links = {
            "shards": cluster.link_of(ranks[: layout.shards]),
            "replicas": cluster.link_of(ranks[:: layout.shards]),
        }

        def moved(request: Request) -> Request:
            spec = request.spec.over(shards, replicas)
            bucket = request.kind.make([replace(request, spec=spec)], cluster)
            groups = map(bucket.group_of, bucket.stages)
            lanes = tuple(cluster.lane_of(links[g.name], g.world) if g else cluster.lane(None) for g in groups)
            (size,) = bucket.sizes
            kept = request.kept_bytes or (not reshards and request.kind.is_ahead and request.param.name in self.again)
            return replace(request, spec=spec, bytes=size, lanes=lanes, kept_bytes=size if kept else 0)

        here = [r for r in read.requests if reshards or kind == "forward" or not r.kind.is_ahead]
        return Requests(read.plan.load.compute_us, in_order(map(moved, here if len(ranks) > 1 else [])), cluster)

    def parts_us(self, plans: Sequence[Plan], batch: int) -> dict[str, float]:
        """Return what forward and backward of a batch take by these schedules, by part."""
        found = dict.fromkeys(("compute", "waits for collectives", "copies of buffers"), 0.0)
        for (_, read), plan in zip(self.traced.scheduled, plans, strict=True):
            compute_us = tuple(batch / BATCH * us for us in read.load.compute_us)
            timeline = simulate(replace(plan.load, compute_us=compute_us), plan.actions)
            total, exposed = sum(compute_us), sum(timed.exposed_us for timed in timeline.operations.values())
            for part, us in zip(found, (total, exposed, max(0.0, timeline.total_us - total - exposed)), strict=True):
                found[part] += us
        return found

    def memory(self, layout: Layout, reshards: bool, batch: int, accumulates: bool) -> dict[Part, int]:
        """Return a rank's memory at the peak of a step, by part, the largest first."""
        fewer = self.traced.shards / layout.shards
        padding = self._padding(layout)
        scales = dict.fromkeys(_PARTS, padding) | dict.fromkeys(_OF_SHARDS, padding * fewer)
        scales |= dict.fromkeys(_OF_BATCH, batch / BATCH)
        changes = self._changes if reshards else self._changes.index_fill(0, self._while_kept, 0.0)
        scaled = changes.cumsum(0) * torch.tensor([*scales.values()], dtype=torch.float64, device="cpu")
        scaled[:, _PARTS.index("batch and buffers")] += (1 - batch / BATCH) * self.buffer_bytes
        if accumulates:  # the sum of the batches before, which the optimizer's two events count already
            scaled[:-2, _PARTS.index("gradients")] += self.reduced_bytes * fewer
        at = int(scaled.sum(1).argmax())
        found = {part: int(size) for part, size in zip(_PARTS, scaled[at].tolist(), strict=True)}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @cached_property
    def _changes(self) -> Tensor:
        """Bytes that each event allocates or, below zero, frees, by part: ``[events, parts]``."""
        changes = torch.zeros(len(self.traced.events), len(_PARTS), dtype=torch.float64, device="cpu")
        for index, event in enumerate(self.traced.events):
            changes[index, _PARTS.index(event.what.part)] = event.sign * event.what.bytes
        return changes

    @cached_property
    def _while_kept(self) -> Tensor:
        """Events that do not happen if forward leaves to backward the unsharded parameters that it needs."""
        events = enumerate(self.traced.events)
        each = [(at, event.what.name, event) for at, event in events if event.what.part == "unsharded parameters"]
        last = {name: at for at, name, event in each if event.graph == "backward" and event.sign < 0}
        first = {name: at for at, name, event in reversed(each) if event.sign > 0}
        between = [at for at, name, _ in each if name in last and at not in (first[name], last[name])]
        return torch.tensor(between, dtype=torch.int64, device="cpu")

    def _padding(self, layout: Layout) -> float:
        """Return how many times as much unsharded parameters take there, with the padding."""
        forward = next(read for kind, read in self.traced.scheduled if kind == "forward")
        ahead = [request for request in forward.requests if request.kind.is_ahead]
        there = sum(each.param.layout(layout.shards).padded_bytes(each.spec.dtype) for each in ahead)
        return there / sum(each.bytes for each in ahead)

    def host_us(self, device_us: float, accumulation: int) -> float:
        """Return by how much the host makes a step longer that takes the device so long."""
        launches = sum(len(read.kernels) for _, read in self.traced.scheduled)
        counts = accumulation * launches, accumulation * self.traced.updated.parameters
        return self.traced.capture.cluster.step_us(device_us, *counts) - device_us

    def optimizer_us(self, layout: Layout, optimizer: str) -> float:
        reduced = self.reduced_bytes * self.traced.shards / layout.shards
        ranks = range(layout.shards * layout.replicas)
        cluster, updated = self.traced.capture.cluster, self.traced.updated
        return OPTIMIZERS[optimizer].step_us(cluster, reduced, updated, ranks, layout.shards)


def ranks_to_capture(build: Build, ranks_per_node: int) -> int:
    """Return a number of simulated ranks: of a node, or so many times more that gradients of one take little memory.

    Raises what :func:`trial` does.
    """
    model, _, _ = _built(build)
    shards = ranks_per_node
    while sum(param.nbytes for param in model.parameters()) > shards * LARGEST_SHARDS:
        shards *= 8
    return shards


def trial(
    build: Build, checkpointing: Checkpointing, cluster: Cluster, policy: MixedPrecisionPolicy, kind: str
) -> Trial:
    """Shard a model over the ranks of the default process group, and capture it.

    Raises:
        TypeError, ValueError: ``build`` does not return a model that is not sharded, and inputs whose forward gives
            a loss.
    """
    model, args, kwargs = _built(build)
    for parent, name, block in list(_blocks(model)):
        wrapped = _WRAPPED[checkpointing](block)
        parent._modules[name] = wrapped
        fully_shard(wrapped, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")  # memory that the system has promised; nothing touches it
    compile(model, regions="auto")
    found = trace(model, args, kwargs, _loss_of, SchedulePolicy(cluster=cluster), optimizer=kind)
    behind = (read.requests for name, read in found.scheduled if name == "backward")
    inside = (node for _, read in found.scheduled for node in nodes_inside(*read.graph.nodes))
    again = frozenset(r.param.name for requests in behind for r in requests if r.kind.is_ahead)
    return Trial(
        tokens=_tokens(args, kwargs),
        flops=sum(flops_of(node) or 0.0 for node in inside) / BATCH,
        traced=found,
        again=again,
        reduced_bytes=reduced_bytes(found.events),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
    )


def _built(build: Build) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return an unsharded model without memory, and inputs on the CPU."""
    with torch.device("meta"):
        result = build(BATCH)
    model, args, kwargs = model_and_inputs("build", result)
    if states_below([model]):
        raise unexpected("build", "a model that is not sharded", "one after fully_shard", "plan shards it")
    args, kwargs = map_tensors(lambda each: torch.zeros_like(each, device="cpu"), (args, kwargs))
    return model.to("meta"), args, kwargs


def _blocks(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the blocks to shard: the members of the outermost lists of modules, each with the list and its name."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            members = child.named_children()
            yield from ((child, name, each) for name, each in members if any(True for _ in each.parameters()))
        else:
            yield from _blocks(child)


def _loss_of(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor {[*loss.shape]}" if isinstance(loss, Tensor) else shown(output)
        do = "wrap the model in a module that computes the loss, so that its time and memory count"
        raise unexpected("build", "a model whose forward returns a loss, a tensor of one element", got, do)
    if not loss.requires_grad:
        raise unexpected("build", "a loss that requires a gradient", "one without: no parameter that it needs does")
    return loss


def _tokens(args: Any, kwargs: Any) -> int:
    """Return the tokens of a sequence: elements of the first integer input; 1 where there is none, as for images."""
    integers = (each for each in tensors_in((args, kwargs)) if "int" in str(each.dtype))  # no masks of bools
    return max(1, next((each.numel() // BATCH for each in integers if each.dim() > 1), 1))
