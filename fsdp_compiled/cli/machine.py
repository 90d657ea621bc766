"""Reads what this machine and process have: versions, compilers, devices, processors, torch's settings.

It must not judge any of it.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from importlib import metadata
from pathlib import Path

import torch

# Checked on torch 2.11.0, 2.13.0 and 2.15.0. Settings that are read by name are in their modules.
import torch._dynamo.config
import torch._functorch.config
import torch.distributed as dist
from torch._inductor import config

from .. import passes
from ..passes import cost, inductor


@dataclass(frozen=True)
class Gpu:
    """One GPU: its name, its memory, and the name of the cluster whose constants estimate its times."""

    name: str
    memory_bytes: int
    cluster: str


@dataclass(frozen=True)
class Slot:
    """One of Inductor's custom-pass slots.

    Args:
        name: of the field of ``torch._inductor.config``.
        ours: names of our passes that belong there.
        installed: whether they are there; the first ``fully_shard`` of a process puts them there.
        users: names of the user's passes in the slot, and whether each has a ``uuid`` that caches can use.
    """

    name: str
    ours: tuple[str, ...]
    installed: bool
    users: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class Machine:
    """Everything that is looked at.

    Args:
        package: version of fsdp_compiled, and where it lies.
        python: version.
        torch: version.
        triton: version, or None where it cannot be imported.
        matplotlib: version, or None.
        compiler: path of the C++ compiler that Inductor would call, or None.
        python_headers: whether ``Python.h`` is there.
        cuda_build: version of CUDA that torch was built for, or None.
        backends: of torch.distributed, those that this torch has.
        gpus: those that this process sees.
        cpus: processors that this process may use.
        threads: that torch computes with.
        omp_num_threads: of the environment, or None.
        ranks_here: ranks on this machine as ``torchrun`` says, or None.
        slots: in the order in which they run.
        settings: values of settings of torch by full name, as far as this torch has them.
    """

    package: str
    python: str
    torch: str
    triton: str | None
    matplotlib: str | None
    compiler: str | None
    python_headers: bool
    cuda_build: str | None
    backends: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    cpus: int
    threads: int
    omp_num_threads: str | None
    ranks_here: int | None
    slots: tuple[Slot, ...]
    settings: Mapping[str, object]


def look(settings: Iterable[str]) -> Machine:
    """Read the state of this machine and process. It changes nothing and starts nothing.

    Args:
        settings: full names of settings of torch to read.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    return Machine(
        package=f"{_installed_version('fsdp-compiled') or 'not installed'} in {Path(__file__).parent}",
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_imported_version("triton"),
        matplotlib=_installed_version("matplotlib"),
        compiler=_compiler(),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        cuda_build=torch.version.cuda,
        backends=_backends(),
        gpus=tuple(map(_gpu, range(torch.cuda.device_count()))) if torch.cuda.is_available() else (),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        ranks_here=int(ranks) if ranks else None,
        slots=tuple(_slot(name, run) for name, run in passes.slots(passes.SchedulePolicy()).items()),
        settings=dict(_settings(settings)),
    )


def _compiler() -> str | None:
    named = config.cpp.cxx if isinstance(config.cpp.cxx, (list, tuple)) else (config.cpp.cxx,)
    return next((path for name in named if name and (path := shutil.which(name))), None)


def _imported_version(name: str) -> str | None:
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return str(getattr(module, "__version__", "of unknown version"))


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _backends() -> tuple[str, ...]:
    if not dist.is_available():
        return ()
    return tuple(name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if getattr(dist, f"is_{name}_available")())


def _gpu(index: int) -> Gpu:
    device = torch.device("cuda", index)
    memory = torch.cuda.get_device_properties(device).total_memory
    return Gpu(torch.cuda.get_device_name(device), memory, cost.detect(device).name)


def _slot(name: str, run: inductor.Pipeline) -> Slot:
    value = getattr(config, name)
    entries = (value.user,) if isinstance(value, inductor.Chain) else value
    entries = entries if isinstance(entries, (list, tuple)) else (entries,)
    users = [entry for entry in entries if entry is not None and not isinstance(entry, inductor.Pipeline)]
    return Slot(
        name,
        ours=tuple(type(one).__name__ for one in run.passes),
        installed=inductor.installed(name) is not None,
        users=tuple((_pass_name(user), bool(getattr(user, "uuid", lambda: None)())) for user in users),
    )


def _pass_name(user: object) -> str:
    return getattr(user, "__name__", type(user).__name__)


def _settings(names: Iterable[str]) -> Iterator[tuple[str, object]]:
    for name in names:
        with suppress(AttributeError):  # this version of torch has no such setting
            yield name, reduce(getattr, name.split(".")[1:], torch)
