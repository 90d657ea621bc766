"""Holds the estimated times of a step against those that a profiler has measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..expect import unexpected
from .records import CapturedModel
from .render.figures import counted, duration
from .render.text import joined, table
from .trace import Trace, Transfer

WORST = 30  # estimates that are printed with what was measured
TRANSFERS = "transfers"  # which may be hidden: no part of a step


@dataclass(frozen=True)
class Compared:
    """Times of one step, in microseconds: estimated, measured, None for what is only in one of them."""

    part: str  # as in CapturedModel.step_parts_us, or "transfers": how long collectives take, waited for or not
    name: str  # of kernels that are alike, or of a collective
    count: int  # how many there are, in the one of capture and trace that has more
    estimate_us: float | None
    measured_us: float | None

    @property
    def difference_us(self) -> float:
        """By how much the estimate is wrong; what is only in one of them counts fully."""
        return abs((self.measured_us or 0.0) - (self.estimate_us or 0.0))

    @property
    def times(self) -> dict[str, str]:
        """The estimate, what was measured, and by how much of that the estimate is wrong."""
        estimate, measured = ("-" if us is None else duration(us) for us in (self.estimate_us, self.measured_us))
        is_known = self.estimate_us is not None and self.measured_us
        wrong = f"{self.estimate_us / self.measured_us - 1:+.0%}" if is_known else "-"  # type: ignore[operator]
        return {"part": self.part, "estimate": estimate, "measured": measured, "error": wrong}

    @property
    def facts(self) -> dict[str, str]:
        """The same of kernels that are alike, or of a collective, with their number and name."""
        return {**self.times, "count": str(self.count), "name": self.name or self.part}


@dataclass(frozen=True)
class Comparison:
    """A step's estimated and measured times. ``print`` shows a table of its parts, and of the worst estimates.

    Args:
        steps: that the trace holds, of which the times are the mean.
        parts: by part; "host" is, of the measured time, what the trace does not show as anything else.
        lines: kernel by kernel and collective by collective, the worst estimate first.
    """

    steps: int
    step: Compared
    parts: tuple[Compared, ...]
    lines: tuple[Compared, ...]

    def __str__(self) -> str:
        head = f"one step, the mean of {counted(self.steps, 'step')} of a run"
        parts, lines = table([each.times for each in (self.step, *self.parts)]), [each.facts for each in self.lines]
        more = [f"and {len(lines) - WORST} more, in the .html file"] if len(lines) > WORST else []
        return joined([head], parts, ["the worst estimates first"], table(lines[:WORST]) if lines else [], more)


def compare(capture: CapturedModel, path: str | Path) -> Comparison:
    """Compare a capture with the trace of a run. Errors as of :meth:`Capture.compare`."""
    trace = Trace(path)
    lines = [*_kernels(capture, trace), *_collectives(capture, trace)]
    estimated, measured = capture.step_parts_us, defaultdict[str, float](float)
    for line in lines:
        measured[line.part] += line.measured_us or 0.0
    if not trace.has_kernels:  # else these may run at the same time as compute
        measured["copies of buffers"] = trace.copies_us / trace.steps
    measured["optimizer"] = trace.optimizer_us / trace.steps
    measured["host"] = max(0.0, trace.step_us - sum(measured[part] for part in estimated))
    parts = [Compared(part, "", 1, us, measured.get(part) or None) for part, us in estimated.items()]
    lines.sort(key=lambda line: -line.difference_us)
    step = Compared("step", "", 1, capture.step_us, trace.step_us)
    return Comparison(trace.steps, step, tuple(parts), tuple(lines))


def _kernels(capture: CapturedModel, trace: Trace) -> Iterator[Compared]:
    """Yield kernels of equal names; fused ones together, unless the program of a GPU has their names."""
    estimated = defaultdict[tuple[str, str], list[float]](list)
    measured = defaultdict[tuple[str, str], list[float]](list)
    for graph in capture.graphs:
        for kernel in graph.kernels:
            is_named = graph.has_program or kernel.work != "fused kernels"
            estimated[kernel.work, kernel.name if is_named else ""].append(kernel.estimate_us)
    known = {name for _, name in estimated}
    for work, name, us in trace.compute(known):
        measured[work, name if work != "fused kernels" or name in known else ""].append(us / trace.steps)
    for part, name in estimated.keys() | measured.keys():
        expected, found = estimated.get((part, name), []), measured.get((part, name), [])
        count = max(len(expected), len(found) // trace.steps)
        yield Compared(part, name, count, *(sum(each) if each else None for each in (expected, found)))


def _collectives(capture: CapturedModel, trace: Trace) -> Iterator[Compared]:
    """Yield for each collective how long compute waits for it, and how long it takes."""
    expected = [(f"{graph.kind} #{n}", each) for graph in capture.graphs for n, each in enumerate(graph.collectives)]
    found = trace.transfers({each.kind for _, each in expected})
    kinds, steps = [each.kind for _, each in expected], trace.steps
    if [each.kind for each in found] != kinds * steps:
        got = ", ".join(f"{count} {kind}" for kind, count in Counter(each.kind for each in found).items())
        wanted = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds * steps).items())
        do = "give the trace of complete compiled steps of this model, with the schedule that it was captured with"
        raise unexpected(f"trace of {steps} steps", f"as captured, {wanted or 'no collectives'}", got or "none", do)
    for index, (place, each) in enumerate(expected):
        alike: list[Transfer] = found[index :: len(expected)]
        name = f"{place} {each.kind}"
        yield Compared("waits for collectives", name, 1, each.exposed_us, sum(t.waited_us for t in alike) / steps)
        busy = [t.busy_us for t in alike if t.busy_us is not None]
        yield Compared(TRANSFERS, name, 1, each.estimate_us, sum(busy) / steps if busy else None)
