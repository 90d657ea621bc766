"""What a person sees of a run: at every moment what it is doing, and the loss curve. Needs the ``inspect`` extra."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from pathlib import Path
from types import TracebackType

try:
    import matplotlib
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress
except ImportError as error:
    raise SystemExit(f"{error}; install what the examples show with: pip install 'fsdp-compiled[inspect]'") from error

from waiting import QUIET_S

LINES = 10  # of a phase that counts, where there is no terminal


class Progress(logging.Handler):
    """Shows on one rank which phase of a run is under way, for how long, and how far it is.

    On a terminal that is a bar; elsewhere lines, with at most ``QUIET_S`` seconds between them. It also shows what
    the logger ``fsdp_compiled`` says of compilations.

    Args:
        title: printed first.
        visible: False on all ranks but one.
    """

    def __init__(self, title: str, visible: bool) -> None:
        super().__init__(logging.INFO)
        self._console = Console(highlight=False, quiet=not visible, soft_wrap=True)
        self._console.print(title)
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not visible or not self._console.is_terminal,
        )
        self._visible, self._log, self._log_level = visible, logging.getLogger("fsdp_compiled"), logging.NOTSET
        self._phase, self._note, self._total, self._done = "", "", 0, 0
        self._began = self._spoke = time.perf_counter()
        self._ended = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)

    def begin(self, phase: str, total: int = 0) -> None:
        """Show that ``phase`` begins, of ``total`` parts if they can be counted."""
        self._phase, self._note, self._total, self._done = phase, "", total, 0
        self._began = time.perf_counter()
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._bar.add_task(phase, total=total or None, note="")
        if not self._console.is_terminal:
            self.say(phase)

    def advance(self, note: str = "") -> None:
        """Show that one more part is done, and a note on it."""
        self._done, self._note = self._done + 1, note
        for task in self._bar.task_ids:
            self._bar.update(task, advance=1, note=f"{self._done}/{self._total}  {note}")
        if not self._console.is_terminal and self._done % max(self._total // LINES, 1) == 0:
            self.say(self._where)

    def emit(self, record: logging.LogRecord) -> None:
        """Show what a logger says."""
        self._note = record.getMessage()
        for task in self._bar.task_ids:
            self._bar.update(task, note=self._note)
        self.say(f"  {self._note}")

    def say(self, text: str) -> None:
        """Show a line that stays."""
        self._spoke = time.perf_counter()
        self._console.print(text)

    @property
    def _where(self) -> str:
        count = f" {self._done}/{self._total}" if self._total else ""
        return f"{self._phase}{count}" + (f": {self._note}" if self._note else "")

    def _watch(self) -> None:
        """Break the silence where there is no terminal."""
        while not self._ended.wait(QUIET_S / 8):
            if time.perf_counter() - self._spoke > QUIET_S:
                self.say(f"{self._where}  ({time.perf_counter() - self._began:.0f} s)")

    def __enter__(self) -> Progress:
        if self._visible:
            self._log_level = self._log.level
            self._log.setLevel(logging.INFO)
            self._log.addHandler(self)
            self._bar.start()
            if not self._console.is_terminal:
                self._watching.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._visible:
            self._log.removeHandler(self)
            self._log.setLevel(self._log_level)
        self._ended.set()
        if self._watching.is_alive():
            self._watching.join()  # or a line of it might come afterwards
        self._bar.stop()


class Speed:
    """The speed of training steps, without the first, which compiles."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def step(self, seconds: float, tokens: int) -> str:
        """Return tokens per second, as the median of recent steps has it, after one more step."""
        self._seconds.append(seconds)
        recent = self._seconds[1:][-20:] or self._seconds
        return f"{tokens / statistics.median(recent):,.0f} tokens/s"

    @property
    def compiling_s(self) -> float:
        """What the first step took beyond the second."""
        return max(self._seconds[0] - self._seconds[1], 0.0) if len(self._seconds) > 1 else 0.0


def plot_losses(losses: list[float], held_out: float, path: Path) -> Path:
    """Draw the training loss per step and the final held-out loss; return ``path``."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", linewidth=1.2, label="training")
    axes.axhline(held_out, color="tab:orange", linestyle="--", label=f"held out, at the end: {held_out:.3f}")
    axes.set(xlabel="step", ylabel="cross-entropy per byte (nats)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
