"""What a graph computes at a time, and how long each result takes memory: by rules that follow what Inductor does.

A result takes memory from its node to the last node that reads it:

- matrix products, attention, collectives, regions and what scatters write their results;
- what lies between them is fused: a value has memory if one of these reads it or the graph returns it. Else whatever
  reads it computes it again, and what it was computed from lives until then;
- a reduction, a value computed from more than four others and, on the CPU, one that takes an exponential and that
  several read, have memory also if something reads them behind a later product: Inductor does not compute these
  again;
- values that ``fusion`` puts into one kernel are computed at the same time; what it alone reads has no memory;
- freed memory is kept for the next result of its size and dtype, unless that would raise the peak; a backward that
  calls regions keeps of what it is given only what no region has to do with.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import fx

from ..passes.cost.compute import (
    SCATTERS,
    is_view,
    node_bytes,
    packet_of,
    results_of,
    tensor_bytes,
    tensors_among,
    tensors_of,
)
from ..passes.graph import nodes
from ..passes.unalias import may_be_overwritten
from .buffers import GLOO, Buffers, buffers_of, keeps_buffer
from .fusion import FusedKernel, elements, in_order, is_alone, kernels_of

Part = Literal[
    "parameters",  # shards, and parameters outside of units
    "optimizer state",  # and what its step needs for a while
    "batch and buffers",
    "gradients",  # reduced
    "unsharded gradients",  # until their reduction has packed them
    "unsharded parameters",
    "packed buffers",  # of collectives
    "saved activations",  # what forward leaves for backward, but for parameters and logits
    "logits and loss",  # what the last product of forward makes, its copies and its gradient
    "temporaries",
]

_REREAD = 4  # *Source:* realize_reads_threshold of torch._inductor.config
_COSTLY = (torch.ops.aten.exp, torch.ops.aten.sigmoid)  # *Source:* StorageBox.should_realize_on_reuse of torch 2.13.0
_LOOKUPS = (torch.ops.aten.embedding, torch.ops.aten.index, torch.ops.aten.index_select, torch.ops.aten.gather)


@dataclass(frozen=True)
class Allocation:
    """A tensor that is alive, by its parameter's or its node's name, or what a rank holds of a part."""

    name: str
    part: Part
    bytes: int


class Event(NamedTuple):
    """Something is allocated while the node ``at`` of a graph runs, or freed, with -1 as its sign."""

    graph: str
    at: str
    key: Hashable  # the same when it is freed
    what: Allocation
    sign: int = 1


class GraphMemory:
    """What a graph allocates and frees, node by node. A key stands for memory; a node has those that it lies in."""

    def __init__(
        self,
        kind: str,
        graph: fx.Graph,  # with launches and waits
        forward: GraphMemory | None = None,  # of a backward: what left it the values that it begins with
        copies: bool = False,  # whether collectives work on copies of their buffers
        given: Mapping[fx.Node, int] | None = None,  # of a region: placeholders that it frees when read, with bytes
    ) -> None:
        self.kind, self.graph, self._copies = kind, graph, copies
        self.memory = dict[Hashable, Allocation]()
        self._keys = defaultdict[fx.Node, tuple[Hashable, ...]](tuple)
        self._inputs = dict[fx.Node, frozenset[Hashable]]()
        self._lists = dict[fx.Node, tuple[Hashable, ...]]()  # of nodes that return new tensors in a list
        self._allocated = defaultdict[fx.Node, list[Hashable]](list)  # by the node that does
        self._last = dict[Hashable, fx.Node]()  # node that reads it
        self._protected = set[Hashable]()  # what a backward is given and may not write over
        self._outliving = set[Hashable]()  # inputs that are counted apart; kernels that read one of them may be one
        self._costly = set[fx.Node]()  # values without memory that take an exponential to compute, on the CPU
        self._level = dict[fx.Node, int]()  # how many products and collectives precede a node, one behind the other
        for node in graph.nodes:
            self._level[node] = max(map(self._level.__getitem__, node.all_input_nodes), default=0) + is_alone(node)
        products = [node for node in graph.nodes if is_alone(node) and not nodes.is_ours(node)]
        last = (self._level[products[-1]], elements(products[-1])) if products else (0, -1)
        self._logits: tuple[int, int] = forward._logits if forward else last  # level and elements
        self._read_placeholders(forward, given or {})
        for node in graph.nodes:
            if node.op == "call_function":
                inputs = (key for each in node.all_input_nodes for key in self._keys[each])
                self._keys[node] = tuple(dict.fromkeys(inputs))
                self._inputs[node] = frozenset(self._keys[node])
                on_cpu = any(tensor.device.type == "cpu" for tensor in tensors_of(node))
                if on_cpu and (packet_of(node) in _COSTLY or not self._costly.isdisjoint(node.all_input_nodes)):
                    self._costly.add(node)
                self._read(node)
        (output,) = graph.find_nodes(op="output")
        self.returned = self._outliving.union(*(self._keys[source] for source in output.all_input_nodes))
        made = ((node, keys) for node, keys in self._allocated.items() if node.op == "call_function")
        self._kernel_of = kernels_of(graph, {node: self._inputs[node].union(keys) for node, keys in made})
        self._readers = defaultdict[Hashable, list[fx.Node | FusedKernel]](list)
        self._order = in_order(graph, self._kernel_of)
        for node in self._order:
            end = self._kernel_of[node].members[-1] if node in self._kernel_of else node
            self._last |= {key: end for source in node.all_input_nodes for key in self._keys[source]}
        self._forget_local()
        self._look_into_regions()
        for key in self.returned:
            self._call(key, "temporaries", "saved activations" if kind == "forward" else "gradients")

    def _forget_local(self) -> None:
        """Give no memory to a value that only the kernel reads by which it is computed."""
        for node in self._order:
            if node in self._allocated or is_alone(node) or nodes.is_ours(node):
                for key in self._inputs.get(node, ()):
                    self._readers[key].append(self._kernel_of.get(node, node))
        for node, kernel in self._kernel_of.items():
            for key in [key for key in self._allocated[node] if key not in self.returned]:
                if set(self._readers[key]) == {kernel}:
                    self._allocated[node].remove(key)
                    del self._last[key]

    def _look_into_regions(self) -> None:
        """Let each region have what it needs meanwhile, beyond what it is given and what it returns."""
        own_bytes = cache(_own_bytes)  # equal blocks call one region
        for node in self.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
            region = nodes.region_module_of(node).graph
            keys = [self._keys.get(operand, ()) for operand in nodes.operands_of(node)]
            often = Counter(key for each in keys for key in each)
            freed = {key for key, count in often.items() if self._last[key] is node and count == 1} - self.returned
            pairs = zip(region.find_nodes(op="placeholder"), keys, strict=True)
            given = ((each, self.memory[key[0]].bytes) for each, key in pairs if len(key) == 1 and key[0] in freed)
            self.memory[node] = Allocation(node.name, "temporaries", own_bytes(region, tuple(given)))
            self._last[node] = node
            self._allocated[node].append(node)

    def events(self) -> Iterator[Event]:
        """Yield what is allocated and freed, in order."""
        freed = defaultdict[fx.Node, list[Hashable]](list)
        for key, node in self._last.items():
            freed[node] += [key] if key not in self.returned else []
        reused = self._reuse(freed)
        for node in self._order:
            new, old = self._allocated[node], freed[node]
            first = [key for key in old if key in reused or self._is_free_before(key, node)]
            rest = [key for key in old if key not in first]
            for sign, keys in ((-1, first), (1, new), (-1, rest)):
                yield from (Event(self.kind, node.name, key, self.memory[key], sign) for key in keys)

    def traffic(self) -> dict[fx.Node, int]:
        """Return the bytes that each fused kernel reads and writes, by the node whose result it writes.

        What several values of one kernel read counts for each of them; a lookup reads as much as it returns.
        """
        found, read = dict[fx.Node, int](), dict[fx.Node, frozenset[fx.Node]]()
        for node in self.graph.nodes:
            is_list = nodes.is_getitem(node) and nodes.list_of(node) in self._lists
            is_source = node.op != "call_function" or is_alone(node) or is_list or packet_of(node) in _LOOKUPS
            inputs = frozenset[fx.Node]().union(*(read[source] for source in node.all_input_nodes))
            is_written = node in self._allocated and not is_alone(node) and node.op == "call_function"
            if is_written:
                own = inputs if not is_source else {node}
                found[node] = sum(map(node_bytes, own)) + node_bytes(node)
            read[node] = frozenset({node}) if is_source or is_written else inputs
        return found

    def _is_free_before(self, key: Hashable, node: fx.Node) -> bool:
        """Tell whether ``node`` frees what it reads last before its results need memory."""
        return nodes.is_wait(node) and (keeps_buffer(nodes.bucket_of(node)) or self.memory[key].name == GLOO)

    def _reuse(self, freed: dict[fx.Node, list[Hashable]]) -> set[Hashable]:
        """Free later what Inductor keeps for the next result of its size and dtype, and return what it keeps.

        A fused kernel also overwrites what it reads last. Inductor does not know of packed buffers, and keeps nothing
        that would raise the peak that it knows of.
        """
        order, reused = self._order, set[Hashable]()
        made = {key for keys in self._allocated.values() for key in keys}
        size_of = {key: 0 if each.part == "packed buffers" else each.bytes for key, each in self.memory.items()}
        now, levels = sum(size_of[key] for key in self._last if key not in made), list[int]()
        for node in order:
            levels.append(now := now + sum(map(size_of.__getitem__, self._allocated[node])))
            now -= sum(map(size_of.__getitem__, freed[node]))
        peak, pool = max(levels), defaultdict[tuple[int, torch.dtype | None], list[tuple[int, Hashable]]](list)
        for index, node in enumerate(order):
            unknown = ("packed buffers", "unsharded parameters")
            left = [key for key in freed[node] if self.memory[key].part not in unknown and key not in self._protected]
            kernel = self._kernel_of.get(node, node)
            # What one value alone of a kernel reads can be written over by it.
            early = [key for key in left if not is_alone(node) and self._readers[key].count(kernel) < 2]
            for key in early:
                pool[size_of[key], _dtype_of(key)].append((index, key))
            for key in self._allocated[node] if node not in self._lists and not nodes.is_ours(node) else ():
                fitting = pool[size_of[key], _dtype_of(key)]
                at, old = fitting.pop() if fitting else (index, None)
                if old is not None and (index - at < 2 or max(levels[at + 1 : index]) + size_of[old] <= peak):
                    levels[at + 1 : index] = [level + size_of[old] for level in levels[at + 1 : index]]
                    freed[order[at]].remove(old)
                    freed[node].append(old)
                    reused.add(old)
            for key in (key for key in left if key not in early):
                pool[size_of[key], _dtype_of(key)].append((index, key))
        return reused

    def _read_placeholders(self, forward: GraphMemory | None, given: Mapping[fx.Node, int]) -> None:
        """Find what a graph begins with; parameters and what else outlives the step are counted apart."""
        saved = list[fx.Node]()
        for node in self.graph.find_nodes(op="placeholder"):
            if self.kind == "backward" and "tangents" in str(node.target):
                self._allocate(node, node, [(node.name, "logits and loss", node_bytes(node))])
            elif node in given:
                self._allocate(node, node, [(node.name, "unsharded parameters", given[node])])
            else:
                self._keys[node] = ((node, 0),)
                self.memory[node, 0] = Allocation(node.name, "parameters", 0)
                self._outliving.add((node, 0))
                saved.append(node)
        if forward is not None:
            (left,), (end,) = (graph.find_nodes(op="output") for graph in (forward.graph, self.graph))
            self.memory |= forward.memory
            self._outliving |= forward._outliving
            self._last |= dict.fromkeys(forward.returned, end)  # unless something reads it
            pairs = zip(reversed(saved), reversed(left.args[0]), strict=False)
            self._keys |= {node: forward._keys[source] for node, source in pairs}
            if self.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
                given_away = (node for node in saved if not may_be_overwritten(node))
                self._protected.update(key for node in given_away for key in self._keys[node])

    def _allocate(self, node: fx.Node, owner: fx.Node, results: Iterable[tuple[str, Part, int]]) -> None:
        """Let ``node`` allocate what ``owner`` returns."""
        made: dict[Hashable, Allocation] = {(owner, i): Allocation(*result) for i, result in enumerate(results)}
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
            self._launch(node, buffers_of(node, self._copies))
        elif node in self._lists:  # a wait, for what has its memory since the launch
            self._keys[node] = self._lists[node]
        elif nodes.is_wait(node) and nodes.stage_of(node) == nodes.bucket_of(node).stages[-1]:
            self._wait(node, node)
        elif nodes.operator_of(node) == "keep_grad":  # stands for the sum, which a step of micro-batches begins
            size = nodes.value_of(nodes.source_of(node)).numel() * nodes.spec_of(node).reduction.dtype.itemsize
            self._allocate(node, node, [(node.name, "unsharded gradients", size)])
        elif not nodes.is_ours(node) and not _is_same_memory(node) and self._has_memory(node):
            part: Part = "logits and loss" if self._is_logits(node) else "temporaries"
            self._allocate(node, node, [(node.name, part, sum(map(tensor_bytes, each))) for each in _values_of(node)])
            self._lists |= {node: self._keys[node]} if isinstance(results_of(node), (list, tuple)) else {}
            self._costly.discard(node)

    def _has_memory(self, node: fx.Node) -> bool:
        """Tell whether a result is written, by the rules above."""
        readers = list(_readers(node))
        if is_alone(node) or packet_of(node) in SCATTERS:
            return True
        if any(reader.op == "output" or is_alone(reader) for reader in readers):
            return True
        reduces = any(elements(each) > elements(node) for each in node.all_input_nodes)
        is_costly = node in self._costly and len(node.users) > 1
        is_read_later = any(self._level[reader] > self._level[node] for reader in readers)
        return is_read_later and (reduces or is_costly or len(self._keys[node]) > _REREAD)

    def _is_logits(self, node: fx.Node) -> bool:
        """Tell the last product's result, its copies and their gradients, before the first product of backward."""
        level, size = self._logits
        return elements(node) == size and (
            self._level[node] >= level if self.kind == "forward" else not self._level[node]
        )

    def _launch(self, node: fx.Node, buffers: Buffers) -> None:
        for key in self._keys[node] if not nodes.kind_of(node).is_ahead else ():
            self._call(key, "temporaries", "unsharded gradients")
        packed = {node.name: buffers.packed, GLOO: buffers.copied}
        self._allocate(node, node, [(name, "packed buffers", size) for name, size in packed.items() if size])
        if buffers.has_results:
            self._wait(next(iter(node.users)), node)

    def _wait(self, node: fx.Node, allocating: fx.Node) -> None:
        bucket, is_ahead = nodes.bucket_of(node), nodes.kind_of(node).is_ahead
        part: Part = "unsharded parameters" if is_ahead else "gradients"
        itemsizes = (param.gradient_dtype.itemsize for param in bucket.params)
        is_there = "copy_to_host" not in bucket.stages
        of_shards = (is_there * each.shard_numel * size for each, size in zip(bucket.layouts, itemsizes, strict=True))
        sizes = bucket.sizes if is_ahead else of_shards
        results = [(param.name, part, size) for param, size in zip(bucket.params, sizes, strict=True)]
        self._allocate(allocating, node, results)
        self._lists[node] = self._keys[node]


def _is_same_memory(node: fx.Node) -> bool:
    """Tell whether a result lies in the memory of what it is computed from."""
    if packet_of(node) is torch.ops.aten.reshape:
        return nodes.value_of(nodes.source_of(node)).is_contiguous()
    return str(packet_of(node)) == "aten._unsafe_view" or is_view(node)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads a result, also through views of it."""
    for user in node.users:
        yield from _readers(user) if user.op == "call_function" and _is_same_memory(user) else (user,)


def _values_of(node: fx.Node) -> list[list[torch.Tensor]]:
    """Return the tensors of each result, none for what is no tensor, in the order in which they are taken out."""
    value = results_of(node)
    return [tensors_among(each) for each in (value if isinstance(value, (list, tuple)) else [value])]


def _dtype_of(key: Hashable) -> torch.dtype | None:
    """Return the dtype of the tensor that a key stands for, if it is one."""
    tensors = _values_of(key[0])[key[1]] if isinstance(key, tuple) else []  # none of what a region needs meanwhile
    return tensors[0].dtype if tensors else None


def _own_bytes(region: fx.Graph, given: tuple[tuple[fx.Node, int], ...]) -> int:
    """Return the most that a region needs at a time, without what it is given and what it returns."""
    read = GraphMemory("inference", region, given=dict(given))
    levels = accumulate(event.sign * event.what.bytes for event in read.events())
    others = sum(read.memory[key].bytes for key in read.returned) + sum(size for _, size in given)
    return max(0, max(levels, default=0) - others)
