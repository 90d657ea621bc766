"""The rules that every graph of ours keeps, whatever its schedule; ``SchedulePolicy(verify=True)`` checks them.

A rule is a name and a function that yields a sentence for each place that breaks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from .graph import nodes


class GraphError(RuntimeError):
    """A graph breaks a rule; a pass, ours or another, has a bug."""


def verify(graph: fx.Graph, where: str = "graph") -> None:
    """Check ``graph``, at any stage between tracing and Inductor's lowering, against every rule.

    Raises:
        GraphError: a rule is broken; the message begins with ``where``, the pass that ran last, and names the node.
    """
    for rule, broken in RULES.items():
        for sentence in broken(graph):
            raise GraphError(f"{where}: {rule}: {sentence}")


def _used_before_defined(graph: fx.Graph) -> Iterator[str]:
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                yield f"{node.name} uses {source.name}, which stands after it; move {node.name} behind it"
        seen.add(node)


def _launch_without_its_wait(graph: fx.Graph) -> Iterator[str]:
    for node in nodes.launches_of(graph):
        waits = [user for user in node.users if nodes.is_wait(user)]
        if len(waits) != 1:
            yield f"{node.name} has {len(waits)} waits, expected one"
        for user in set(node.users) - set(waits):
            yield f"{user.name} reads {node.name} without waiting for it; read the results of {node.name}'s wait"


def _wait_without_a_launch(graph: fx.Graph) -> Iterator[str]:
    for node in nodes.waits_of(graph):
        launch = nodes.source_of(node)
        if not nodes.is_launch(launch):
            yield f"{node.name} waits for {launch.name}, which launches nothing"
        elif launch.args[1] != node.args[1]:
            yield f"{node.name} waits for another bucket than {launch.name} launches"


def _stage_out_of_turn(graph: fx.Graph) -> Iterator[str]:
    for node in (node for node in nodes.launches_of(graph) if not nodes.is_first_launch(node)):
        stages, (handle,) = nodes.bucket_of(node).stages, nodes.inputs_of(node)
        before = stages[stages.index(nodes.stage_of(node)) - 1]
        wait = nodes.list_of(handle) if nodes.is_getitem(handle) else handle
        if not nodes.is_wait(wait) or nodes.stage_of(wait) != before:
            yield f"{node.name} continues {handle.name}, expected the handle of a wait_{before}"


def _bucket_of_other_tensors(graph: fx.Graph) -> Iterator[str]:
    for node in filter(nodes.is_first_launch, nodes.launches_of(graph)):
        bucket, given = nodes.bucket_of(node), nodes.inputs_of(node)
        if len(given) != len(bucket.params):
            yield f"{node.name} takes {len(given)} tensors for {len(bucket.params)} parameters"
            continue
        for source, param, layout in zip(given, bucket.params, bucket.layouts, strict=True):
            numel = layout.shard_numel if nodes.kind_of(node).is_ahead else layout.numel
            if (got := nodes.value_of(source).numel()) != numel:
                yield f"{node.name} takes {source.name} of {got} elements for {param.name}, expected {numel}"


def _result_that_is_not_there(graph: fx.Graph) -> Iterator[str]:
    for node in nodes.waits_of(graph):
        for source in (node, *filter(nodes.is_part, nodes.getitems_of(node))):
            for user in source.users:
                if not nodes.is_getitem(user):
                    yield f"{user.name} reads {source.name} as a tensor; take one of its results"
                elif not nodes.is_part(user) and not 0 <= user.args[1] < len(source.meta["val"]):  # type: ignore[operator]
                    yield f"{user.name} takes result {user.args[1]} of {len(source.meta['val'])}"


def _contract_elsewhere(graph: fx.Graph) -> Iterator[str]:
    for node in nodes.launches_of(graph)[1:]:
        if nodes.contract_at(node) is not None:
            yield f"{node.name} carries the graph's contract, but launches after another"


RULES: dict[str, Callable[[fx.Graph], Iterator[str]]] = {
    "order": _used_before_defined,
    "launch and wait": _launch_without_its_wait,
    "wait and launch": _wait_without_a_launch,
    "stages": _stage_out_of_turn,
    "bucket": _bucket_of_other_tensors,
    "contract": _contract_elsewhere,
    "results": _result_that_is_not_there,
}
