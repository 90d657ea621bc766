"""Frames below a call with room for them share a chunk of CPython's stack."""

from __future__ import annotations

import resource

import pytest

from fsdp_compiled.tracing.frames import gives_chunks_back, with_room_for_callees
from fsdp_compiled.tracing.root_call import TracedCall

CALLS = 500  # at each depth
DEPTHS = 400  # more than a chunk of 16 KiB has room for


def _leaf(a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0, f: int = 0, g: int = 0, h: int = 0) -> None:
    """Have a larger frame than ``_faults_at``, so that at some depth it alone does not fit."""


def _faults_at(depth: int) -> int:
    """Return how many pages the system gives this thread while a loop at ``depth`` calls a function."""
    if depth:
        return _faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        _leaf()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def _most_faults() -> int:
    return max(_faults_at(depth) for depth in range(DEPTHS))


@with_room_for_callees
def _most_faults_with_room() -> int:
    return _most_faults()


@pytest.mark.skipif(not gives_chunks_back(), reason="CPython keeps a chunk for the next call")
def test_python_takes_memory_from_the_system_for_each_call_at_some_depth() -> None:
    assert _most_faults() >= CALLS


def test_no_depth_does_below_a_call_with_room() -> None:
    assert _most_faults_with_room() < CALLS


@pytest.mark.parametrize(
    ("version", "gives_back"),
    [
        ((3, 11, 7), True),
        ((3, 12, 12), True),
        ((3, 13, 12), True),
        ((3, 13, 13), False),
        ((3, 14, 3), True),
        ((3, 14, 4), False),
        ((3, 15, 0), False),
    ],
)
def test_which_versions_of_cpython_need_room(version: tuple[int, ...], gives_back: bool) -> None:
    assert gives_chunks_back(version) is gives_back


@pytest.mark.skipif(not gives_chunks_back(), reason="no call is given room")
def test_the_outermost_call_has_room() -> None:
    assert TracedCall.__call__.__code__.co_stacksize == _most_faults_with_room.__code__.co_stacksize
