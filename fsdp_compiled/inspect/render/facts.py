"""What a capture says in words: headline, figures of graphs and collectives, verdicts.

Every format prints these; it must not know how.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from ...passes.policy import SchedulePolicy
from ..records import CapturedGraph, CapturedModel, Collective
from . import figures

SHORTEST_US = 0.01  # less is not shown; rounding leaves less between two spans


def about(capture: CapturedModel) -> str:
    """Return how large the captured model is, and on what it runs, in a line."""
    count = f"{capture.parameters:,} parameters on {figures.counted(capture.world, 'rank')}"
    return f"{count}, torch {capture.torch_version}, cluster {capture.cluster.name}"


def schedule(policy: SchedulePolicy) -> dict[str, str]:
    """Return the fields of a policy, without the cluster, which :func:`about` names."""

    def size(value: int | str) -> str:
        return value if isinstance(value, str) else figures.size(value)

    return {
        "bucket": size(policy.bucket),
        "prefetch": str(policy.prefetch),
        "in flight": size(policy.in_flight_bytes),
        "keep unsharded": size(policy.keep_unsharded_bytes),
    }


def titled(graphs: Sequence[CapturedGraph]) -> list[tuple[str, CapturedGraph]]:
    """Return each graph with a name: its kind, numbered from 1 where there are several of a kind."""
    kinds, found = [graph.kind for graph in graphs], []
    for end, graph in enumerate(graphs, start=1):
        number = f" {kinds[:end].count(graph.kind)}" if kinds.count(graph.kind) > 1 else ""
        found.append((f"{graph.kind}{number}", graph))
    return found


def graph_facts(graph: CapturedGraph) -> dict[str, str]:
    """Return the figures of a graph."""
    count = Counter[str](collective.copies for collective in graph.collectives)
    places = {"compute": "on the compute stream", "side stream": "on a side stream", "none": "not needed"}
    copies = (f"{count[kind]} {place}" for kind, place in places.items() if count[kind])
    return {
        "collectives": str(len(graph.collectives)),
        "bytes": figures.size(sum(collective.bytes for collective in graph.collectives)),
        "compute": figures.duration(graph.compute_us),
        "communication": figures.duration(graph.communication_us),
        "exposed": figures.duration(graph.exposed_us),
        "peak unsharded": figures.size(graph.peak_unsharded_bytes),
        "bound": figures.size(graph.bound_bytes),
        "kept unsharded": figures.size(graph.kept_bytes),
        "copies": ", ".join(copies) or "none",
    }


def words(kind: str) -> str:
    return kind.replace("_", "-")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_exposed(collective: Collective) -> bool:
    """Tell whether compute waits for it long enough to show."""
    return collective.exposed_us >= SHORTEST_US


def collective_facts(number: int, collective: Collective) -> dict[str, str]:
    """Return the figures of a collective, without its parameters."""
    return {
        "#": str(number),
        "kind": words(collective.kind),
        "dtype": dtype_name(collective.dtype),
        "size": figures.size(collective.bytes),
        "ranks": str(collective.world),
        "launch": str(collective.launch),
        "wait": str(collective.wait),
        "use": str(collective.first_use),
        "estimate": figures.duration(collective.estimate_us),
        "exposed": figures.duration(collective.exposed_us) if is_exposed(collective) else "hidden",
    }


def params(names: Sequence[str], width: int) -> str:
    """Return how many parameters there are and, in at most ``width`` characters, which."""
    count = f"{len(names)}: "
    return count + figures.abbreviate(names, width - len(count))


def verdicts(graph: CapturedGraph) -> list[str]:
    """Return why collectives are exposed, for how long, and which these are, the costliest reason first."""
    found = defaultdict[str, list[int]](list)
    for number, collective in enumerate(graph.collectives):
        if is_exposed(collective):
            found[collective.verdict].append(number)
    costs_us = {text: sum(graph.collectives[n].exposed_us for n in numbers) for text, numbers in found.items()}
    ordered = sorted(found, key=lambda text: (-costs_us[text], text))
    return [f"{figures.duration(costs_us[text])} {text} ({figures.indices(found[text])})" for text in ordered]
