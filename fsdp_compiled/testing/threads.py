"""Ranks that are threads of this process, over torch's own in-process collectives."""

from __future__ import annotations

import threading
import time
import traceback
import unittest
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

# Checked on torch 2.11.0, 2.13.0 and 2.15.0: a process group among threads, which functional collectives reach too.
from torch._C._distributed_c10d import HashStore, _set_thread_isolation_mode  # type: ignore[attr-defined]

_LAST_WORDS_S = 0.5  # for a thread that is told to end


def ranks_are_threads() -> bool:
    """Return whether ranks are threads at present."""
    return type(dist.distributed_c10d._world).__name__ == "ThreadLocalWorld"


def run_on_threads(world: int, body: Callable[[int], None], timeout_s: float) -> None:
    """Run ``body(rank)`` in ``world`` threads, each with a default process group of its own.

    Args:
        world: number of ranks.
        body: what each rank runs.
        timeout_s: after which threads that still run are left behind.

    Raises:
        AssertionError: a rank failed or hung; it has every failing rank's traceback.
        unittest.SkipTest: a rank asked for it and none failed.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    outcomes: dict[int, BaseException | None] = {}
    store = HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group(
                "threaded", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=timeout_s)
            )
            body(rank)
            outcomes[rank] = None
        except BaseException as error:
            outcomes[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)  # wakes ranks that wait for this one

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    _set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if hung:
            threaded.ProcessLocalGroup.exception_handle(TimeoutError())
            for thread in threads:
                thread.join(_LAST_WORDS_S)
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
        torch.compiler.reset()
    _raise_first([f"--- rank {rank} ---\nhung for {timeout_s} s" for rank in hung], outcomes)


def _raise_first(failures: list[str], outcomes: dict[int, BaseException | None]) -> None:
    skipped = None
    for rank, error in sorted(outcomes.items()):
        if isinstance(error, unittest.SkipTest):
            skipped = error
        elif error is not None and not isinstance(error, SystemExit):
            failures.append(f"--- rank {rank} ---\n{''.join(traceback.format_exception(error))}")
    if failures:
        raise AssertionError("\n".join(failures))
    if skipped is not None:
        raise skipped
