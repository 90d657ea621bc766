"""A program under torchrun whose ranks are killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HANGS_S = 300.0


@dataclass(frozen=True)
class Torchrun:
    """torchrun's own process, whose children are the ranks."""

    process: subprocess.Popen
    said: Path

    def workers(self) -> list[int]:
        """Process numbers of the ranks that are alive, in their order."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(number) for number in children.read_text().split()] if children.exists() else []

    def kill(self, rank: int, world: int) -> float:
        """Kill a rank as ``kill -9`` does, once all of them run; return when."""
        self.until(lambda: len(self.workers()) == world, "ranks to kill")
        os.kill(self.workers()[rank], signal.SIGKILL)
        return time.time()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _HANGS_S
        while not holds():
            assert self.process.poll() is None, f"torchrun ended, waiting for {what}\n{self.tail()}"
            assert time.monotonic() < deadline, f"no {what} within {_HANGS_S} s\n{self.tail()}"
            time.sleep(0.001)

    def finish(self) -> None:
        """Wait for the end of a program that succeeds."""
        assert self.process.wait(_HANGS_S) == 0, self.tail()

    def tail(self) -> str:
        return self.said.read_text(errors="replace")[-6000:]


@contextmanager
def torchrun(
    program: str, *options: object, ranks: int, restarts: int, said: Path, cache: Path
) -> Iterator[Torchrun]:
    """Start ``program``, a path in the repository, on ``ranks`` ranks that are restarted so often."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--master-port", str(port), str(ROOT / program), *map(str, options)]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    with said.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=output, stderr=subprocess.STDOUT)
    started = Torchrun(process, said)
    try:
        yield started
    finally:
        for number in (*started.workers(), process.pid) if process.poll() is None else ():
            os.kill(number, signal.SIGKILL)
        process.wait()
