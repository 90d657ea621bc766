"""Judges whether a machine can run the library, and what would slow it down or break it.

It judges what ``machine.look`` has read; it must not read anything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .machine import Machine, Slot

Level = Literal["ok", "note", "problem"]

OLDEST, NEWEST = (2, 11), (2, 15)  # supported versions of torch
OLDEST_PYTHON = (3, 11)
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """The judgement on one property of the machine.

    Args:
        level: ok; note: works, but worth knowing; problem: something fails or hangs.
        subject: what it is about, in a word or two.
        text: what was found, and what to do about it.
    """

    level: Level
    subject: str
    text: str


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """Return a finding for every property of a machine."""
    return (
        Finding("ok", "fsdp-compiled", machine.package),
        python(machine),
        torch_version(machine),
        triton(machine),
        compiler(machine),
        *gpus(machine),
        backends(machine),
        threads(machine),
        *map(slot, machine.slots),
        *settings(machine),
        matplotlib(machine),
    )


# ---- judging ----


def python(machine: Machine) -> Finding:
    """Judge the version of Python."""
    if _release(machine.python) < OLDEST_PYTHON:
        return Finding("problem", "Python", f"expected 3.11 or later, got {machine.python}; make a new environment")
    return Finding("ok", "Python", machine.python)


def torch_version(machine: Machine) -> Finding:
    """Judge the version of torch."""
    supported = f"{_dotted(OLDEST)} to {_dotted(NEWEST)}"
    if not OLDEST <= _release(machine.torch) <= NEWEST:
        advice = f"pip install 'torch>={_dotted(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}'"
        return Finding("problem", "torch", f"expected {supported}, got {machine.torch}; {advice}")
    return Finding("ok", "torch", f"{machine.torch}; {supported} are supported")


def triton(machine: Machine) -> Finding:
    """Judge whether Triton is there where it is needed."""
    if machine.triton is not None:
        return Finding("ok", "triton", f"{machine.triton}; needed to compile for GPUs only")
    if machine.gpus:
        return Finding("problem", "triton", "missing, and Inductor cannot compile for GPUs without it; install it")
    return Finding("note", "triton", "missing; needed to compile for GPUs only")


def compiler(machine: Machine) -> Finding:
    """Judge whether Inductor can compile for the CPU, and Triton its launchers."""
    missing = [] if machine.compiler else ["a C++ compiler (install g++, or name one in CXX)"]
    missing += [] if machine.python_headers else ["Python.h (install Python's development headers)"]
    if not missing:
        return Finding("ok", "C++ compiler", f"{machine.compiler}; Inductor needs one")
    return Finding("problem", "C++ compiler", f"Inductor compiles nothing without {' and '.join(missing)}")


def gpus(machine: Machine) -> Iterator[Finding]:
    """Judge the GPUs and say which constants estimate their times."""
    if not machine.gpus:
        built = f"; torch is built for CUDA {machine.cuda_build}, so check the driver and CUDA_VISIBLE_DEVICES"
        text = f"none: ranks run on the CPU; times are estimated for cluster CPU{built if machine.cuda_build else ''}"
        yield Finding("note" if machine.cuda_build else "ok", "GPU", text)
    for index, gpu in enumerate(machine.gpus):
        what = f"{gpu.name}, {gpu.memory_bytes / _GIB:.0f} GiB; times are estimated for cluster {gpu.cluster}"
        if gpu.cluster in gpu.name:
            yield Finding("ok", f"GPU {index}", what)
        else:
            advice = "which it is not: describe yours with SchedulePolicy(cluster=Cluster(...))"
            yield Finding("note", f"GPU {index}", f"{what}, {advice}")
    if len({gpu.name for gpu in machine.gpus}) > 1:
        text = "of different kinds: ranks would estimate different times; give one SchedulePolicy(cluster=...) to all"
        yield Finding("problem", "GPUs", text)


def backends(machine: Machine) -> Finding:
    """Judge whether torch.distributed can run the collectives on this machine's devices."""
    needed, device = ("nccl", "GPUs") if machine.gpus else ("gloo", "the CPU")
    if needed not in machine.backends:
        found = ", ".join(machine.backends) or "none"
        text = f"expected {needed} for collectives on {device}, found {found}; install a torch that has it"
        return Finding("problem", "distributed", text)
    return Finding("ok", "distributed", ", ".join(machine.backends))


def threads(machine: Machine) -> Finding:
    """Judge whether the ranks on this machine would use more threads than it has processors."""
    set_to = "unset" if machine.omp_num_threads is None else machine.omp_num_threads
    what = f"{machine.threads} in each process on {machine.cpus} processors (OMP_NUM_THREADS {set_to})"
    ranks = machine.ranks_here or 1
    best = max(machine.cpus // ranks, 1)
    if machine.threads > best:
        return Finding("note", "threads", f"{what}: too many for {ranks} ranks here; set OMP_NUM_THREADS={best}")
    if ranks > machine.cpus:
        return Finding("note", "threads", f"{what}: {ranks} ranks here take turns on them")
    if machine.ranks_here is None and machine.omp_num_threads is None and machine.threads > 1:
        text = "several ranks here would compete: torchrun sets 1, else set it to processors / ranks"
        return Finding("note", "threads", f"{what}; {text}")
    return Finding("ok", "threads", what)


def slot(found: Slot) -> Finding:
    """Judge one of Inductor's slots: our passes in it, and the user's beside them."""
    ours = ", ".join(found.ours)
    state = ours if found.installed else f"empty until the first fully_shard adds {ours}"
    beside = f"; after ours: {', '.join(name for name, _ in found.users)}" if found.users else ""
    uncached = [name for name, has_uuid in found.users if not has_uuid]
    if uncached:
        text = f"{' and '.join(uncached)} without uuid(): graphs are not cached; derive from CustomGraphPass"
        return Finding("note", found.name, f"{state}{beside}; {text}")
    return Finding("ok", found.name, f"{state}{beside}")


@dataclass(frozen=True)
class Rule:
    """A setting of torch that conflicts with graphs scheduled by our passes.

    Args:
        setting: its full name.
        is_bad: tells whether a value is one.
        level: of the finding.
        consequence: of a bad value.
    """

    setting: str
    is_bad: Callable[[Any], bool]
    level: Level
    consequence: str


def _is_on(value: Any) -> bool:
    return bool(value)


def _is_off(value: Any) -> bool:
    return not value


def _is_bucketing(value: Any) -> bool:
    return value != "none"


_INDUCTOR = "torch._inductor.config"
_OVERLAP = f"{_INDUCTOR}.aten_distributed_optimizations"
_NO_BUCKETS_OF_OURS = "changes none of our buckets, which are pinned; use SchedulePolicy(bucket=...)"
_MOVES = "with reorder_for_compute_comm_overlap_passes it moves collectives out of our schedule and its memory bound"
_HANGS = "ranks may communicate while they compile, and hang when one finds its graph in the cache"
_EVERY_RUN_COMPILES = "every process compiles everything anew"

RULES = (
    Rule("torch._dynamo.config.disable", _is_on, "note", "torch.compile does nothing"),
    Rule(f"{_INDUCTOR}.bucket_all_gathers_fx", _is_bucketing, "note", _NO_BUCKETS_OF_OURS),
    Rule(f"{_INDUCTOR}.bucket_reduce_scatters_fx", _is_bucketing, "note", _NO_BUCKETS_OF_OURS),
    Rule(f"{_INDUCTOR}.bucket_all_reduces_fx", _is_bucketing, "note", _NO_BUCKETS_OF_OURS),
    Rule(f"{_OVERLAP}.enable_overlap_scheduling", _is_on, "problem", _HANGS),
    Rule(f"{_INDUCTOR}.reorder_for_compute_comm_overlap", _is_on, "note", _MOVES),
    Rule(f"{_INDUCTOR}.use_joint_graph_passes", _is_off, "problem", "no unsharded parameter is freed after forward"),
    Rule(f"{_INDUCTOR}.use_post_grad_passes", _is_off, "problem", "our passes do not run, and nothing overlaps"),
    Rule(f"{_INDUCTOR}.custom_partitioner_fn", _is_on, "note", "it must obey recompute tags, or nothing is freed"),
    Rule(f"{_INDUCTOR}.force_disable_caches", _is_on, "note", _EVERY_RUN_COMPILES),
    Rule(f"{_INDUCTOR}.fx_graph_cache", _is_off, "note", _EVERY_RUN_COMPILES),
    Rule("torch._functorch.config.enable_autograd_cache", _is_off, "note", _EVERY_RUN_COMPILES),
)


def settings(machine: Machine) -> Iterator[Finding]:
    """Judge torch's settings by ``RULES``."""
    bad = [rule for rule in RULES if rule.setting in machine.settings and rule.is_bad(machine.settings[rule.setting])]
    for rule in bad:
        text = f"{rule.setting}={machine.settings[rule.setting]!r}: {rule.consequence}"
        yield Finding(rule.level, "setting", text)
    if not bad:
        yield Finding(
            "ok", "settings", f"none of the {len(machine.settings)} that were checked conflicts with our schedules"
        )


def matplotlib(machine: Machine) -> Finding:
    """Judge whether captures can be saved as pictures."""
    if machine.matplotlib is None:
        text = "missing: a capture cannot be saved as .png; pip install 'fsdp-compiled[inspect]'"
        return Finding("note", "matplotlib", text)
    return Finding("ok", "matplotlib", machine.matplotlib)


def _release(version: str) -> tuple[int, ...]:
    """Return (2, 13) for ``2.13.0+cpu``."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("+")[0].split(".")[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
