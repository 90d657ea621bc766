"""Ranks that may die: processes forked for one case each, whose ends are seen from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_HANGS_S = 90.0


@dataclass(frozen=True)
class End:
    """How a rank ended."""

    code: int  # negative: of the signal that killed it
    error: str = ""  # type and text
    seconds: float = 0.0  # since the fault


def ends(case: Callable[..., None], folder: Path, tcp: bool = False, world: int = 2, **kwargs: Any) -> list[End]:
    """Run ``case(rank, folder, **kwargs)`` on ``world`` processes; an uncaught error ends a process."""
    context = get_context("forkserver")
    context.set_forkserver_preload([case.__module__])
    store = f"tcp://localhost:{_free_port()}" if tcp else f"file://{folder / 'store'}"
    processes = [
        context.Process(target=_serve, args=(case, rank, world, store, folder, kwargs)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + _HANGS_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hung, f"ranks {hung} hung"
    return [_end(folder, rank, process.exitcode) for rank, process in enumerate(processes)]


def die() -> None:
    """End this process as a machine's failure would."""
    os.kill(os.getpid(), signal.SIGKILL)


def note_fault(folder: Path) -> None:
    """Let ``End.seconds`` count from now."""
    (folder / "fault").write_text(str(time.monotonic()))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _end(folder: Path, rank: int, code: int) -> End:
    said = folder / f"end{rank}"
    if not said.exists():
        return End(code)
    told = json.loads(said.read_text())
    return End(code, told["error"], told["at"] - float((folder / "fault").read_text()))


def _serve(
    case: Callable[..., None], rank: int, world: int, store: str, folder: Path, kwargs: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
        case(rank, folder, **kwargs)
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}", "at": time.monotonic()}
        (folder / f"end{rank}").write_text(json.dumps(told))
        sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter does, and multiprocessing not
        os._exit(1)
    os._exit(0)
