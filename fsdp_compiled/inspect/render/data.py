"""A capture as JSON: all of its records, or a Chrome trace for Perfetto and chrome://tracing.

In a trace each graph is a process whose clock starts at 0, each lane of its timeline a thread, and the unsharded
bytes in flight a counter. *Source:* the Trace Event Format document of the Chromium project: complete ("X"), counter
("C") and metadata ("M") events, times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from inspect import getmembers
from typing import Any

import torch
from torch import fx

from ...sharding.spec import word
from ..records import CapturedGraph, CapturedModel
from . import figures
from .drawing import lay_out

NANOSECONDS = 3  # decimals of a microsecond that are kept


def as_json(data: Any) -> str:
    """Return records, and lists and dicts of them, as JSON with a newline at its end.

    A record becomes an object of its fields and properties, a dtype its name, an FX module its graph's text; the
    ``module`` of a :class:`CapturedGraph` is called ``after``.
    """
    return json.dumps(data, indent=1, ensure_ascii=False, default=_plain) + "\n"


def _plain(value: Any) -> str | dict[str, Any]:
    if isinstance(value, fx.GraphModule):
        return str(value.graph)
    if isinstance(value, torch.dtype):
        return word(value)
    properties = (name for name, _ in getmembers(type(value), lambda member: isinstance(member, property)))
    names = [*(field.name for field in fields(value)), *properties]
    return {"after" if name == "module" else name: getattr(value, name) for name in names}


def trace(capture: CapturedModel) -> dict[str, Any]:
    """Return the JSON object format: ``traceEvents``, ``displayTimeUnit`` and, as ``otherData``, the headline."""
    graphs = enumerate(figures.titled(capture.graphs), start=1)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"capture": f"{capture.model}: {figures.about(capture)}"},
        "traceEvents": [event for pid, (title, graph) in graphs for event in _process(pid, title, graph)],
    }


def _process(pid: int, title: str, graph: CapturedGraph) -> Iterator[dict[str, Any]]:
    yield _event("M", pid, 0, "process_name", name=title)
    yield _event("M", pid, 0, "process_sort_index", sort_index=pid)
    *lanes, (memory, levels) = lay_out(graph).items()
    for tid, (name, marks) in enumerate(lanes, start=1):
        yield _event("M", pid, tid, "thread_name", name=name)
        yield _event("M", pid, tid, "thread_sort_index", sort_index=tid)
        for mark in (mark for mark in marks if mark.kind != "exposed"):
            event = _event("X", pid, tid, mark.name, mark.start_us, **mark.data)
            length_us = max(0.0, round(mark.end_us, NANOSECONDS) - event["ts"])
            category = "collective" if mark.params else mark.kind
            yield event | {"cat": category, "dur": round(length_us, NANOSECONDS)}
    yield from (_event("C", pid, 0, memory, level.start_us, **level.data) for level in levels)


def _event(kind: str, pid: int, tid: int, event: str, at_us: float = 0.0, /, **args: Any) -> dict[str, Any]:
    return {"ph": kind, "pid": pid, "tid": tid, "name": event, "ts": round(at_us, NANOSECONDS), "args": args}
