"""Waiting for what other threads and processes do, by condition: how long they take, a busy machine decides."""

from __future__ import annotations

import time
from collections.abc import Callable

_HANGS_S = 20.0


def until(holds: Callable[[], object]) -> bool:
    """Return True as soon as ``holds()`` is true; False if it is not for so long that it never will be."""
    end = time.monotonic() + _HANGS_S
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True
