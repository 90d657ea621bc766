"""CPython's memory for the frames of a trace, which are many."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_SLOTS = 1 << 16  # of 8 bytes; a chunk is a power of two that holds a frame and some more: here 1 MiB


def gives_chunks_back(version: tuple[Any, ...] = sys.version_info[:3]) -> bool:
    """Tell whether CPython gives a chunk of its stack back to the system as soon as the frames in it return.

    Since 3.11 it keeps frames in chunks; https://github.com/python/cpython/issues/142183 was mended in 3.13.13 and
    3.14.4. *Source:* their changelogs (``Misc/NEWS.d``); pull requests 145789 and 146123.
    """
    return version < (3, 13, 13) or (3, 14) <= version < (3, 14, 4)


def with_room_for_callees(function: F) -> F:
    """Let frames below a call of ``function`` share one chunk of CPython's stack, of which 512 KiB is left for them.

    Chunks commonly have 16 KiB, and CPython takes one from the system when a call does not fit into the last. Where
    it :func:`gives_chunks_back`, each call of a loop at such a depth takes 7 us instead of 0.02, and tracing and
    lowering a large graph has loops at many depths. A frame as large as this one gets a chunk of its own, larger
    still. It costs a call 10 us; memory that no frame writes to is never backed. Other versions need none of it.
    """
    assert isinstance(function, FunctionType)
    if gives_chunks_back():
        function.__code__ = function.__code__.replace(co_stacksize=_SLOTS)
    return function
