"""How bytes, times and lists of indices are written for people: three digits and a unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import floor, log10


def size(count_bytes: int) -> str:
    """Return for example ``1.5 MiB``."""
    return _scaled(count_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def duration(time_us: float) -> str:
    """Return for example ``840 µs`` or ``12.3 ms``."""
    return _scaled(round(time_us, 2), 1000, ("µs", "ms", "s"))


def _scaled(value: float, factor: int, units: Sequence[str]) -> str:
    index = 0
    while float(_digits(value)) >= factor and index + 1 < len(units):
        value, index = value / factor, index + 1
    return f"{_digits(value)} {units[index]}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def indices(numbers: Iterable[int]) -> str:
    """Return rising numbers with runs of three or more joined: ``#0, #3, #7-9``."""
    runs = groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    listed = [[f"#{number}" for _, number in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1][1:]}" if len(run) > 2 else ", ".join(run) for run in listed)


def ticks(end: float, most: int) -> list[float]:
    """Return at most ``most + 1`` round numbers from 0 to ``end``: multiples of 1, 2 or 5 times a power of ten."""
    if end <= 0:
        return [0.0]
    power = 10.0 ** floor(log10(end / most))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= end / most)
    return [index * step for index in range(int(end / step * (1 + 1e-9)) + 1)]
