"""Runs a test's body on gloo ranks: processes that start once per session and serve every test.

    @on_ranks(2)
    def test_something():
        ...  # runs on both ranks, in a fresh default process group

An assertion that fails on any rank fails the test with that rank's traceback. A rank that hangs is ended, and
the pool starts anew for the next test.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from fsdp_compiled.testing import RankProcesses
from fsdp_compiled.testing.processes import Setting

WORLD = 4
SETTING = Setting(group_timeout=timedelta(seconds=90), test_timeout_s=600)

_pool: RankProcesses | None = None


def pool() -> RankProcesses:
    """Return the session's pool; start it at first use, or after a rank died."""
    global _pool
    if _pool is None or not _pool.alive:
        _pool = RankProcesses(WORLD)
    return _pool


def close_pool() -> None:
    global _pool
    if _pool is not None:
        _pool.close()
    _pool = None


def on_ranks(world: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on ``world`` ranks."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**kwargs: Any) -> None:
            pool().run(world, functools.partial(_call, test.__module__, test.__name__, kwargs), SETTING)

        return run

    return decorate


def _call(module: str, name: str, kwargs: dict[str, Any], rank: int) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**kwargs)


def same_on_ranks(value: Any) -> None:
    """Assert that every rank calls this with an equal value."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == values[0] for other in values), f"ranks differ: {values}"
