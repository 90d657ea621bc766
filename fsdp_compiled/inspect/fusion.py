"""Which values Inductor computes by one kernel, by rules that follow what its scheduler does.

Products, attention, collectives and regions are kernels of their own. Two other values are fused if they have one
size, one reads the other or both read the same memory, they are near each other, no collective lies between them, and
nothing that has memory has to be computed behind the one and before the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from ..passes.cost.compute import tensor_bytes, tensors_of
from ..passes.graph import nodes

_NEAR = 64  # *Source:* Scheduler.are_long_distant_nodes of torch 2.13.0


@dataclass(eq=False)
class FusedKernel:
    """Values that one kernel computes. The masks have a bit for each node between two collectives."""

    members: list[fx.Node]
    size: int  # elements of each
    touches: set[Hashable]  # memory that it reads, and its own
    own: int
    needs: int  # what has to be computed before, and its own
    feeds: int  # what needs it, and its own

    def add(self, other: FusedKernel) -> None:
        """Compute what ``other`` does, too."""
        self.members += other.members
        self.touches |= other.touches
        self.own, self.needs, self.feeds = self.own | other.own, self.needs | other.needs, self.feeds | other.feeds

    def fits(self, other: FusedKernel, computed: int) -> bool:
        """Tell whether the two fit by size and memory, and nothing ``computed`` by itself lies between them."""
        if self.size != other.size or self.touches.isdisjoint(other.touches):
            return False
        between = (self.feeds & other.needs) | (other.feeds & self.needs)
        return not between & computed & ~(self.own | other.own)


def kernels_of(graph: fx.Graph, touched: Mapping[fx.Node, Set[Hashable]]) -> dict[fx.Node, FusedKernel]:
    """Return, for each value that is computed together with others, the kernel that does it.

    Args:
        graph: with launches and waits.
        touched: the nodes that have memory of their own, with this memory and what they read.
    """
    # A list: groupby asks once more at the end, where a graph's own iterator begins anew.
    runs = groupby(list(graph.nodes), key=lambda node: nodes.is_launch(node) or nodes.is_wait(node))
    kernels = (kernel for is_collective, run in runs if not is_collective for kernel in _fused(list(run), touched))
    return {member: kernel for kernel in kernels for member in kernel.members}


def in_order(graph: fx.Graph, kernel_of: Mapping[fx.Node, FusedKernel]) -> list[fx.Node]:
    """Return all nodes in order, those of a kernel behind each other where all that it reads is there."""
    found, begun = dict[fx.Node, None](), set[fx.Node]()

    def put(node: fx.Node) -> None:
        if node in begun:
            return
        together = kernel_of[node].members if node in kernel_of else [node]
        begun.update(together)
        for source in (source for member in together for source in member.all_input_nodes):
            put(source)
        found.update(dict.fromkeys(together))

    for node in graph.nodes:
        put(node)
    return list(found)


def is_alone(node: fx.Node) -> bool:
    """Tell whether a node is a kernel of its own: a product, attention, a collective, a region."""
    return nodes.is_heavy(node) or nodes.is_launch(node) or nodes.is_wait(node)


def elements(node: fx.Node) -> int:
    """Return the number of elements of a node's results."""
    return sum(tensor_bytes(tensor) // tensor.element_size() for tensor in tensors_of(node))


def _fused(together: Sequence[fx.Node], touched: Mapping[fx.Node, Set[Hashable]]) -> Iterator[FusedKernel]:
    """Yield the kernels among nodes that lie between two collectives."""
    bit = {node: 1 << place for place, node in enumerate(together)}
    needs, feeds, computed = dict(bit), dict(bit), 0
    place, place_of = 0, dict[fx.Node, int]()  # as Inductor counts: what has memory, and results taken out of lists
    for node in together:
        for source in node.all_input_nodes:
            needs[node] |= needs.get(source, 0)
        is_computed = node in touched or is_alone(node)
        computed |= bit[node] if is_computed else 0
        place_of[node] = place = place + (is_computed or nodes.is_getitem(node))
    for node in reversed(together):
        for user in node.users:
            feeds[node] |= feeds.get(user, 0)
    kernels = list[FusedKernel]()
    for node in (node for node in together if node in touched and not is_alone(node)):
        kernel = FusedKernel([node], elements(node), set(touched[node]), bit[node], needs[node], feeds[node])
        for other in kernels[::-1]:  # the nearest first, as Inductor ranks what shares as much memory
            if place_of[node] - place_of[other.members[0]] <= _NEAR and other.fits(kernel, computed):
                kernels.remove(other)
                other.add(kernel)
                kernel = other
        kernels.append(kernel)
    for kernel in kernels:
        kernel.members.sort(key=bit.__getitem__)
    yield from (kernel for kernel in kernels if len(kernel.members) > 1)
