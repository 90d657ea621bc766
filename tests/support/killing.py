"""Trains by examples/train/elastic.py, kills ranks, and checks what was lost and what was computed."""

from __future__ import annotations

import json
import random
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.torchrun import Torchrun, torchrun

EVERY = 4  # steps between checkpoints
SIZES = ("--save-every", EVERY, "--seq", 16, "--batch", 4, "--lr", 1e-2)


@dataclass(frozen=True)
class Training:
    """One folder, which several torchruns in turn may train in."""

    folder: Path
    cache: Path

    def start(self, *options: object, ranks: int = 2, restarts: int = 0) -> AbstractContextManager[Torchrun]:
        self.folder.mkdir(exist_ok=True)
        return torchrun(
            "examples/train/elastic.py",
            *(*SIZES, "--out", self.folder, "--data", self.text(), *options),
            ranks=ranks,
            restarts=restarts,
            said=self.folder / "said",
            cache=self.cache,
        )

    def run(self, *options: object, ranks: int = 2) -> None:
        with self.start(*options, ranks=ranks) as started:
            started.finish()

    def text(self) -> Path:
        """A small text, so that a start reads little."""
        path = self.cache.parent / "text.txt"
        if not path.exists():
            path.write_bytes(random.Random(0).randbytes(20_000))
        return path

    def records(self, key: str) -> list[dict[str, Any]]:
        log = self.folder / "log.jsonl"
        lines = log.read_text().split("\n") if log.exists() else []
        return [record for record in map(json.loads, filter(None, lines)) if key in record]

    def saved(self) -> list[int]:
        return sorted(int(path.parent.name[5:]) for path in self.folder.glob("step_*/.metadata"))

    def is_writing(self) -> bool:
        return any(not (path / ".metadata").exists() for path in self.folder.glob("step_*"))

    def kill(self, started: Torchrun, rank: int) -> dict[str, Any]:
        """Kill a rank, wait until training goes on, and check what was lost; return what the program measured."""
        saved, restarts = self.saved(), len(self.records("resumed"))
        (self.folder / "killed").write_text(str(started.kill(rank, world=2)))
        started.until(lambda: len(self.records("resumed")) > restarts, "restart")
        restart = self.records("resumed")[restarts]
        assert restart["resumed"] >= max(saved, default=0)
        assert restart["lost"] <= 2 * EVERY  # more than one EVERY: the newest checkpoint was being written
        assert {"notice", "restart", "load", "first step"} <= restart["seconds"].keys()
        return restart

    def assert_losses_are_those_of(self, other: Training, steps: range, rel: float = 0.0) -> None:
        """Compare every step that was taken, also those that were taken again."""
        want = {record["step"]: record["loss"] for record in other.records("loss")}
        taken = self.records("loss")
        assert {record["step"] for record in taken} == set(steps)
        for record in taken:
            assert record["loss"] == pytest.approx(want[record["step"]], rel=rel, abs=0.0), record
