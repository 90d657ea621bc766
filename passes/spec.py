"""The rules that every graph of ours keeps, checked before and after each pass in tests and under a debug flag.

A rule is a name and a function that yields what breaks it; ``verify`` raises for the first. The rules know nodes,
not parameters: they hold for any schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx

from . import ir


class GraphError(RuntimeError):
    """A graph breaks a rule; a pass, ours or another, has a bug."""


@dataclass(frozen=True)
class Rule:
    """A name, and a function that yields one sentence for each place where a graph breaks the rule."""

    name: str
    broken: Callable[[fx.Graph], Iterator[str]]


def verify(graph: fx.Graph, where: str = "graph") -> None:
    """Check ``graph`` against every rule.

    Args:
        graph: an FX graph at any stage between tracing and Inductor's lowering.
        where: what the message begins with, for example the name of the pass that ran last.

    Raises:
        GraphError: a rule is broken; the message names the node.
    """
    for rule in RULES:
        for sentence in rule.broken(graph):
            raise GraphError(f"{where}: {rule.name}: {sentence}")


def _used_before_defined(graph: fx.Graph) -> Iterator[str]:
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                yield f"{node.name} uses {source.name}, which stands after it; move {node.name} behind it"
        seen.add(node)


def _launch_without_its_wait(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if ir.begins(node):
            waits = [user for user in node.users if ir.awaits(user)]
            if len(waits) != 1:
                yield f"{node.name} has {len(waits)} waits, expected one"
            for user in set(node.users) - set(waits):
                yield f"{user.name} reads {node.name} without waiting for it; read {node.name}'s wait_tensor"


def _wait_without_a_launch(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if ir.is_wait(node) and not ir.is_launch(ir.source_of(node)):
            yield f"{node.name} waits for {ir.source_of(node).name}, which launches nothing"


def _bucket_that_does_not_tile(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if ir.is_bucket_split(node):
            row, sizes, dim = ir.source_of(node), node.args[1], node.args[2]
            length = ir.value_of(row).shape[dim]
            if sum(sizes) != length or any(size < 0 for size in sizes):
                yield f"{node.name} cuts {row.name} of length {length} into {list(sizes)}, which do not tile it"
            for user in node.users:
                if not 0 <= user.args[1] < len(sizes):
                    yield f"{user.name} takes piece {user.args[1]} of {len(sizes)}"


RULES = (
    Rule("order", _used_before_defined),
    Rule("launch and wait", _launch_without_its_wait),
    Rule("wait and launch", _wait_without_a_launch),
    Rule("bucket offsets", _bucket_that_does_not_tile),
)
