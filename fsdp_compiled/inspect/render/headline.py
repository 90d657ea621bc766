"""What a capture says first: how long a step takes, how much of it is exposed, and what to try against that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ..records import CapturedModel
from . import figures

LITTLE = 0.01  # of a step: what is exposed for less is not worth a change
NOTHING = "nothing: {share} of the step is too little to gain"
TRIALS = {  # by the beginning of a verdict
    "it runs on the cores that compute needs": "a GPU's cluster in SchedulePolicy, if this model is meant for one",
    "the link is busy": "more tokens per rank, a smaller dtype in MixedPrecisionPolicy, or HSDP: the links are full",
    "too little compute follows it": "a smaller first unit: its gradients are reduced last, behind nothing",
    "nothing before it": "a smaller first unit, or SchedulePolicy(bucket=...) in bytes: nothing hides the first one",
    "the memory bound": "a larger SchedulePolicy.in_flight_bytes: all-gathers wait for memory",
    "its input is computed just before": "sharding in a dtype that travels as it is: what is sent is computed first",
    "too little compute before": "more tokens per rank, or SchedulePolicy.keep_unsharded_bytes for fewer all-gathers",
}


def headline(capture: CapturedModel) -> str:
    """Return two sentences: how long the step takes and waits, and what to try; "" where nothing was compiled."""
    if not capture.graphs:
        return ""
    what = " and ".join(dict.fromkeys(graph.kind for graph in capture.graphs)).capitalize()
    takes = "take" if " and " in what else "takes"
    waits = f"of which compute waits {figures.duration(exposed_us(capture))} ({_share(capture)}) for collectives"
    return f"{what} {takes} {figures.duration(step_us(capture))} by estimate, {waits}. To try: {_trial(capture)}."


def step_us(capture: CapturedModel) -> float:
    """Return the estimated time of all graphs together."""
    return sum(graph.total_us for graph in capture.graphs)


def exposed_us(capture: CapturedModel) -> float:
    """Return for how long compute waits in all of them."""
    return sum(graph.exposed_us for graph in capture.graphs)


def _share(capture: CapturedModel) -> str:
    return f"{exposed_us(capture) / (step_us(capture) or 1.0):.1%}"


def _trial(capture: CapturedModel) -> str:
    if exposed_us(capture) <= LITTLE * step_us(capture):
        return NOTHING.format(share=_share(capture))
    costs_us = defaultdict[str, float](float)
    for collective in (each for graph in capture.graphs for each in graph.collectives):
        costs_us[collective.verdict.removeprefix("exposed: ")] += collective.exposed_us
    worst = max(costs_us, key=costs_us.__getitem__)
    return next(
        (trial for reason, trial in TRIALS.items() if worst.startswith(reason)),
        f"nothing is known against this: {worst}",
    )


def side_by_side(captures: Sequence[CapturedModel]) -> tuple[list[str], list[dict[str, str]]]:
    """Return a name for each capture, by what tells them apart, and a line for each figure of theirs."""
    conditions = [_conditions(capture) for capture in captures]
    differing = [key for key in conditions[0] if len({each[key] for each in conditions}) > 1]
    names = [
        ", ".join(f"{key} {each[key]}" for key in differing) or f"capture {number}"
        for number, each in enumerate(conditions, start=1)
    ]
    facts = [_facts(capture) for capture in captures]
    return names, [{"figure": label} | {n: f[label] for n, f in zip(names, facts, strict=True)} for label in facts[0]]


def _conditions(capture: CapturedModel) -> Mapping[str, str]:
    model = {"model": capture.model, "ranks": str(capture.world), "cluster": capture.cluster.name}
    return model | {"torch": capture.torch_version} | figures.schedule(capture.schedule)


def _facts(capture: CapturedModel) -> dict[str, str]:
    collectives = [collective for graph in capture.graphs for collective in graph.collectives]
    return {
        "step": figures.duration(step_us(capture)),
        "exposed": f"{figures.duration(exposed_us(capture))} ({_share(capture)})",
        "collectives": str(len(collectives)),
        "bytes": figures.size(sum(collective.bytes for collective in collectives)),
        "peak unsharded": figures.size(capture.peak_unsharded_bytes),
    }
