"""Breaks the silence while imports take seconds; itself it imports nothing that does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_S = 4.0  # after so many seconds without a line, one says what is going on


def is_first_rank() -> bool:
    """Tell by what torchrun sets, before there is a process group; without torchrun there is one rank."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def importing(what: str, program: str) -> Iterator[None]:
    """Say on the first rank that ``what`` is imported, and every ``QUIET_S`` seconds that it still is.

    Args:
        what: for people to read.
        program: the caller's ``__name__``; one that is imported by others says nothing.
    """
    if program != "__main__" or not is_first_rank():
        yield
        return
    began, done = time.perf_counter(), threading.Event()

    def tell() -> None:
        while not done.wait(QUIET_S):
            print(f"importing {what}  ({time.perf_counter() - began:.0f} s)", flush=True)

    print(f"importing {what}", flush=True)
    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    try:
        yield
    finally:
        done.set()
        telling.join()  # or a line of it might come afterwards
