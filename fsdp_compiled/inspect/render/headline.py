"""What a capture says first: how long a step takes, how much of it is exposed, and what to try against that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..records import CapturedModel, Verdict
from . import figures

LITTLE = 0.01  # of a step: what is exposed for less is not worth a change
TRIALS = {
    Verdict.SHARES_CORES: "a GPU's cluster in SchedulePolicy, if this model is meant for one",
    Verdict.LINK_BUSY: "more tokens per rank, a smaller dtype in MixedPrecisionPolicy, or HSDP: the links are full",
    Verdict.LITTLE_AFTER: "a smaller first unit: its gradients are reduced last, behind nothing",
    Verdict.FIRST: "a smaller first unit, or SchedulePolicy(bucket=...) in bytes: nothing hides the first one",
    Verdict.MEMORY_BOUND: "a larger SchedulePolicy.in_flight_bytes: all-gathers wait for memory",
    Verdict.INPUT_LATE: "sharding in a dtype that travels as it is: what is sent is computed first",
    Verdict.LITTLE_BEFORE: "more tokens per rank, or SchedulePolicy.keep_unsharded_bytes for fewer all-gathers",
}


def headline(capture: CapturedModel) -> str:
    """Return two sentences: how long the step takes and waits, and what to try; "" where nothing was compiled."""
    if not capture.graphs:
        return ""
    what = " and ".join(dict.fromkeys(graph.kind for graph in capture.graphs)).capitalize()
    takes = "take" if " and " in what else "takes"
    step_us, exposed_us, share = _sums(capture)
    waits = f"of which compute waits {figures.duration(exposed_us)} ({share}) for collectives"
    little = exposed_us <= LITTLE * step_us
    trial = f"nothing: {share} of the step is too little to gain" if little else _trial(capture)
    return f"{what} {takes} {figures.duration(step_us)} by estimate, {waits}. To try: {trial}."


def _sums(capture: CapturedModel) -> tuple[float, float, str]:
    """Return how long all graphs take, for how long compute waits in them, and that share of the time."""
    step_us = sum(graph.total_us for graph in capture.graphs)
    exposed_us = sum(graph.exposed_us for graph in capture.graphs)
    return step_us, exposed_us, f"{exposed_us / (step_us or 1.0):.1%}"


def _trial(capture: CapturedModel) -> str:
    costs_us = defaultdict[Verdict, float](float)
    for collective in (each for graph in capture.graphs for each in graph.collectives):
        costs_us[collective.verdict] += collective.exposed_us
    worst = max(costs_us, key=costs_us.__getitem__)
    return TRIALS.get(worst, f"nothing is known against this: {worst.removeprefix('exposed: ')}")


def side_by_side(captures: Sequence[CapturedModel]) -> tuple[list[str], list[dict[str, str]]]:
    """Return a name for each capture, by what tells them apart, and a line for each figure of theirs."""
    conditions = [
        {"model": capture.model, "ranks": str(capture.world), "cluster": capture.cluster.name}
        | {"torch": capture.torch_version, **figures.schedule(capture.schedule)}
        for capture in captures
    ]
    differing = [key for key in conditions[0] if len({each[key] for each in conditions}) > 1]
    names = [
        ", ".join(f"{key} {each[key]}" for key in differing) or f"capture {number}"
        for number, each in enumerate(conditions, start=1)
    ]
    facts = [_facts(capture) for capture in captures]
    return names, [{"figure": label} | {n: f[label] for n, f in zip(names, facts, strict=True)} for label in facts[0]]


def _facts(capture: CapturedModel) -> dict[str, str]:
    collectives = [collective for graph in capture.graphs for collective in graph.collectives]
    step_us, exposed_us, share = _sums(capture)
    return {
        "step": figures.duration(step_us),
        "exposed": f"{figures.duration(exposed_us)} ({share})",
        "collectives": str(len(collectives)),
        "bytes": figures.size(sum(collective.bytes for collective in collectives)),
        "peak unsharded": figures.size(capture.peak_unsharded_bytes),
    }
