"""How many collectives of eager hooks and of graphs start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fsdp_compiled.collectives import backend

_NAMES = ("all_gather", "all_gather_coalesced", "reduce_scatter", "all_reduce")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Give how many start within the block, by their names in ``backend``."""
    counts: Counter[str] = Counter()

    def counting(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: counts.update([name]) or start(*args)

    with mock.patch.multiple(backend, **{name: counting(name, getattr(backend, name)) for name in _NAMES}):
        yield counts
