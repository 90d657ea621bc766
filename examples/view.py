"""What a person sees of a training run: a progress bar and the loss curve. Needs the ``inspect`` extra."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import TracebackType

try:
    import matplotlib
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
except ImportError as error:
    raise SystemExit(f"{error}; install what the examples show with: pip install 'fsdp-compiled[inspect]'") from error


class Progress:
    """Shows loss and tokens/s on one rank, and once, after the second step, the time spent compiling.

    Args:
        steps: how many steps there will be.
        title: printed first.
        visible: False on all ranks but one.
        compiles: whether the first step compiles anything.
    """

    def __init__(self, steps: int, title: str, visible: bool, compiles: bool) -> None:
        self._console = Console(highlight=False, quiet=not visible)
        self._console.print(title)
        self._bar = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not visible or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, loss="-", speed="-")
        self._seconds: list[float] = []
        self._compiles = compiles
        self._lines_every = max(steps // 10, 1)

    def step(self, step: int, loss: float, seconds: float, tokens: int) -> None:
        """Show that ``step`` (from 0) took ``seconds`` for ``tokens`` tokens."""
        self._seconds.append(seconds)
        recent = self._seconds[1:][-20:] or self._seconds
        speed = f"{tokens / statistics.median(recent):,.0f}"
        self._bar.update(self._task, advance=1, loss=f"{loss:.4f}", speed=speed)
        if len(self._seconds) == 2 and self._compiles:
            first, second = self._seconds
            self._console.print(f"compiling took {max(first - second, 0):.1f} s: step 1 beyond step 2")
        if not self._console.is_terminal and (step + 1) % self._lines_every == 0:
            self._console.print(f"step {step + 1}  loss {loss:.4f}  {speed} tokens/s")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


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
