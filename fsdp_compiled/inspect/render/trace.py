"""A capture as Chrome trace events, for Perfetto and chrome://tracing.

Each graph is a process whose clock starts at 0, each lane of its timeline a thread, and the unsharded bytes in flight
a counter. *Source:* the Trace Event Format document of the Chromium project: complete ("X"), counter ("C") and
metadata ("M") events, times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..records import CapturedGraph, CapturedModel
from . import facts
from .timeline import Mark, lay_out

Event = dict[str, Any]

NANOSECONDS = 3  # decimals of a microsecond that are kept


def trace(capture: CapturedModel) -> dict[str, Any]:
    """Return the JSON object format: ``traceEvents``, ``displayTimeUnit`` and, as ``otherData``, the headline."""
    graphs = enumerate(facts.titled(capture.graphs), start=1)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"capture": f"{capture.model}: {facts.about(capture)}"},
        "traceEvents": [event for pid, (title, graph) in graphs for event in _process(pid, title, graph)],
    }


def _process(pid: int, title: str, graph: CapturedGraph) -> Iterator[Event]:
    yield _event("M", pid, 0, "process_name", name=title)
    yield _event("M", pid, 0, "process_sort_index", sort_index=pid)
    *lanes, (memory, levels) = lay_out(graph).items()
    for tid, (name, marks) in enumerate(lanes, start=1):
        yield _event("M", pid, tid, "thread_name", name=name)
        yield _event("M", pid, tid, "thread_sort_index", sort_index=tid)
        yield from (_complete(pid, tid, mark) for mark in marks if mark.kind != "exposed")
    yield from (_event("C", pid, 0, memory, level.start_us, **level.data) for level in levels)


def _complete(pid: int, tid: int, mark: Mark) -> Event:
    event = _event("X", pid, tid, mark.name, mark.start_us, **mark.data)
    duration = max(0.0, round(mark.end_us, NANOSECONDS) - event["ts"])
    return event | {"cat": "collective" if mark.label else mark.kind, "dur": round(duration, NANOSECONDS)}


def _event(kind: str, pid: int, tid: int, event: str, at_us: float = 0.0, /, **args: Any) -> Event:
    return {"ph": kind, "pid": pid, "tid": tid, "name": event, "ts": round(at_us, NANOSECONDS), "args": args}
