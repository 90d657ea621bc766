"""What a capture says in words: headline, figures of a graph, the columns of its collectives, verdicts.

Table, page and picture print these; it must not know how.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from ..passes.policy import SchedulePolicy
from . import figures
from .lanes import is_exposed
from .records import CapturedGraph, Collective, Copies

if TYPE_CHECKING:
    from .report import Capture

Fact = tuple[str, str]
"""A label and its value."""


def headline(capture: Capture) -> str:
    """Return what was captured where, in a line."""
    return f"{capture.model}: {about(capture)}"


def about(capture: Capture) -> str:
    """Return the headline without the model's name."""
    ranks = "1 rank" if capture.world == 1 else f"{capture.world} ranks"
    count = f"{capture.parameters:,} parameters"
    return f"{count} on {ranks}, torch {capture.torch_version}, cluster {capture.cluster.name}"


def schedule(policy: SchedulePolicy) -> list[Fact]:
    """Return every decision of the user's but the cluster, which the headline names."""
    return [
        (field.name.removesuffix("_bytes").replace("_", " "), _decision(field.name, getattr(policy, field.name)))
        for field in fields(policy)
        if field.name != "cluster"
    ]


def _decision(field: str, value: object) -> str:
    return figures.size(value) if isinstance(value, int) and field != "prefetch" else str(value)


def graph_breaks(capture: Capture) -> str:
    """Return how many graph breaks there were."""
    return f"graph breaks: {len(capture.graph_breaks) or 'none'}"


def titles(graphs: Sequence[CapturedGraph]) -> list[str]:
    """Return a name for each graph: its kind, numbered from 1 where there are several of a kind."""
    total, seen = Counter(graph.kind for graph in graphs), Counter[str]()
    names = []
    for graph in graphs:
        seen[graph.kind] += 1
        names.append(graph.kind if total[graph.kind] == 1 else f"{graph.kind} {seen[graph.kind]}")
    return names


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
    """Return how many collectives' buffers are copied by whom."""
    count = Counter(collective.copies for collective in graph.collectives)
    return ", ".join(f"{count[kind]} {text}" for kind, text in _COPIES if count[kind]) or "none"


_COPIES: tuple[tuple[Copies, str], ...] = (
    ("compute", "on the compute stream"),
    ("side stream", "beside compute"),
    ("none", "not needed"),
)


def words(kind: str) -> str:
    """Return ``all-gather`` for ``all_gather``."""
    return kind.replace("_", "-")


def dtype_name(dtype: torch.dtype) -> str:
    """Return for example ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def exposure(collective: Collective) -> str:
    """Return how long compute stands still for it, or ``hidden``."""
    return figures.duration(collective.exposed_us) if is_exposed(collective) else "hidden"


@dataclass(frozen=True)
class Column:
    """A column of the table of collectives: its title, its text for (index, collective), and its alignment."""

    title: str
    text: Callable[[int, Collective], str]
    is_right: bool = True


COLUMNS = (
    Column("#", lambda index, c: str(index)),
    Column("kind", lambda index, c: words(c.kind), is_right=False),
    Column("dtype", lambda index, c: dtype_name(c.dtype), is_right=False),
    Column("size", lambda index, c: figures.size(c.bytes)),
    Column("ranks", lambda index, c: str(c.world)),
    Column("launch", lambda index, c: str(c.launch)),
    Column("wait", lambda index, c: str(c.wait)),
    Column("use", lambda index, c: str(c.first_use)),
    Column("estimate", lambda index, c: figures.duration(c.estimate_us)),
    Column("exposed", lambda index, c: exposure(c)),
)
"""All but the parameters, which take the space that is left."""


@dataclass(frozen=True)
class Verdict:
    """Why some collectives of a graph are exposed, by their indices, and how long compute stands still for them."""

    text: str
    numbers: tuple[int, ...]
    exposed_us: float

    def __str__(self) -> str:
        return f"{figures.duration(self.exposed_us)} {self.text} ({figures.indices(self.numbers)})"


def verdicts(graph: CapturedGraph) -> list[Verdict]:
    """Return the verdicts on exposed collectives, the costliest first."""
    found: dict[str, list[int]] = {}
    for index, collective in enumerate(graph.collectives):
        if is_exposed(collective):
            found.setdefault(collective.verdict, []).append(index)
    grouped = [
        Verdict(text, tuple(numbers), sum(graph.collectives[n].exposed_us for n in numbers))
        for text, numbers in found.items()
    ]
    return sorted(grouped, key=lambda verdict: (-verdict.exposed_us, verdict.text))
