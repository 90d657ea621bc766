"""Judges whether this machine can run the library, and what would slow it down or break it.

Each judgement is a function of what ``diagnose`` reads. It must run where the extras are not installed.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from .. import passes
from ..collectives.streams import has_streams
from ..passes import cost, inductor

OLDEST, NEWEST = (2, 11), (2, 15)  # supported versions of torch
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
NO_MATPLOTLIB = "missing: a capture cannot be saved as .png; pip install 'fsdp-compiled[inspect]'"


class Finding(NamedTuple):
    """The judgement on one property of the machine. A note is worth knowing; a problem: something fails or hangs."""

    level: Literal["ok", "note", "problem"]
    subject: str
    text: str  # what was found, and what to do about it


class FoundGpu(NamedTuple):
    name: str
    memory_bytes: int
    cluster: str  # name of the one whose constants estimate its times


def diagnose() -> list[Finding]:
    """Return a finding for every property of this machine and process. It changes nothing and starts nothing."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator is not None and has_streams(accelerator) else ""
    gpus = [_gpu(torch.device(kind, n)) for n in range(torch.accelerator.device_count() if kind else 0)]
    on_cpu = cost.detect(torch.device("cpu")).name if os.environ.get(cost.VARIABLE) else "CPU"
    backends = [name for name in BACKENDS if getattr(dist, f"is_{name}_available", lambda: False)()]
    built_for = torch.accelerator.current_accelerator()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    omp_threads, ranks = os.environ.get("OMP_NUM_THREADS"), os.environ.get("LOCAL_WORLD_SIZE", "")
    compiler = shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    version, matplotlib = _version("fsdp-compiled") or "not installed", _version("matplotlib")
    return [
        Finding("ok", "fsdp-compiled", f"{version} in {Path(__file__).parents[1]}"),
        Finding("ok", "Python", platform.python_version()),  # an older one cannot import this
        judge_torch(torch.__version__),
        judge_triton(_triton_version(), bool(gpus)),
        judge_compiler(compiler, Path(sysconfig.get_path("include"), "Python.h").exists()),
        *judge_gpus(gpus, built_for.type if built_for is not None and has_streams(built_for) else None, on_cpu),
        judge_backends(backends, bool(gpus)),
        judge_threads(torch.get_num_threads(), cpus, omp_threads, int(ranks) if ranks.isdecimal() else None),
        *(
            judge_slot(slot, inductor.beside_users_passes(slot, ours), inductor.installed(slot))
            for slot, ours in passes.slots(passes.SchedulePolicy()).items()
        ),
        *judge_settings(read_settings()),
        Finding("ok" if matplotlib else "note", "matplotlib", matplotlib or NO_MATPLOTLIB),
    ]


def _gpu(device: torch.device) -> FoundGpu:
    found = torch.get_device_module(device).get_device_properties(device)
    return FoundGpu(found.name, found.total_memory, cost.detect(device).name)


def _version(package: str) -> str | None:
    return next((found.version for found in metadata.distributions(name=package)), None)


def _triton_version() -> str | None:
    with suppress(ImportError):  # its package has different names
        return import_module("triton").__version__
    return None


def read_settings() -> dict[str, Any]:
    """Return the values of those settings in ``RULES`` that this torch has."""
    found = {}
    for rule in RULES:
        with suppress(AttributeError):
            found[rule.setting] = resolve_name(rule.setting)
    return found


def judge_torch(version: str) -> Finding:
    oldest, newest, excluded = ("{}.{}".format(*each) for each in (OLDEST, NEWEST, (NEWEST[0], NEWEST[1] + 1)))
    release = tuple(int(part) for part in version.split(".")[:2])
    if OLDEST <= release <= NEWEST:
        return Finding("ok", "torch", f"{version}; {oldest} to {newest} are supported")
    text = f"expected {oldest} to {newest}, got {version}; pip install 'torch>={oldest},<{excluded}'"
    return Finding("problem", "torch", text)


def judge_triton(version: str | None, has_gpus: bool) -> Finding:
    if version is None and has_gpus:
        return Finding("problem", "triton", "missing, and Inductor cannot compile for GPUs without it; install it")
    return Finding("ok" if version else "note", "triton", f"{version or 'missing'}; needed to compile for GPUs only")


def judge_compiler(path: str | None, has_python_headers: bool) -> Finding:
    """Judge whether Inductor can compile for the CPU, and Triton its launchers."""
    if path and has_python_headers:
        return Finding("ok", "C++ compiler", f"{path}; Inductor needs one")
    missing = [] if path else ["a C++ compiler (install g++, or name one in CXX)"]
    missing += [] if has_python_headers else ["Python.h (install Python's development headers)"]
    return Finding("problem", "C++ compiler", f"Inductor compiles nothing without {' and '.join(missing)}")


def judge_gpus(gpus: Sequence[FoundGpu], built_for: str | None, on_cpu: str = "CPU") -> Iterator[Finding]:
    """Judge the GPUs, for a torch built for this kind of device; ``on_cpu`` is the cluster of ranks without any."""
    if not gpus:
        check = "check the driver and variables that hide devices, such as CUDA_VISIBLE_DEVICES"
        built = f"; torch is built for {built_for}, so {check}" if built_for else ""
        text = f"none: ranks run on the CPU; times are estimated for cluster {on_cpu}{built}"
        yield Finding("note" if built_for else "ok", "GPU", text)
    for index, gpu in enumerate(gpus):
        is_known = gpu.cluster in gpu.name or gpu.cluster.endswith(", calibrated")  # as calibrate calls its own
        advice = ", which it is not: describe yours with SchedulePolicy(cluster=Cluster(...))"
        text = f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB; times are estimated for cluster {gpu.cluster}"
        yield Finding("ok" if is_known else "note", f"GPU {index}", text + ("" if is_known else advice))
    if len({gpu.name for gpu in gpus}) > 1:
        text = "of different kinds: ranks would estimate different times; give one SchedulePolicy(cluster=...) to all"
        yield Finding("problem", "GPUs", text)


def judge_backends(names: Sequence[str], has_gpus: bool) -> Finding:
    needed, device = ("nccl", "GPUs") if has_gpus else ("gloo", "the CPU")
    found = ", ".join(names) or "none"
    if needed in names:
        return Finding("ok", "distributed", found)
    text = f"expected {needed} for collectives on {device}, found {found}; install a torch that has it"
    return Finding("problem", "distributed", text)


def judge_threads(threads: int, cpus: int, omp_threads: str | None, ranks: int | None) -> Finding:
    """Judge whether ``ranks`` processes (None: unknown), each with ``threads``, have enough of the ``cpus``."""
    text = f"{threads} in each process on {cpus} processors (OMP_NUM_THREADS {omp_threads or 'unset'})"
    best, advice = max(cpus // (ranks or 1), 1), ""
    if threads > best:
        advice = f": too many for {ranks or 1} ranks here; set OMP_NUM_THREADS={best}"
    elif ranks and ranks > cpus:
        advice = f": {ranks} ranks here take turns on them"
    elif not ranks and not omp_threads and threads > 1:
        advice = "; several ranks here would compete: torchrun sets 1, else set it to processors / ranks"
    return Finding("note" if advice else "ok", "threads", text + advice)


def judge_slot(slot: str, value: Any, is_installed: bool = True) -> Finding:
    """Judge ``value``, which one of Inductor's custom-pass slots holds once ours are installed."""
    ours, *users = filter(None, value if isinstance(value, (list, tuple)) else (value, value.user))
    names = list(map(inductor.name_of, users))
    uncached = [name for name, user in zip(names, users, strict=True) if not getattr(user, "uuid", lambda: None)()]
    text = ", ".join(map(inductor.name_of, ours.passes))
    if not is_installed:
        text = f"empty until the first fully_shard adds {text}"
    if users:
        text += f"; after ours: {', '.join(names)}"
    if uncached:
        text += f"; {' and '.join(uncached)} without uuid(): graphs are not cached; derive from CustomGraphPass"
    return Finding("note" if uncached else "ok", slot, text)


class Rule(NamedTuple):
    """A setting of torch that conflicts with graphs scheduled by our passes where it is on, or where it is off."""

    setting: str
    conflicts: Literal["on", "off"]
    level: Literal["note", "problem"]
    consequence: str

    def is_broken(self, value: Any) -> bool:
        return ("off" if value in (None, False, "none") else "on") == self.conflicts


_INDUCTOR = "torch._inductor.config"
_OVERLAP = f"{_INDUCTOR}.aten_distributed_optimizations"
_NO_BUCKETS_OF_OURS = "changes none of our buckets, which are pinned; use SchedulePolicy(bucket=...)"
_MOVES = "with reorder_for_compute_comm_overlap_passes it moves collectives out of our schedule and its memory bound"
_HANGS = "ranks may communicate while they compile, and hang when one finds its graph in the cache"
_EVERY_RUN_COMPILES = "every process compiles everything anew"

RULES = (
    Rule("torch._dynamo.config.disable", "on", "note", "torch.compile does nothing"),
    Rule(f"{_INDUCTOR}.bucket_all_gathers_fx", "on", "note", _NO_BUCKETS_OF_OURS),
    Rule(f"{_INDUCTOR}.bucket_reduce_scatters_fx", "on", "note", _NO_BUCKETS_OF_OURS),
    Rule(f"{_INDUCTOR}.bucket_all_reduces_fx", "on", "note", _NO_BUCKETS_OF_OURS),
    Rule(f"{_OVERLAP}.enable_overlap_scheduling", "on", "problem", _HANGS),
    Rule(f"{_INDUCTOR}.reorder_for_compute_comm_overlap", "on", "note", _MOVES),
    Rule(f"{_INDUCTOR}.use_joint_graph_passes", "off", "problem", "no unsharded parameter is freed after forward"),
    Rule(f"{_INDUCTOR}.use_post_grad_passes", "off", "problem", "our passes do not run, and nothing overlaps"),
    Rule(f"{_INDUCTOR}.custom_partitioner_fn", "on", "note", "it must obey recompute tags, or nothing is freed"),
    Rule(f"{_INDUCTOR}.force_disable_caches", "on", "note", _EVERY_RUN_COMPILES),
    Rule(f"{_INDUCTOR}.fx_graph_cache", "off", "note", _EVERY_RUN_COMPILES),
    Rule("torch._functorch.config.enable_autograd_cache", "off", "note", _EVERY_RUN_COMPILES),
)


def judge_settings(values: Mapping[str, Any]) -> list[Finding]:
    """Judge settings of torch, given by full name, by ``RULES``."""
    ok = Finding("ok", "settings", f"none of the {len(values)} that were checked conflicts with our schedules")
    return [
        Finding(rule.level, "setting", f"{rule.setting}={values[rule.setting]!r}: {rule.consequence}")
        for rule in RULES
        if rule.setting in values and rule.is_broken(values[rule.setting])
    ] or [ok]
