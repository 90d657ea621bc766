"""Tells on the logger ``fsdp_compiled`` what a compilation is doing: a line as each phase begins or ends.

Rank 0 logs at level INFO, the others at DEBUG. The logger is registered with torch's, so that
``TORCH_LOGS=fsdp_compiled`` shows it, and ``TORCH_LOGS=+fsdp_compiled`` that of all ranks.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import fx

from .graph import nodes
from .schedule_policy import SchedulePolicy
from .torch_internals import CompileContext, _internal, get_aot_graph_name

NAME = "fsdp_compiled"
Observer = Callable[[fx.Graph, SchedulePolicy, str, Path, str], None]
Slot = Literal["", "joint", "schedule", "schedule only"]  # a pipeline whose begin or end is that of a phase

_log = logging.getLogger(NAME)


def register() -> None:
    """Let torch's logging know the logger's name, as ``TORCH_LOGS`` and ``torch._logging.set_logs`` take it."""
    _internal.register_log(NAME, NAME)


def unregister() -> None:
    _internal.log_registry.log_alias_to_log_qnames.pop(NAME, None)


register()  # when imported, so that a program can name it before it shards a model


def say(text: str, *args: Any) -> None:
    """Log a line, at level INFO on rank 0."""
    _log.log(_level(), text, *args)


def _level() -> int:
    return logging.DEBUG if dist.is_initialized() and dist.get_rank() > 0 else logging.INFO


def _graph_kind() -> str:
    name = get_aot_graph_name()
    return next((kind for kind in ("forward", "backward", "joint", "inference") if kind in name), "graph")


def _described(graph: fx.Graph) -> str:
    """Return how many parameters and gradients share how many collectives in a scheduled graph."""
    sizes = defaultdict[str, list[int]](list)
    for launch in filter(nodes.is_first_launch, graph.nodes):
        sizes[nodes.kind_of(launch).noun].append(len(nodes.bucket_of(launch).params))
    texts = (
        f"{_counted(sum(each), noun)} in {_counted(len(each), 'bucket')}" for noun, each in sorted(sizes.items())
    )
    return ", ".join(texts) or "nothing"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class _Progress:
    """The phases of the compilation under way, of which a process has one at a time."""

    def __init__(self) -> None:
        self._began = self._phase_began = 0.0
        self._phase = ""  # that is under way
        self._scheduled = False  # whether a graph was, in this compilation
        self.observers: dict[Observer, None] = {}

    def begin(self, args: Any) -> None:
        """Called by torch when it begins to compile."""
        self._began, self._scheduled = time.perf_counter(), False
        is_backward = args.callback_trigger.name == "LAZY_BACKWARD"
        self._enter("" if is_backward else "tracing")
        say("compiling backward" if is_backward else "tracing")

    def end(self, _: Any) -> None:
        """Called by torch when it has compiled."""
        self._leave()
        if self._began:
            why = "; no graph was scheduled: it has no collectives or came from a compile cache"
            say("compilation took %.1f s%s", time.perf_counter() - self._began, "" if self._scheduled else why)
        self._began = 0.0

    @contextmanager
    def during(self, slot: Slot, graph: fx.Graph) -> Iterator[None]:
        """Log the phase that ends where passes begin, and what they have done."""
        if not slot or not _log.isEnabledFor(_level()):
            yield
            return
        self._leave()
        began = time.perf_counter()
        yield
        kind = _graph_kind()
        if slot == "joint":
            self._enter("partitioning into forward and backward" if kind == "joint" else "")
            return
        self._scheduled = True
        following = "; generating code" if slot == "schedule" else ""
        say("%s: scheduled %s in %.1f s%s", kind, _described(graph), time.perf_counter() - began, following)
        self._enter(f"{kind}: code generation" if slot == "schedule" else "")

    def _enter(self, phase: str) -> None:
        self._phase, self._phase_began = phase, time.perf_counter()

    def _leave(self) -> None:
        if self._phase:
            say("%s took %.1f s", self._phase, time.perf_counter() - self._phase_began)
        self._phase = ""


_progress = _Progress()
during = _progress.during
# For torch to call when a compilation begins and ends, under a lock: if Dynamo compiled them, it would wait for it.
callbacks = torch.compiler.disable(_progress.begin), torch.compiler.disable(_progress.end)


def observe(observer: Observer) -> None:
    """Call ``observer`` with every graph that is scheduled while torch writes a trace; a second call changes nothing.

    It gets the graph, its policy and kind, the folder of the trace, and torch's id of the compilation.
    """
    _progress.observers[observer] = None


def scheduled(graph: fx.Graph, policy: SchedulePolicy) -> None:
    """Let observers see a scheduled graph."""
    folder = getattr(_internal.LOG_TRACE_HANDLER, "root_dir", None)  # of TORCH_TRACE
    if folder is not None:
        for observer in _progress.observers:
            observer(graph, policy, _graph_kind(), Path(folder), str(CompileContext.current_compile_id()))


def trace_artifact(kind: Literal["artifact", "link"], text: str | None = None, **about: str) -> None:
    """Write a record of a kind that tlparse reads, and the text that it carries, into torch's trace."""
    _internal.trace_structured(kind, lambda: about, payload_fn=lambda: text)


def ran(name: str, seconds: float) -> None:
    """Tell that a user's pass has run on the graph under way."""
    say("%s: %s ran in %.2f s", _graph_kind(), name, seconds)
