"""Reads what ``torch.profiler`` has recorded of training steps: compute, collectives, copies, the optimizer.

It must not know what was estimated. Times are microseconds: on the CPU those of operators and ranges, with an
accelerator those of the kernels that they launch.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.flop_counter import flop_registry

from ..expect import unexpected
from ..passes.cost.compute import COUNTED_AS, Work, names_attention, profiler_name, shown_signature

_COUNTED = frozenset(map(profiler_name, flop_registry))
_COUNTED_AS = {profiler_name(operator): profiler_name(other) for operator, other in COUNTED_AS.items()}
_RANGE = re.compile(r"FSDP::(all_gather|reduce_scatter|all_reduce|\w+_copy_\w+?)(_wait)? \((.*)\)")
_FUSED = re.compile(r"triton_|(graph_\d+_)?cpp_fused")
_TRANSFER = re.compile(r"gloo:(?!barrier)|nccl(Dev)?Kernel")
_GZIP = b"\x1f\x8b"  # what compressed files begin with
_STEP, _OPTIMIZER = "ProfilerStep#", "Optimizer.step#"


class Span(NamedTuple):
    """What ran from ``start_us`` on; of a kernel, ``thread`` is the stream and ``id`` that of what launched it."""

    start_us: float
    us: float
    name: str
    thread: Any
    id: Any
    shapes: tuple[tuple[int, ...], ...]  # of an operator's operands and results

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


class Transfer(NamedTuple):
    """A collective, how long compute waited for it and, where the trace tells, how long it took."""

    kind: str
    waited_us: float
    busy_us: float | None


class Trace:
    """The events of one rank's trace file, in Chrome's format, also compressed by gzip.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no events of operators.
    """

    def __init__(self, path: str | Path) -> None:
        spans = _spans(path, Path(path).read_bytes())
        self._host = sorted(spans["cpu_op"] + spans["user_annotation"], key=lambda span: (span.start_us, -span.us))
        self._kernels = sorted(spans["kernel"] + spans["gpu_memcpy"] + spans["gpu_memset"])
        if not spans["cpu_op"]:
            raise unexpected(f"{path}", "events of operators", "none", "profile with ProfilerActivity.CPU")
        self.has_kernels = bool(self._kernels)
        self._told = self._outermost()

    @cached_property
    def steps(self) -> int:
        """How many steps it holds: as many as the profiler, or an optimizer, has counted."""
        names = [span.name for span in self._host]
        return next((n for kind in (_STEP, _OPTIMIZER) if (n := sum(kind in name for name in names))), 1)

    @property
    def step_us(self) -> float:
        """The time of a step: of those that the profiler has counted, else a share of what the events span."""
        marked = [span.us for span in self._host if _STEP in span.name]
        last_us = max(span.end_us for span in (*self._host, *self._kernels))
        return sum(marked) / len(marked) if marked else (last_us - self._host[0].start_us) / self.steps

    @property
    def optimizer_us(self) -> float:
        """What all steps of the optimizer took."""
        return sum(us for span, us in self._told if _OPTIMIZER in span.name)

    @property
    def copies_us(self) -> float:
        """What starting collectives, packing and unpacking took in all steps."""
        return sum(us for span, us in self._told if (found := _RANGE.match(span.name)) and not found[2])

    def compute(self, known: Collection[str]) -> Iterator[tuple[Work, str, float]]:
        """Yield what kernels of compute do, their names and times.

        A product's and an attention's name is the one of ``known`` that its operator and shapes begin with.
        """
        for span, us in self._told:
            if (work := _work_of(span.name)) is not None:
                yield work, _known(span, known), us

    def transfers(self, kinds: Collection[str]) -> list[Transfer]:
        """Return the collectives of these kinds in order of launch."""
        waits, launches = defaultdict[tuple[str, str], list[float]](list), list[tuple[str, str]]()
        for span, us in self._told:
            if (match := _RANGE.match(span.name)) and match[1] in kinds:
                if match[2]:
                    waits[match[1], match[3]].append(us)
                else:
                    launches.append((match[1], match[3]))
        wire: list[Span | None] = [span for span in (self._kernels or self._host) if _TRANSFER.match(span.name)]
        found = list[Transfer]()
        for launch, seen in zip(launches, wire if len(wire) == len(launches) else repeat(None), strict=False):
            waited_us = waits[launch].pop(0) if waits[launch] else 0.0
            if seen and self.has_kernels:
                waited_us = self._exposed_us(seen)
            found.append(Transfer(launch[0], waited_us, seen and seen.us))
        return found

    def _exposed_us(self, wire: Span) -> float:
        """Return how much of a transfer no kernel of compute covers."""
        now_us, free_us = wire.start_us, 0.0
        for kernel in self._kernels:
            if kernel.end_us > now_us and kernel.start_us < wire.end_us and not _TRANSFER.match(kernel.name):
                free_us, now_us = free_us + max(0.0, kernel.start_us - now_us), kernel.end_us
        return free_us + max(0.0, wire.end_us - now_us)

    def _outermost(self) -> list[tuple[Span, float]]:
        """Return what is told apart and does not lie in something else that is, but ranges of ours, which may.

        With each, how long it took: on the host, or the kernels that it launched. What a range takes within another
        does not count for that one.
        """
        launched_us = defaultdict[Any, float](float)  # by the operator's number
        for kernel in self._kernels:
            if kernel.id is not None and not _TRANSFER.match(kernel.name):
                launched_us[kernel.id] += kernel.us
        around, spans, spent_us = defaultdict[Any, list[int]](list), list[Span](), list[float]()
        for span in self._host:
            outer = around[span.thread]
            while outer and spans[outer[-1]].end_us <= span.start_us:
                outer.pop()
            is_alone = not outer and (_OPTIMIZER in span.name or _work_of(span.name) is not None)
            if is_alone or _RANGE.match(span.name):
                if outer and not self.has_kernels:
                    spent_us[outer[-1]] -= span.us
                outer.append(len(spans))
                spans.append(span)
                spent_us.append(0.0 if self.has_kernels else span.us)
            if outer:
                spent_us[outer[-1]] += launched_us.pop(span.id, 0.0)
        return list(zip(spans, spent_us, strict=True))


def _spans(path: str | Path, content: bytes) -> dict[str, list[Span]]:
    """Return the spans of a file by their category."""
    found = defaultdict[str, list[Span]](list)
    try:
        content = gzip.decompress(content) if content.startswith(_GZIP) else content
        for event in json.loads(content)["traceEvents"]:
            if event.get("ph") == "X" and "dur" in event:
                args = event.get("args", {})
                shapes = tuple(tuple(each) for each in args.get("Input Dims", ()) if _is_shape(each))
                at = float(event["ts"]), float(event["dur"])
                thread, number = (event.get("pid"), event.get("tid")), args.get("External id")
                found[event.get("cat", "")].append(Span(*at, event["name"], thread, number, shapes))
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise unexpected(f"{path}", "a trace by torch.profiler", f"another file: {error}") from None
    return found


def _is_shape(value: Any) -> bool:
    return bool(value) and isinstance(value, list) and all(isinstance(each, int) for each in value)


def _work_of(name: str) -> Work | None:
    if _FUSED.match(name):
        return "fused kernels"
    if _COUNTED_AS.get(name, name) not in _COUNTED:
        return None
    return "attention" if names_attention(name) else "matrix products"


def _known(span: Span, known: Collection[str]) -> str:
    name = _COUNTED_AS.get(span.name, span.name)
    candidates = (shown_signature(name, span.shapes[:end]) for end in range(len(span.shapes), 0, -1))
    return next((each for each in candidates if each in known), name)
