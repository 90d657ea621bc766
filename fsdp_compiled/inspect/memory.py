"""Estimates the peak memory of a training step on one rank, from its graphs and by arithmetic.

It must not know how a capture is drawn. A graph is read once, in order. A result takes memory from its node to the
last node that reads it. Which results have memory follows what Inductor does, by three rules:

- matrix products, attention, collectives and regions write their results;
- what lies between them is fused: a value has memory if one of these reads it or the graph returns it. Else whatever
  reads it computes it again, and what it was computed from lives until then;
- a reduction, and a value computed from more than four others, has memory also if something reads it behind a later
  product: Inductor does not compute those again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from ..expect import unexpected
from ..hooks.state import FSDPState
from ..passes.cost.compute import is_attention, is_view, packet_of, tensor_bytes, tensors_of
from ..passes.graph import nodes
from ..sharding.spec import AllGatherBucket, Bucket, ReductionBucket

Part = Literal[
    "parameters",  # shards, and parameters outside of units
    "optimizer state",
    "batch and buffers",
    "gradients",  # reduced
    "unsharded gradients",  # until their reduction has packed them
    "unsharded parameters",
    "packed buffers",  # of collectives
    "saved activations",  # what forward leaves for backward, but for parameters and logits
    "logits and loss",  # what the last product of forward makes, its copies and its gradient
    "temporaries",
]
StepKind = Literal["forward", "backward", "inference"]

# Tensors like each parameter that an optimizer keeps, and those that its step needs for a while, where it updates all
# parameters at a time. *Source:* torch/optim of torch 2.13.0: the defaults of each class, implementation "foreach".
OPTIMIZERS = {
    "adamw": (2, 1),
    "adam": (2, 1),
    "sgd": (0, 0),
    "sgd_momentum": (1, 0),
    "adagrad": (1, 1),
    "rmsprop": (1, 1),
}

# What PyTorch's caching allocator reserves beyond live bytes. *Source:* vllm-project/compressed-tensors pull request
# 587, which allows 5% where 2.4% were seen with a Llama of 70 billion parameters on a full 80 GB card. It can be much
# more: meta-pytorch/torchrec pull request 4584 reports 21%.
ALLOCATOR_FRACTION = 0.05

GLOO = "gloo's copy"
_REREAD = 4  # *Source:* realize_reads_threshold of torch._inductor.config


@dataclass(frozen=True)
class Allocation:
    """A tensor that is alive, by its parameter's or its node's name, or what a rank holds of a part."""

    name: str
    part: Part
    bytes: int


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
    """

    optimizer: str
    curve: tuple[MemoryLevel, ...]
    alive: tuple[Allocation, ...]

    @property
    def peak(self) -> MemoryLevel:
        """The highest level, the first of equal ones."""
        return max(self.curve, key=lambda level: level.bytes)

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


class _Event(NamedTuple):
    """Something is allocated while the node ``at`` of a graph runs, or freed, with -1 as its sign."""

    graph: str
    at: str
    key: Hashable  # the same when it is freed
    what: Allocation
    sign: int = 1


def step_memory(
    graphs: Sequence[tuple[StepKind, fx.Graph]], held: Sequence[Allocation], optimizer: str
) -> StepMemory:
    """Return the memory of a step that runs these graphs in turn.

    Args:
        graphs: as scheduled, in order; each backward belongs to the last forward that has none yet.
        held: what is there before the step and after it, see :func:`held_by`.
        optimizer: a key of :data:`OPTIMIZERS`.
    """
    events, forwards = [_Event("step", "start", each.name, each) for each in held], list[_GraphMemory]()
    for kind, graph in graphs:
        read = _GraphMemory(kind, graph, forwards.pop() if kind == "backward" and forwards else None)
        events += read.events()
        forwards += [read] if kind == "forward" else []
    gradients = sum(event.sign * event.what.bytes for event in events if event.what.part == "gradients")
    step = Allocation("intermediate results", "temporaries", OPTIMIZERS[optimizer][1] * gradients)
    events += [_Event("optimizer", "step", "step", step, sign) for sign in (1, -1)]
    levels, curve = list(accumulate(event.sign * event.what.bytes for event in events)), dict[tuple[str, str], int]()
    for event, level in zip(events, levels, strict=True):
        curve[event.graph, event.at] = max(level, curve.get((event.graph, event.at), 0))
    alive = dict[Hashable, Allocation]()
    for event in events[: levels.index(max(levels)) + 1]:
        alive[event.key] = event.what
        if event.sign < 0:
            del alive[event.key]
    largest = sorted(alive.values(), key=lambda each: -each.bytes)
    return StepMemory(optimizer, tuple(MemoryLevel(*at, level) for at, level in curve.items()), tuple(largest))


def held_by(
    model: nn.Module, states: Sequence[FSDPState], batch: Sequence[Tensor], optimizer: str
) -> list[Allocation]:
    """Return what a rank holds before a step. ValueError: ``optimizer`` is none of :data:`OPTIMIZERS`."""
    if optimizer not in OPTIMIZERS:
        raise unexpected("optimizer", f"one of {', '.join(OPTIMIZERS)}", repr(optimizer))
    params = [param for state in states for param in state.params]
    padded = {each.sharded_param: each.storage.layout.shard_numel * each.leaf.dtype.itemsize for each in params}
    padded |= {each.sharded_param: 0 for each in params if each.placement.offload is not None}  # on the host
    sizes = {param: padded.get(param, param.nbytes) for param in model.parameters()}
    trained = sum(size for param, size in sizes.items() if param.requires_grad)
    others = sum({id(each): each.nbytes for each in (*model.buffers(), *batch)}.values())
    return [
        Allocation("parameters", "parameters", sum(sizes.values())),
        Allocation("optimizer state", "optimizer state", OPTIMIZERS[optimizer][0] * trained),
        Allocation("batch and buffers", "batch and buffers", others),
    ]


class _GraphMemory:
    """What a graph allocates and frees, node by node. A key stands for memory, and a node has those that it lies in.

    Args:
        kind: of the graph.
        graph: with launches and waits.
        forward: of a backward: what left it the values that it begins with.
    """

    def __init__(self, kind: StepKind, graph: fx.Graph, forward: _GraphMemory | None = None) -> None:
        self.kind, self.graph, self._forward = kind, graph, forward
        self.memory = dict[Hashable, Allocation]()
        self._keys = defaultdict[fx.Node, tuple[Hashable, ...]](tuple)
        self._lists = dict[fx.Node, tuple[Hashable, ...]]()  # of nodes that return new tensors in a list
        self._allocated = defaultdict[fx.Node, list[Hashable]](list)  # by the node that does
        self._passing = defaultdict[fx.Node, int](int)  # bytes that are freed within their node
        self._last = dict[Hashable, fx.Node]()  # node that reads it
        self._level = dict[fx.Node, int]()  # how many products and collectives precede a node, one behind the other
        for node in graph.nodes:
            self._level[node] = max(map(self._level.__getitem__, node.all_input_nodes), default=0) + _is_alone(node)
        self._read_placeholders()
        for node in graph.nodes:
            if node.op == "call_function":
                self._keys[node] = tuple(
                    dict.fromkeys(key for each in node.all_input_nodes for key in self._keys[each])
                )
                self._read(node)
            self._last |= {key: node for source in node.all_input_nodes for key in self._keys[source]}
        (output,) = graph.find_nodes(op="output")
        self.returned = {key for source in output.all_input_nodes for key in self._keys[source]}
        for key in self.returned:
            self._call(key, "temporaries", "saved activations" if kind == "forward" else "gradients")

    def events(self) -> Iterator[_Event]:
        """Yield what is allocated and freed, in order."""
        dying = defaultdict[fx.Node, list[Hashable]](list)
        for key, node in self._last.items():
            dying[node] += [key] if key not in self.returned else []
        for node in self.graph.nodes:
            new, old = self._allocated[node], dying[node]
            first = self._overwritten(node, old, [self.memory[key].bytes for key in new])
            changes = [(key, -1) for key in first] + [(key, 1) for key in new]
            yield from (_Event(self.kind, node.name, key, self.memory[key], sign) for key, sign in changes)
            passing = Allocation(node.name, "temporaries", self._passing[node])
            yield from (_Event(self.kind, node.name, "passing", passing, sign) for sign in (1, -1) if passing.bytes)
            yield from (_Event(self.kind, node.name, key, self.memory[key], -1) for key in old if key not in first)
        for key in self._forward.returned if self._forward is not None else ():
            if key not in self._last:  # what the user has of it
                yield _Event(self.kind, node.name, key, self._forward.memory[key], -1)

    def _overwritten(self, node: fx.Node, old: Sequence[Hashable], sizes: list[int]) -> list[Hashable]:
        """Return what ``node`` frees or overwrites, of what it reads last, before results of these sizes need memory."""
        if nodes.is_wait(node):
            return [key for key in old if _keeps_buffer(nodes.bucket_of(node)) or self.memory[key].name == GLOO]
        found = list[Hashable]()
        for key in old if not _is_alone(node) else ():
            if (size := self.memory[key].bytes) in sizes:
                sizes.remove(size)
                found.append(key)
        return found

    def _read_placeholders(self) -> None:
        """Find what a graph begins with; parameters and what else outlives the step are counted apart."""
        given = self.graph.find_nodes(op="placeholder")
        saved = [node for node in given if "tangents" not in str(node.target)]
        for node in (node for node in given if node not in saved):
            self._allocate(node, node, [(node.name, "logits and loss", *map(tensor_bytes, tensors_of(node)))])
        if self._forward is not None:
            (output,) = self._forward.graph.find_nodes(op="output")
            for node, source in zip(reversed(saved), reversed(output.args[0]), strict=False):
                self._keys[node] = self._forward._keys[source]
                self.memory |= {key: self._forward.memory[key] for key in self._keys[node]}
                self._last |= dict.fromkeys(self._keys[node], node)

    def _allocate(self, node: fx.Node, owner: fx.Node, results: Iterable[tuple[str, Part, int]]) -> None:
        """Let ``node`` allocate what ``owner`` returns."""
        made = {(owner, index): Allocation(*result) for index, result in enumerate(results)}
        self.memory |= made
        self._last |= dict.fromkeys(made, node)
        self._allocated[node] += made
        self._keys[owner] = tuple(made)

    def _call(self, key: Hashable, before: Part, part: Part) -> None:
        """Let memory that belongs to part ``before`` belong to ``part``."""
        if self.memory[key].part == before:
            self.memory[key] = replace(self.memory[key], part=part)

    def _read(self, node: fx.Node) -> None:
        """Find where a result lies; until then a node has the keys of its inputs."""
        if nodes.is_getitem(node):
            if (made := self._lists.get(nodes.list_of(node))) and not nodes.is_part(node):
                self._keys[node] = (made[nodes.index_of(node)],)
        elif nodes.is_first_launch(node):
            self._launch(node, _buffers_of(node))
        elif node in self._lists:  # a wait, for what has its memory since the launch
            self._keys[node] = self._lists[node]
        elif nodes.is_wait(node) and nodes.stage_of(node) == nodes.bucket_of(node).stages[-1]:
            self._wait(node, node)
        elif not nodes.is_ours(node) and not _is_same_memory(node) and self._has_memory(node):
            part: Part = "logits and loss" if self._is_logits(node) else "temporaries"
            self._allocate(node, node, [(node.name, part, size) for size in map(tensor_bytes, tensors_of(node))])
            self._lists |= {node: self._keys[node]} if isinstance(node.meta.get("val"), (list, tuple)) else {}
            if (region := nodes.region_of(node)) is not None:
                self._passing[node] = _own_bytes(region)

    def _has_memory(self, node: fx.Node) -> bool:
        """Tell whether a result is written, by the rules above."""
        readers = list(_readers(node))
        if _is_alone(node) or any(reader.op == "output" or _is_alone(reader) for reader in readers):
            return True
        reduces = any(_count(each) > _count(node) for each in node.all_input_nodes)
        is_read_later = any(self._level[reader] > self._level[node] for reader in readers)
        return is_read_later and (reduces or len(self._keys[node]) > _REREAD)

    def _is_logits(self, node: fx.Node) -> bool:
        """Tell the last product's result, its copies and their gradients, before the first product of backward."""
        forward = self if self.kind == "forward" else self._forward
        level, count = forward._last_product if forward else (0, -1)
        is_near = self._level[node] >= level if forward is self else self._level[node] == 0
        return is_near and _count(node) == count

    @cached_property
    def _last_product(self) -> tuple[int, int]:
        """Its level, and the number of its elements."""
        products = [node for node in self.graph.nodes if _is_alone(node) and not nodes.is_ours(node)]
        return (self._level[products[-1]], _count(products[-1])) if products else (0, -1)

    def _launch(self, node: fx.Node, buffers: _Buffers) -> None:
        self._passing[node] = buffers.passing
        for key in self._keys[node] if not nodes.kind_of(node).is_ahead else ():
            self._call(key, "temporaries", "unsharded gradients")
        packed = {node.name: buffers.packed, GLOO: buffers.copied}
        self._allocate(node, node, [(name, "packed buffers", size) for name, size in packed.items() if size])
        if buffers.has_results:
            self._wait(next(iter(node.users)), node)

    def _wait(self, node: fx.Node, allocating: fx.Node) -> None:
        bucket, is_ahead = nodes.bucket_of(node), nodes.kind_of(node).is_ahead
        part: Part = "unsharded parameters" if is_ahead else "gradients"
        pairs = zip(bucket.layouts, bucket.params, strict=True)
        sizes = bucket.sizes if is_ahead else [each.shard_numel * param.dtype.itemsize for each, param in pairs]
        results = [(param.name, part, size) for param, size in zip(bucket.params, sizes, strict=True)]
        self._allocate(allocating, node, results)
        self._lists[node] = self._keys[node]


class _Buffers(NamedTuple):
    """Bytes that a launch allocates; ``has_results`` tells whether the results have their memory from then on."""

    packed: int  # until the last wait
    copied: int = 0  # by gloo, until it is done. *Source:* profiled with torch 2.13.0: it works on flat copies
    passing: int = 0  # freed within the launch
    has_results: bool = False


def _buffers_of(launch: fx.Node) -> _Buffers:
    """Return what the recipe of a bucket's collective allocates; of kinds that others define, one packed buffer."""
    bucket, on_cpu = nodes.bucket_of(launch), nodes.value_of(launch).device.type == "cpu"
    world, itemsize = bucket.spec.world, bucket.spec.dtype.itemsize
    mine = bucket.packed.numel * itemsize  # what this rank contributes, or gets of a reduce-scatter
    copied = world * mine if on_cpu and world > 1 else 0
    if isinstance(bucket, AllGatherBucket):
        is_cast = len(bucket.params) > 1 and any(param.dtype != bucket.spec.dtype for param in bucket.params)
        in_place = bucket.into_place or world == 1
        packed = mine * is_cast if in_place else world * mine
        copied += mine * (in_place and world > 1 and len(bucket.params) > 1)
        return _Buffers(packed + mine * (not bucket.inputs_persist), copied, has_results=in_place or not on_cpu)
    if isinstance(bucket, ReductionBucket):
        value = nodes.value_of(nodes.inputs_of(launch)[0])
        joined = world * bucket.packed.numel * value.itemsize if on_cpu and value.dtype != bucket.spec.dtype else 0
        return _Buffers(world * mine + mine * (world > 1), copied, passing=joined)
    return _Buffers(world * mine)


def _keeps_buffer(bucket: Bucket) -> bool:
    """Tell whether reduced gradients stay in the packed buffer, neither divided nor cast."""
    is_plain = isinstance(bucket, ReductionBucket) and bucket.spec.scaling.post_divide == 1.0
    return is_plain and {param.dtype for param in bucket.params} == {bucket.spec.dtype}


def _is_alone(node: fx.Node) -> bool:
    """Tell whether a node is a kernel of its own: a product, attention, a collective, a region."""
    is_heavy = node.op == "call_function" and (packet_of(node) in flop_registry or is_attention(node))
    return is_heavy or nodes.is_launch(node) or nodes.is_wait(node) or nodes.region_of(node) is not None


def _is_same_memory(node: fx.Node) -> bool:
    """Tell whether a result lies in the memory of what it is computed from."""
    if packet_of(node) is torch.ops.aten.reshape:
        return nodes.value_of(nodes.source_of(node)).is_contiguous()
    return packet_of(node) is torch.ops.aten._unsafe_view or is_view(node)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads a result, also through views of it."""
    for user in node.users:
        yield from _readers(user) if user.op == "call_function" and _is_same_memory(user) else (user,)


def _count(node: fx.Node) -> int:
    """Return the number of elements of a node's results."""
    return sum(tensor_bytes(tensor) // tensor.element_size() for tensor in tensors_of(node))


def _own_bytes(region: fx.Graph) -> int:
    """Return the most that a region needs at a time, without what it is given and what it returns."""
    read = _GraphMemory("inference", region)
    levels = accumulate(event.sign * event.what.bytes for event in read.events())
    return max(levels, default=0) - sum(read.memory[key].bytes for key in read.returned)
