"""One capture of a model's compiled graphs, and the files it can be saved as."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..passes.cost import Cluster
from ..passes.policy import SchedulePolicy
from .page import page
from .picture import picture
from .plain import plain
from .records import CapturedGraph
from .table import table
from .trace import trace


@dataclass(frozen=True)
class Capture:
    """What was compiled for a model, and what its collectives are estimated to cost. ``print`` shows a table.

    Args:
        model: the class name.
        parameters: how many elements all parameters have together, unsharded.
        world: ranks that the model is sharded over.
        torch_version: that compiled the graphs.
        cluster: that times are estimated for.
        schedule: what the user decided.
        graph_breaks: a reason for each.
        graphs: in order of compilation.
    """

    model: str
    parameters: int
    world: int
    torch_version: str
    cluster: Cluster
    schedule: SchedulePolicy
    graph_breaks: tuple[str, ...]
    graphs: tuple[CapturedGraph, ...]

    def __str__(self) -> str:
        return table(self)

    @property
    def peak_unsharded_bytes(self) -> int:
        """The largest of all graphs."""
        return max((graph.peak_unsharded_bytes for graph in self.graphs), default=0)

    def save(self, path: str | Path) -> Path:
        """Write the capture in the format that the path's suffix names. Equal captures make equal files.

        ``.html`` is one page that needs nothing else, ``.json`` the records as data (see :func:`plain`),
        ``.trace.json`` a trace for Perfetto or chrome://tracing, and ``.png`` the timelines.

        Args:
            path: of the file; it is replaced if it exists, and left as it was if anything fails.

        Returns:
            The path.

        Raises:
            ValueError: the suffix is none of these.
            ImportError: matplotlib is missing and the suffix is ``.png``.
            OSError: the file cannot be written.
        """
        path = Path(path)
        content = _writer(path)(self)
        _replace(path, content)
        return path


def _as_json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode(errors="replace")


_WRITERS: Mapping[str, Callable[[Capture], bytes]] = {
    ".trace.json": lambda capture: _as_json(trace(capture)),  # before .json, which it ends with
    ".json": lambda capture: _as_json(plain(capture)),
    ".html": lambda capture: page(capture).encode(errors="replace"),
    ".png": picture,
}


def _writer(path: Path) -> Callable[[Capture], bytes]:
    for suffix, writer in _WRITERS.items():
        if path.name.endswith(suffix):
            return writer
    raise ValueError(f"{path}: a capture is saved as {', '.join(_WRITERS)}, not as {path.suffix!r}; rename the file")


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
