"""What a process holds, sampled while it works, and whether it grows."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path

import torch

PROC = Path("/proc/self")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
LEAST_SAMPLES = 6


@dataclass(frozen=True)
class Sample:
    """After a garbage collection."""

    step: int
    rss_kib: int
    descriptors: int
    threads: int
    objects: int  # that Python's collector knows
    tensors: int
    tensor_kib: int  # memory of their storages, each counted once


def sample(step: int) -> Sample:
    gc.collect()
    objects = gc.get_objects()
    tensors = [each for each in objects if issubclass(type(each), torch.Tensor)]  # isinstance would wake proxies
    storages = {s.data_ptr(): s.nbytes() for s in map(_storage, tensors) if s is not None}
    return Sample(
        step,
        int((PROC / "statm").read_text().split()[1]) * PAGE_KIB,
        len(list((PROC / "fd").iterdir())),
        len(list((PROC / "task").iterdir())),
        len(objects),
        len(tensors),
        sum(storages.values()) // 1024,
    )


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage() if is_plain and tensor.device.type == "cpu" else None


def growing(samples: Sequence[Sample], allowed: Mapping[str, float]) -> list[str]:
    """Say what grows: what every sample of a third exceeds all samples of the third before in, twice in a row.

    A single jump, as by a cache that is filled late, is no growth.

    Args:
        samples: in order, after the warm-up.
        allowed: by how much a measure may grow in a step, 0 for those not named.

    Raises:
        ValueError: there are too few to tell.
    """
    if len(samples) < LEAST_SAMPLES:
        raise ValueError(f"samples: expected at least {LEAST_SAMPLES}, got {len(samples)}; allow more time")
    steps = samples[-1].step - samples[0].step
    sentences = []
    for name in [field.name for field in fields(Sample) if field.name != "step"]:
        values = [getattr(each, name) for each in samples]
        margin = allowed.get(name, 0.0) * steps / 3
        third = len(values) // 3
        thirds = values[:third], values[third:-third], values[-third:]
        if all(max(before) + margin < min(after) for before, after in pairwise(thirds)):
            rate = (values[-1] - values[0]) / steps
            sentences.append(f"{name} grows by {rate:.2f} a step: {', '.join(map(str, values))}")
    return sentences


def table(rows: Sequence[tuple[str, Sequence[Sample]]]) -> str:
    """Return a row for each named run: its last step, and each measure at its first and last sample."""
    names = [field.name for field in fields(Sample)][1:]
    lines = [["run", "steps", *names]]
    for title, samples in rows:
        first, last = asdict(samples[0]), asdict(samples[-1])
        lines.append([title, str(last["step"]), *(f"{first[name]} .. {last[name]}" for name in names)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
