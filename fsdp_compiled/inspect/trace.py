"""A capture as Chrome trace events, for Perfetto and chrome://tracing.

Each graph is a process whose clock starts at 0; compute and communication are its threads, and the unsharded bytes
in flight a counter. *Source:* the Trace Event Format document of the Chromium project: complete ("X"), counter
("C") and metadata ("M") events, times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import facts
from .lanes import Interval, Lanes, lay_out, link_names
from .plain import plain_collective
from .records import CapturedGraph

if TYPE_CHECKING:
    from .report import Capture

Event = dict[str, Any]

COMPUTE = 1  # thread of compute; those of the links follow
NANOSECONDS = 3  # decimals of a microsecond that are kept


def trace(capture: Capture) -> dict[str, Any]:
    """Return the JSON object format: ``traceEvents``, ``displayTimeUnit`` and, as ``otherData``, the headline."""
    titles = facts.titles(capture.graphs)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"capture": facts.headline(capture)},
        "traceEvents": [
            event
            for pid, (title, graph) in enumerate(zip(titles, capture.graphs, strict=True), start=1)
            for event in _process(pid, title, graph)
        ],
    }


def _process(pid: int, title: str, graph: CapturedGraph) -> Iterator[Event]:
    lanes = lay_out(graph)
    yield _metadata(pid, 0, "process_name", name=title)
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    for tid, name in enumerate(["compute", *link_names(lanes)], start=COMPUTE):
        yield _metadata(pid, tid, "thread_name", name=name)
        yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)
    yield from _compute(pid, graph, lanes)
    for tid, link in enumerate(lanes.links, start=COMPUTE + 1):
        for transfer in link:
            name = f"#{transfer.number} {facts.words(transfer.collective.kind)}"
            yield _complete(pid, tid, name, "collective", transfer.at, **plain_collective(transfer.collective))
    for level in lanes.levels:
        yield {
            "ph": "C",
            "pid": pid,
            "tid": 0,
            "name": "unsharded bytes in flight",
            "ts": round(level.at.start_us, NANOSECONDS),
            "args": {"bytes": level.bytes},
        }


def _compute(pid: int, graph: CapturedGraph, lanes: Lanes) -> Iterator[Event]:
    for span in lanes.compute:
        at = Interval(span.start_us, span.end_us)
        yield _complete(pid, COMPUTE, span.first, "compute", at, nodes=span.nodes)
    for stall in lanes.stalls:
        verdict = graph.collectives[stall.number].verdict
        yield _complete(pid, COMPUTE, f"waits for #{stall.number}", "stall", stall.at, verdict=verdict)
    for copy in lanes.copies:
        yield _complete(pid, COMPUTE, "packs or unpacks", "copy", copy)


def _complete(pid: int, tid: int, name: str, category: str, at: Interval, **args: Any) -> Event:
    start, end = round(at.start_us, NANOSECONDS), round(at.start_us + at.length_us, NANOSECONDS)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": category,
        "ts": start,
        "dur": round(end - start, NANOSECONDS),
        "args": args,
    }


def _metadata(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "ts": 0, "args": args}
