"""What a capture says in words: headline, figures of graphs and collectives, verdicts.

Every format prints these; it must not know how.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

import torch

from ...passes.policy import SchedulePolicy
from ..records import CapturedGraph, CapturedModel, Collective
from . import figures
from .names import abbreviate

SHORTEST_US = 0.01  # less is not shown; rounding leaves less between two spans
LEFT = {"kind", "dtype"}  # of the figures of a collective, those that are words

Fact = tuple[str, str]
"""A label and its value."""


def headline(capture: CapturedModel) -> str:
    """Return what was captured where, in a line."""
    return f"{capture.model}: {about(capture)}"


def about(capture: CapturedModel) -> str:
    """Return the headline without the model's name."""
    ranks = "1 rank" if capture.world == 1 else f"{capture.world} ranks"
    count = f"{capture.parameters:,} parameters"
    return f"{count} on {ranks}, torch {capture.torch_version}, cluster {capture.cluster.name}"


def schedule(policy: SchedulePolicy) -> list[Fact]:
    """Return the fields of a policy, without the cluster, which the headline names."""
    return [
        (field.name.removesuffix("_bytes").replace("_", " "), _decision(field.name, getattr(policy, field.name)))
        for field in fields(policy)
        if field.name != "cluster"
    ]


def _decision(field: str, value: object) -> str:
    return figures.size(value) if isinstance(value, int) and field != "prefetch" else str(value)


def graph_breaks(capture: CapturedModel) -> str:
    """Return how many graph breaks there were."""
    return f"graph breaks: {len(capture.graph_breaks) or 'none'}"


def titles(graphs: Sequence[CapturedGraph]) -> list[str]:
    """Return a name for each graph: its kind, numbered from 1 where there are several of a kind."""
    kinds = [graph.kind for graph in graphs]
    numbers = [kinds[:end].count(kind) for end, kind in enumerate(kinds, start=1)]
    return [f"{kind} {n}" if kinds.count(kind) > 1 else kind for kind, n in zip(kinds, numbers, strict=True)]


def graph_facts(graph: CapturedGraph) -> list[Fact]:
    """Return the figures of a graph."""
    return [
        ("collectives", str(len(graph.collectives))),
        ("bytes", figures.size(sum(collective.bytes for collective in graph.collectives))),
        ("compute", figures.duration(graph.compute_us)),
        ("communication", figures.duration(graph.communication_us)),
        ("exposed", figures.duration(graph.exposed_us)),
        ("peak unsharded", figures.size(graph.peak_unsharded_bytes)),
        ("bound", figures.size(graph.bound_bytes)),
        ("kept unsharded", figures.size(graph.kept_bytes)),
        ("copies", _copies(graph)),
    ]


def _copies(graph: CapturedGraph) -> str:
    """Return how many collectives' buffers are packed and unpacked on which stream."""
    count = Counter[str](collective.copies for collective in graph.collectives)
    texts = {"compute": "on the compute stream", "side stream": "on a side stream", "none": "not needed"}
    return ", ".join(f"{count[kind]} {text}" for kind, text in texts.items() if count[kind]) or "none"


def words(kind: str) -> str:
    """Return ``all-gather`` for ``all_gather``."""
    return kind.replace("_", "-")


def dtype_name(dtype: torch.dtype) -> str:
    """Return for example ``bfloat16``."""
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
    return f"{len(names)}: {abbreviate(names, width - len(f'{len(names)}: '))}"


def verdicts(graph: CapturedGraph) -> list[str]:
    """Return why collectives are exposed, for how long, and which these are, the costliest reason first."""
    found: dict[str, list[int]] = {}
    for number, collective in enumerate(graph.collectives):
        if is_exposed(collective):
            found.setdefault(collective.verdict, []).append(number)
    costs_us = {text: sum(graph.collectives[number].exposed_us for number in found[text]) for text in found}
    ordered = sorted(found, key=lambda text: (-costs_us[text], text))
    return [f"{figures.duration(costs_us[text])} {text} ({figures.indices(found[text])})" for text in ordered]
