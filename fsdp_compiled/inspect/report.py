"""What users get: a capture and an explanation as objects that print a table, and a capture's files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .records import CapturedModel, ExplainedModel
from .render import figures
from .render.data import as_json, trace
from .render.html import html
from .render.png import png
from .render.text import capture_text, explanation_text

_WRITERS: dict[str, Callable[[CapturedModel], str | bytes]] = {
    ".trace.json": lambda capture: as_json(trace(capture)),  # before .json, which it ends with
    ".json": as_json,
    ".html": html,
    ".png": png,
}


class Capture(CapturedModel):
    """The compiled graphs of a model, and the estimated cost of their collectives. ``print`` shows a table."""

    def __str__(self) -> str:
        return capture_text(self)

    @property
    def headline(self) -> str:
        """How long the step takes by estimate, for how much of it compute waits, and what to try against that."""
        return figures.headline(self)

    def save(self, path: str | Path, *, beside: CapturedModel | None = None) -> Path:
        """Write the capture in the format that the path's suffix names. Equal captures make equal files.

        ``.html`` is one page that needs nothing else, ``.json`` the records as data (see :func:`as_json`),
        ``.trace.json`` a trace for Perfetto or chrome://tracing, and ``.png`` the timelines.

        A file that exists is replaced, or left as it was if anything fails. Returns the path.

        Args:
            beside: another capture, which the page compares with this one, timelines on one time axis.

        Raises:
            ValueError: the suffix is none of these, or not ``.html`` where there is another capture.
            ImportError: matplotlib is missing and the suffix is ``.png``.
            OSError: the file cannot be written.
        """
        path, expected = Path(path), ", ".join(_WRITERS)
        writer = next((writer for suffix, writer in _WRITERS.items() if path.name.endswith(suffix)), None)
        if writer is None:
            raise ValueError(f"{path}: a capture is saved as {expected}, not as {path.suffix!r}; rename the file")
        if beside is not None and writer is not html:
            raise ValueError(f"{path}: two captures are compared in an .html file, not in {path.suffix!r}")
        content = writer(self) if beside is None else html(self, beside)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
            return partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


class Explanation(ExplainedModel):
    """What :func:`explain` found. ``print`` shows a table with the reasons below it."""

    def __str__(self) -> str:
        return explanation_text(self)
