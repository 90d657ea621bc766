"""What a capture says in words and figures, which every format prints.

Bytes and times have three digits and a unit; names of parameters or units are abbreviated to the space there is. The
headline says first how long a step takes, how much of it is exposed, and what to try against that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, takewhile
from math import floor, log10

from ...passes.schedule_policy import SchedulePolicy
from ...sharding.spec import word
from ..memory import StepMemory
from ..records import CapturedGraph, CapturedModel, Collective, Kernel, Verdict

LISTED_WIDTH = 48  # characters that a list of names may take in a sentence
SHORTEST_US = 0.01  # less is not shown; rounding leaves less between two spans
LITTLE = 0.01  # of a step: what is exposed for less is not worth a change


def size(count_bytes: int) -> str:
    """Return for example ``1.5 MiB``."""
    return _scaled(count_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def duration(time_us: float) -> str:
    """Return for example ``840 µs`` or ``12.3 ms``."""
    return _scaled(round(time_us, 2), 1000, ("µs", "ms", "s"))


def _scaled(value: float, factor: int, units: Sequence[str]) -> str:
    digits = f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
    if float(digits) >= factor and len(units) > 1:
        return _scaled(value / factor, factor, units[1:])
    return f"{digits} {units[0]}"


def counted(count: int, noun: str) -> str:
    """Return for example ``2 units``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def indices(numbers: Iterable[int]) -> str:
    """Return rising numbers with runs of three or more joined: ``#0, #3, #7-9``."""
    runs = groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    listed = [[f"#{number}" for _, number in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1][1:]}" if len(run) > 2 else ", ".join(run) for run in listed)


def ticks(end: float, most: int) -> list[float]:
    """Return at most ``most + 1`` numbers from 0 to ``end``, over 0: multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(end / most))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= end / most)
    return [index * step for index in range(int(end / step * (1 + 1e-9)) + 1)]


def abbreviate(names: Sequence[str], width: int = LISTED_WIDTH) -> str:
    """Return at most ``width`` characters that tell which parameters these are.

    What all names begin and end with is written once: ``layers.3.{wq,wk,…,w2}.weight``. A list that is still too
    long keeps its beginning and its last name, then only ``layers.3.*.weight``, else its first name.
    """
    if len(names) < 2:
        return elide("".join(names), width)
    parts = [name.split(".") for name in names]
    spare = min(map(len, parts)) - 1  # every name keeps a part of its own
    head = _shared(p[:spare] for p in parts)
    tail = _shared(p[head:][::-1][: spare - head] for p in parts)
    before = "".join(f"{part}." for part in parts[0][:head])
    after = "".join(f".{part}" for part in parts[0][len(parts[0]) - tail :])
    varying = [".".join(p[head : len(p) - tail]) for p in parts]
    shorter = ([*varying[:kept], "…", varying[-1]] for kept in range(len(varying) - 2, 0, -1))
    texts = [",".join(shown) for shown in (varying, *shorter)]
    if before or after:
        texts = [f"{before}{{{text}}}{after}" for text in texts]
    if before:
        texts.append(f"{before}*{after}")
    fitting = (text for text in texts if len(text) <= width)
    return next(fitting, f"{elide(names[0], width - 2)},…")


def _shared(lists: Iterable[list[str]]) -> int:
    """Return how many first items all lists have in common."""
    return sum(1 for _ in takewhile(lambda items: len(set(items)) == 1, zip(*lists, strict=False)))


def elide(text: str, width: int) -> str:
    """Return at most ``width`` characters of a text, without its middle where it is longer."""
    end = (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def listed(noun: str, names: Sequence[str]) -> str:
    """Return how many there are and, in little space, which: ``2 parameters, {up,down}.weight``."""
    return f"{counted(len(names), noun)}, {abbreviate(names)}"


def in_line(values: Mapping[str, str]) -> str:
    return ", ".join(f"{label} {value}" for label, value in values.items())


def about(capture: CapturedModel) -> str:
    """Return how large the captured model is, and on what it runs, in a line."""
    count = f"{capture.parameters:,} parameters on {counted(capture.world, 'rank')}"
    return f"{count}, torch {capture.torch_version}, cluster {capture.cluster.name}"


def schedule(policy: SchedulePolicy) -> dict[str, str]:
    """Return the fields of a policy, without the cluster, which :func:`about` names."""
    found: dict[str, str | int] = {"bucket": policy.bucket, "prefetch": str(policy.prefetch)}
    found |= {"in flight": policy.in_flight_bytes, "keep unsharded": policy.keep_unsharded_bytes}
    return {label: value if isinstance(value, str) else size(value) for label, value in found.items()}


def titled(graphs: Sequence[CapturedGraph]) -> list[tuple[str, CapturedGraph]]:
    """Return each graph with a name: its kind, numbered from 1 where there are several of a kind."""
    kinds = [graph.kind for graph in graphs]
    numbers = (f" {kinds[:end].count(kind)}" if kinds.count(kind) > 1 else "" for end, kind in enumerate(kinds, 1))
    return [(f"{graph.kind}{number}", graph) for graph, number in zip(graphs, numbers, strict=True)]


def graph_facts(graph: CapturedGraph) -> dict[str, str]:
    count = Counter[str](collective.copies for collective in graph.collectives)
    places = {"compute": "on the compute stream", "side stream": "on a side stream", "none": "not needed"}
    copies = (f"{count[kind]} {place}" for kind, place in places.items() if count[kind])
    return {
        "collectives": str(len(graph.collectives)),
        "bytes": size(sum(collective.bytes for collective in graph.collectives)),
        "compute": duration(graph.compute_us),
        "communication": duration(graph.communication_us),
        "exposed": duration(graph.exposed_us),
        "peak unsharded": size(graph.peak_unsharded_bytes),
        "bound": size(graph.bound_bytes),
        "kept unsharded": size(graph.kept_bytes),
        "copies": ", ".join(copies) or "none",
    }


def step_facts(capture: CapturedModel) -> dict[str, str]:
    """Return how long a step takes, and of that each part."""
    parts = {part: f"{duration(us)} ({us / capture.step_us:.0%})" for part, us in capture.step_parts_us.items() if us}
    return {"all": duration(capture.step_us)} | parts


def step_lines(capture: CapturedModel) -> list[dict[str, str]]:
    """Return a line for each part of a step that takes time."""
    parts = capture.step_parts_us.items()
    return [
        {"part": part, "share": f"{us / capture.step_us:.1%}", "estimate": duration(us)} for part, us in parts if us
    ]


def memory_facts(memory: StepMemory) -> dict[str, str]:
    """Return the peak of a step, where it is, and what is alive there by part, the largest first."""
    peak = memory.peak
    found = {"peak": size(peak.bytes), "with the allocator's share": size(memory.reserved_bytes)}
    found |= {"in": f"{peak.graph} at {peak.at}", "optimizer": memory.optimizer}
    return found | {part: size(count) for part, count in memory.parts.items() if count}


def headline(capture: CapturedModel) -> str:
    """Return two sentences: how long the step takes and waits, and what to try; "" where nothing was compiled."""
    if not capture.graphs:
        return ""
    what = " and ".join(dict.fromkeys(graph.kind for graph in capture.graphs)).capitalize()
    takes = "take" if " and " in what else "takes"
    step_us, exposed_us, share = _sums(capture)
    waits = f"of which compute waits {duration(exposed_us)} ({share}) for collectives"
    trial = f"nothing: {share} of the step is too little to gain"
    if exposed_us > LITTLE * step_us:
        costs_us = defaultdict[Verdict, float](float)
        for collective in (each for graph in capture.graphs for each in graph.collectives):
            costs_us[collective.verdict] += collective.exposed_us
        trial = max(costs_us, key=costs_us.__getitem__).trial
    return f"{what} {takes} {duration(step_us)} by estimate, {waits}. To try: {trial}."


def _sums(capture: CapturedModel) -> tuple[float, float, str]:
    """Return how long all graphs take, for how long compute waits in them, and that share of the time."""
    step_us = sum(graph.total_us for graph in capture.graphs)
    exposed_us = sum(graph.exposed_us for graph in capture.graphs)
    return step_us, exposed_us, f"{exposed_us / (step_us or 1.0):.1%}"


def side_by_side(captures: Sequence[CapturedModel]) -> tuple[list[str], list[dict[str, str]]]:
    """Return a name for each capture, by what tells them apart, and a line for each figure of theirs."""
    conditions = [
        {"model": capture.model, "ranks": str(capture.world), "cluster": capture.cluster.name}
        | {"torch": capture.torch_version, **schedule(capture.schedule)}
        for capture in captures
    ]
    differing = [key for key in conditions[0] if len({each[key] for each in conditions}) > 1]
    told = [in_line({key: each[key] for key in differing}) for each in conditions]
    names = [name or f"capture {number}" for number, name in enumerate(told, start=1)]
    facts = [_facts(capture) for capture in captures]
    return names, [{"figure": label} | {n: f[label] for n, f in zip(names, facts, strict=True)} for label in facts[0]]


def _facts(capture: CapturedModel) -> dict[str, str]:
    collectives = [collective for graph in capture.graphs for collective in graph.collectives]
    step_us, exposed_us, share = _sums(capture)
    return {
        "step": duration(step_us),
        "exposed": f"{duration(exposed_us)} ({share})",
        "collectives": str(len(collectives)),
        "bytes": size(sum(collective.bytes for collective in collectives)),
        "peak unsharded": size(capture.peak_unsharded_bytes),
        "peak memory": size(capture.memory.peak.bytes) if capture.memory else "unknown",
    }


def words(kind: str) -> str:
    return kind.replace("_", "-")


def is_exposed(collective: Collective) -> bool:
    return collective.exposed_us >= SHORTEST_US


def collective_facts(number: int, collective: Collective) -> dict[str, str]:
    """Return the figures of a collective, without its parameters."""
    return {
        "#": str(number),
        "kind": words(collective.kind),
        "dtype": word(collective.dtype),
        "size": size(collective.bytes),
        "ranks": str(collective.world),
        "launch": str(collective.launch),
        "wait": str(collective.wait),
        "use": str(collective.first_use),
        "estimate": duration(collective.estimate_us),
        "exposed": duration(collective.exposed_us) if is_exposed(collective) else "hidden",
    }


def kernels_facts(kernels: Sequence[Kernel]) -> dict[str, str]:
    """Return how many kernels a GPU's program launches, and what they cost in all."""
    generated = Counter(kernel.name for kernel in kernels if kernel.is_generated)
    return {
        "launches": str(len(kernels)),
        "of generated kernels": f"{generated.total()} ({len(generated)} different)",
        "kernels that spill": str(len({kernel.name for kernel in kernels if kernel.spills}) or "none"),
        **_costs(kernels),
    }


def kernel_lines(kernels: Sequence[Kernel]) -> list[dict[str, str]]:
    """Return a line for each kernel by name, in order of first launch: bytes and times are those of all launches."""
    alike = defaultdict[str, list[Kernel]](list)
    for kernel in kernels:
        alike[kernel.name].append(kernel)
    return [{"launches": str(len(each)), **_costs(each), **_resources(each[0])} for each in alike.values()]


def _costs(kernels: Sequence[Kernel]) -> dict[str, str]:
    estimate_us = sum(kernel.estimate_us for kernel in kernels)
    return {"bytes": size(sum(kernel.bytes for kernel in kernels)), "estimate": duration(estimate_us)}


def _resources(kernel: Kernel) -> dict[str, str]:
    found = {"registers": kernel.registers, "spills": kernel.spills}
    shared = "-" if kernel.shared_bytes is None else size(kernel.shared_bytes)
    return {key: "-" if n is None else str(n) for key, n in found.items()} | {"shared": shared, "kernel": kernel.name}


def params(names: Sequence[str], width: int) -> str:
    """Return how many parameters there are and, in at most ``width`` characters, which."""
    count = f"{len(names)}: "
    return count + abbreviate(names, width - len(count))


def verdicts(graph: CapturedGraph) -> list[str]:
    """Return why collectives are exposed, for how long, and which these are, the costliest reason first."""
    found = defaultdict[str, list[int]](list)
    for number, collective in enumerate(graph.collectives):
        if is_exposed(collective):
            found[collective.verdict].append(number)
    costs_us = {text: sum(graph.collectives[n].exposed_us for n in numbers) for text, numbers in found.items()}
    ordered = sorted(found, key=lambda text: (-costs_us[text], text))
    return [f"{duration(costs_us[text])} {text} ({indices(found[text])})" for text in ordered]
