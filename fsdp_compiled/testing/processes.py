"""Ranks that are processes: they start once and serve one job after another, each in a fresh process group."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import traceback
import unittest
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_START_TIMEOUT_S = 300.0
_IMPORTED = f"{__package__}.imported"
GC_THRESHOLDS = 100_000, 50, 10  # compilers make many objects and few cycles; a job's end collects those
_GRACE_S = 10.0  # beyond the group's timeout, for the other ranks once one has failed


@dataclass(frozen=True)
class Setting:
    """How ranks talk to each other.

    Args:
        backend: of the process group.
        device_type: of each rank; on other than "cpu" a rank takes the device of its number.
        group_timeout: of a collective.
        test_timeout_s: until the next rank ends.
    """

    backend: str = "gloo"
    device_type: str = "cpu"
    group_timeout: timedelta = timedelta(seconds=60)
    test_timeout_s: float = 300.0


@dataclass(frozen=True)
class _Job:
    body: bytes  # pickled, so that a rank that cannot import it can say so
    world: int
    store: str
    setting: Setting


@dataclass(frozen=True)
class _Outcome:
    failure: str | None = None
    skipped: str | None = None


class RankProcesses:
    """``world`` processes, each at the end of a pipe.

    Args:
        world: number of processes, and the most ranks that a job can have.

    Raises:
        RuntimeError: a process did not start.
    """

    def __init__(self, world: int) -> None:
        # Else what it imports asks CUDA itself whether there are GPUs, and no process forked after that can use them.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        context = get_context("forkserver")
        context.set_forkserver_preload([_IMPORTED])
        self.world = world
        # Each job's store stays: one that is gone blocks a thread that a job left for the group's timeout.
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._jobs = 0
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, sys.path), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for rank, pipe in enumerate(self._pipes):
            try:
                started = pipe.poll(_START_TIMEOUT_S) and pipe.recv()
            except EOFError:
                started = False
            if not started:
                self.close()
                raise RuntimeError(f"rank {rank}: its process did not start; does the test's script guard its main?")

    @property
    def alive(self) -> bool:
        """Whether all processes run; else, as after a rank died or hung or ``run`` was interrupted, make new ones."""
        return all(process.is_alive() for process in self._processes)

    def run(self, world: int, body: Callable[[int], None], setting: Setting = Setting()) -> None:
        """Run ``body(rank)`` on the first ``world`` ranks, in a default process group of their own.

        Args:
            world: number of ranks.
            body: picklable; it is imported anew by each rank.
            setting: how the ranks talk.

        Raises:
            ValueError: ``world`` is more than there are processes.
            AssertionError: a rank failed, died or hung; it has every failing rank's traceback.
            unittest.SkipTest: a rank asked for it and none failed.
        """
        if not 1 <= world <= self.world:
            raise ValueError(f"world: expected 1 to {self.world} ranks, got {world}; start more processes")
        self._jobs += 1
        job = _Job(pickle.dumps(body), world, f"{self._folder.name}/store{self._jobs}", setting)
        try:
            for pipe in self._pipes[:world]:
                with suppress(ConnectionError):  # of a process that has died since
                    pipe.send(job)
            outcomes = self._collect(world, setting)
        except BaseException:  # a later job would be given this one's outcomes
            self.close()
            raise
        failures = {rank: outcome.failure for rank, outcome in outcomes.items() if outcome.failure is not None}
        if failures:
            raise AssertionError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())))
        for outcome in outcomes.values():
            if outcome.skipped is not None:
                raise unittest.SkipTest(outcome.skipped)

    def _collect(self, world: int, setting: Setting) -> dict[int, _Outcome]:
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:world])}
        outcomes: dict[int, _Outcome] = {}
        timeout_s = setting.test_timeout_s
        lost = False
        while waiting:
            ready = [pipe for pipe in wait(list(waiting), timeout=timeout_s) if isinstance(pipe, Connection)]
            if not ready:
                outcomes |= dict.fromkeys(waiting.values(), _Outcome("hung; its process was ended"))
                lost = True
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = _Outcome(f"its process died{self._how_ended(rank)}")
                    lost = True
                if outcomes[rank].failure is not None:
                    timeout_s = min(timeout_s, setting.group_timeout.total_seconds() + _GRACE_S)
        if lost:
            self.close()
        return outcomes

    def _how_ended(self, rank: int) -> str:
        self._processes[rank].join(_GRACE_S)
        code = self._processes[rank].exitcode
        if code is None:
            return ""
        return f" of {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"

    def close(self) -> None:
        """End the processes; a second call does nothing."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _serve(rank: int, pipe: Connection, path: list[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    faulthandler.enable()
    sys.path[:] = path
    import_module(_IMPORTED)  # the server has, if it could
    torch.set_num_threads(1)
    gc.set_threshold(*GC_THRESHOLDS)
    gc.freeze()  # what was imported stays, and need not be looked through after each job
    pipe.send(True)  # it is ready
    while True:
        try:
            job = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send(_run(rank, job))


def _run(rank: int, job: _Job) -> _Outcome:
    setting = job.setting
    torch.manual_seed(0)
    try:
        body = pickle.loads(job.body)
        if setting.device_type != "cpu":
            torch.get_device_module(setting.device_type).set_device(rank)
        dist.init_process_group(
            setting.backend,
            init_method=f"file://{job.store}",
            rank=rank,
            world_size=job.world,
            timeout=setting.group_timeout,
        )
        if setting.backend == "gloo":
            dist.barrier()  # a body that ends at once would close connections that another rank is still making
        body(rank)
    except unittest.SkipTest as skip:
        return _Outcome(skipped=str(skip))
    except BaseException:
        return _Outcome(failure=traceback.format_exc())
    finally:
        _forget()
    return _Outcome()


def _forget() -> None:
    """Free what the job left: models hold process groups, whose threads go on as long as they live.

    What communicates is freed first: DistributedDataParallel, freed after its process group, hangs now and then.
    """
    torch.compiler.reset()
    _clear_sharding_prop_cache()  # of meshes, whose groups are gone for equal ones of the next job
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.freeze()  # what is left are torch's caches, which grow with every job
