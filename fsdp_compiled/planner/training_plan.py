"""A plan as text for a terminal or a pipe, and as a page."""

from __future__ import annotations

from pathlib import Path

from ..inspect.render.figures import counted, duration, size
from .options import Option, PlannedTraining, describe
from .page import Section, html

TITLES = ("ranks", "mesh", "step", "tokens/s", "MFU", "waits", "memory", "how")


class TrainingPlan(PlannedTraining):
    """What is fastest and fits on each number of ranks. ``print`` shows a table, advice and the code to write."""

    def __str__(self) -> str:
        sections = list(map(self._section, self.options))
        lines = [TITLES, *(line for section in sections for line in section.lines)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
        notes = [f"{section.ranks} ranks: {note}" for section in sections for note in section.notes]
        code = [f"{section.ranks} ranks:\n{section.code}" for section in sections if self.best(section.ranks)]
        head = f"{self.model}: {self._about()}"
        return "\n\n".join(("\n".join([head, *(line.rstrip() for line in table)]), "\n".join(notes), *code))

    def save(self, path: str | Path) -> Path:
        """Write the plan as one page that needs nothing else, and return its path, which ends in ``.html``."""
        path = Path(path)
        if path.suffix != ".html":
            raise ValueError(f"{path}: a plan is saved as .html, not as {path.suffix!r}; rename the file")
        path.write_text(html(self, self._about(), TITLES, list(map(self._section, self.options))))
        return path

    def _about(self) -> str:
        return (
            f"{self.parameters / 1e9:.3g} billion parameters, {self.tokens_per_sequence} tokens a sequence, "
            f"{self.tokens_per_step:,} tokens a step, {self.cluster.name} with {size(self.memory_bytes)} a rank"
        )

    def _section(self, ranks: int) -> Section:
        notes, tokens = list[str](), min(option.tokens for option in self.options[ranks])
        if abs(tokens / self.tokens_per_step - 1) > 0.01:
            each = tokens // (ranks * self.tokens_per_sequence)
            notes.append(f"{counted(each, 'sequence')} of each rank: {tokens:,} tokens a step")
        best = self.best(ranks)
        notes.append(f"what would help most: {self.advice(ranks)}" if best else self.advice(ranks))
        shown = best or [self.smallest(ranks)]
        return Section(ranks, notes, list(map(self._line, shown)), shown[0].code())

    def _line(self, option: Option) -> tuple[str, ...]:
        waits = option.parts_us["waits for collectives"] / option.step_us
        return (
            str(option.ranks),
            option.layout.mesh,
            duration(option.step_us),
            f"{option.tokens_per_s:,.0f}",
            f"{option.mfu(self.cluster):.1%}",
            f"{waits:.1%}",
            size(option.peak_bytes) + ("" if self.fits(option) else ", too much"),
            describe(option),
        )
