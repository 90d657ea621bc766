"""Real text as bytes: files of a directory, split into training and held-out files."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TEXT_SUFFIXES = {".py", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".json", ".html"}
HELD_OUT_EVERY = 20  # one file in twenty is never trained on
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, each 1-D uint8."""

    train: Tensor
    held_out: Tensor
    description: str

    def sample(self, batch: int, seq: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random training windows: tokens and the tokens that follow them, both ``[batch, seq]`` int64."""
        starts = torch.randint(len(self.train) - seq, (batch,), generator=generator)
        windows = torch.stack([self.train[start : start + seq + 1] for start in starts]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def held_out_windows(self, count: int, seq: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` evenly spaced held-out windows, in the form of :meth:`sample`."""
        starts = torch.linspace(0, len(self.held_out) - seq - 1, count).long()
        windows = torch.stack([self.held_out[start : start + seq + 1] for start in starts]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load(path: str | None, seq: int) -> Corpus:
    """Read a file or a directory; None reads the Python standard library's own source files.

    Raises:
        ValueError: there is no text, or too little for one window of ``seq`` bytes on either side.
    """
    root = Path(path) if path else Path(sysconfig.get_paths()["stdlib"])
    files = [root] if root.is_file() else _text_files(root, TEXT_SUFFIXES if path else {".py"})
    if len(files) == 1:
        text = files[0].read_bytes()[:MAX_BYTES]
        cut = len(text) - max(len(text) // HELD_OUT_EVERY, min(len(text) // 2, seq + 2))
        train, held_out = text[:cut], text[cut:]
    else:
        held_out = b"".join(file.read_bytes() for file in files[::HELD_OUT_EVERY])
        train = b"".join(file.read_bytes() for i, file in enumerate(files) if i % HELD_OUT_EVERY)[:MAX_BYTES]
    for name, text in (("training", train), ("held-out", held_out)):
        if len(text) < seq + 2:
            raise ValueError(f"{root}: expected at least {seq + 2} bytes of {name} text, got {len(text)}")
    description = f"{len(files)} files of {root}, {len(train) / 1e6:.1f} MB to train on"
    return Corpus(_tensor(train), _tensor(held_out), description)


def _text_files(root: Path, suffixes: set[str]) -> list[Path]:
    files = []
    for file in sorted(root.rglob("*")):
        inside = set(file.relative_to(root).parts)
        if file.suffix in suffixes and file.is_file() and not inside & {"site-packages", "test", "tests"}:
            files.append(file)
    return files


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
