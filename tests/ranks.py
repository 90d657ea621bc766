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
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

WORLD = 4
GROUP_TIMEOUT = timedelta(seconds=90)
TEST_TIMEOUT_S = 600


class Pool:
    """``WORLD`` processes, each at the end of a pipe."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, sys.path))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world: int, module: str, name: str, kwargs: dict[str, Any]) -> None:
        """Run ``module.name(**kwargs)`` on the first ``world`` ranks."""
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            for pipe in self._pipes[:world]:
                pipe.send((f"{folder}/store", world, module, name, kwargs))
            failures = self._collect(dict(zip(self._pipes[:world], range(world), strict=True)))
        if failures:
            raise AssertionError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())))

    def _collect(self, waiting: dict[Connection, int]) -> dict[int, str]:
        failures: dict[int, str] = {}
        while waiting:
            ready = wait(list(waiting), timeout=TEST_TIMEOUT_S if not failures else 100)
            if not ready:
                failures |= dict.fromkeys(waiting.values(), "hung; the pool was restarted")
                self.close()
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[index]
                try:
                    text = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    text = "the process died"
                    self.close()
                if text is not None:
                    failures[rank] = text
        return failures

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()


_pool: Pool | None = None


def pool() -> Pool:
    """Return the session's pool; start it at first use, or after a rank died."""
    global _pool
    if _pool is None or not _pool.alive:
        _pool = Pool()
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
            pool().run(world, test.__module__, test.__name__, kwargs)

        return run

    return decorate


def same_on_ranks(value: Any) -> None:
    """Assert that every rank calls this with an equal value."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == values[0] for other in values), f"ranks differ: {values}"


# ---- in the rank's process ----


def _serve(rank: int, pipe: Connection, path: list[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send(_run_one(rank, *task))


def _run_one(rank: int, store: str, world: int, module: str, name: str, kwargs: dict[str, Any]) -> str | None:
    import torch
    import torch.distributed as dist

    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        test = getattr(importlib.import_module(module), name).__wrapped__
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=GROUP_TIMEOUT
        )
        test(**kwargs)
    except BaseException:
        return traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return None
