"""Times how long a model takes to compile: to the end of its first backward, with cold caches.

    python examples/bench/bench_compile.py
    python examples/bench/bench_compile.py --cases 16x64 --contenders unsharded "full graph" --rounds 1
    python examples/bench/bench_compile.py --cases 4x64 32x64 128x64 --contenders "full graph" --rounds 1

The contenders are the unsharded model, FSDP2 with each block compiled, our regional compilation (each block's compute
compiled), our one full graph, whose blocks are regions, compiled once for all of them, and the same without regions.
The second and the third leave embedding, head and loss uncompiled. Each measurement is a new process with
OMP_NUM_THREADS=1, empty caches and a simulated process group that communicates nothing: every contender pays equally
for g++'s precompiled header, and none for importing torch. Contenders take turns, round after round.

Prints the median seconds, their ratio to the unsharded model's, the median CPU seconds (compilers included; other
work on the machine changes them less), and how many different kernels Inductor generated, each a run of g++ on a
CPU. ``--json FILE`` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from compare import fsdp2_compiled_blocks, ours_eager, ours_regional
from torch import Tensor
from torch._inductor import config  # checked on torch 2.13.0 and 2.15.0

import fsdp_compiled
from fsdp_compiled.testing.llama import Config, Llama

BATCH = 1
TITLES = f"{'layers x width':16}{'contender':26}{'seconds':>9}{'of unsharded':>14}{'CPU seconds':>13}{'kernels':>9}"

# A kernel in Inductor's Python code, C++ or Triton: its name and its source.
DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\(.*?'''(.*?)'''", re.DOTALL | re.MULTILINE)


# ---- contenders ----


def unsharded(model: Llama) -> Callable[..., Tensor]:
    return torch.compile(model, fullgraph=True)


def full_graph(model: Llama) -> Callable[..., Tensor]:
    return torch.compile(ours_eager(model), fullgraph=True)


def no_regions(model: Llama) -> Callable[..., Tensor]:
    return fsdp_compiled.compile(ours_eager(model), regions="off", fullgraph=True)


CONTENDERS: dict[str, Callable[[Llama], Callable[..., Tensor]]] = {
    "unsharded": unsharded,
    "FSDP2, blocks compiled": fsdp2_compiled_blocks,
    "regional": ours_regional,
    "full graph": full_graph,
    "full graph, no regions": no_regions,
}


# ---- one measurement ----


@dataclass(frozen=True)
class Case:
    """The size of a model."""

    layers: int
    width: int

    def __str__(self) -> str:
        return f"{self.layers}x{self.width}"

    def config(self, seq: int) -> Config:
        """Return what compare.py makes of these sizes."""
        heads = max(self.width // 64, 1)
        kv_heads = heads // 3 if heads % 3 == 0 else 1
        hidden = -(-self.width * 8 // 3 // 32) * 32
        return Config(256, self.width, self.layers, heads, kv_heads, hidden, max_seq=seq)


@dataclass(frozen=True)
class Measurement:
    """One compilation with cold caches."""

    seconds: float
    cpu_seconds: float  # of the process and the compilers that it started
    kernels: int


def build(case: Case, seq: int) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Return an unsharded model and inputs for its forward: tokens and targets, ``[1, seq]``."""
    model = Llama(case.config(seq))
    model.init_weights()
    tokens = torch.zeros(BATCH, seq, dtype=torch.int64)
    return model, (tokens, tokens)


def first_step(contender: str, model: Llama, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Shard and compile as the contender does, run forward and backward; return seconds and CPU seconds."""
    start, cpu_start = time.perf_counter(), cpu_seconds()
    CONTENDERS[contender](model)(*batch).backward()
    return time.perf_counter() - start, cpu_seconds() - cpu_start


def cpu_seconds() -> float:
    """Return the time that this process and its finished children have been running on a CPU."""
    return sum(os.times()[:4])


def measure(case: Case, contender: str, args: argparse.Namespace) -> Measurement:
    """Compile in a new process that finds nothing compiled before."""
    options = ["--cases", case, "--contenders", contender, "--world", args.world, "--seq", args.seq]
    command = [sys.executable, __file__, "--here", *map(str, options)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        printed = subprocess.check_output(command, env=cold_environment(directory), text=True)
        seconds, of_cpu = map(float, printed.split())
        return Measurement(seconds, of_cpu, count_kernels(Path(directory)))


def cold_environment(directory: str) -> dict[str, str]:
    """Return this process's environment, with one thread and every cache in an empty ``directory``.

    Temporary files too: g++'s precompiled headers go there, whatever Inductor's cache directory is.
    """
    caches = {"TMPDIR": directory, "TORCHINDUCTOR_CACHE_DIR": f"{directory}/inductor"}
    return {**os.environ, **caches, "TRITON_CACHE_DIR": f"{directory}/triton", "OMP_NUM_THREADS": "1"}


def count_kernels(directory: Path) -> int:
    """Count the kernels in the code that Inductor wrote below ``directory``, equal ones of several graphs once."""
    codes = [path.read_text() for path in directory.rglob("*.py")]
    return len({source.replace(name, "") for code in codes for name, source in DEFINITION.findall(code)})


# ---- figures ----


@dataclass(frozen=True)
class Row:
    """All rounds of a contender in a case."""

    layers: int
    width: int
    contender: str
    seconds: float  # the median
    of_unsharded: float | None  # the ratio of medians
    cpu_seconds: float  # the median
    kernels: int
    rounds: tuple[Measurement, ...]

    def __str__(self) -> str:
        ratio = "" if self.of_unsharded is None else f"{self.of_unsharded:.2f}"
        figures = f"{self.seconds:9.1f}{ratio:>14}{self.cpu_seconds:13.1f}{self.kernels:9}"
        return f"{f'{self.layers} x {self.width}':16}{self.contender:26}{figures}"


def compare_contenders(case: Case, args: argparse.Namespace) -> list[Row]:
    """Measure every contender once per round, in turn."""
    found: dict[str, list[Measurement]] = {name: [] for name in args.contenders}
    for _ in range(args.rounds):
        for name, measurements in found.items():
            measurements.append(measure(case, name, args))
    return summarize(case, found)


def summarize(case: Case, found: dict[str, list[Measurement]]) -> list[Row]:
    medians = {name: statistics.median(each.seconds for each in found[name]) for name in found}
    base = medians.get("unsharded")
    return [
        Row(
            case.layers,
            case.width,
            name,
            seconds=medians[name],
            of_unsharded=medians[name] / base if base else None,
            cpu_seconds=statistics.median(each.cpu_seconds for each in measurements),
            kernels=max(each.kernels for each in measurements),
            rounds=tuple(measurements),
        )
        for name, measurements in found.items()
    ]


def save(path: Path, args: argparse.Namespace, rows: Sequence[Row]) -> None:
    about = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
    about |= {"compile_threads": config.compile_threads, "world": args.world, "seq": args.seq, "batch": BATCH}
    path.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


# ---- command line ----


def main() -> None:
    args = parse()
    if args.here:
        measure_here(args)
        return
    print(
        f"Llama, sequence {args.seq}, batch {BATCH}, {args.world} simulated ranks, torch {torch.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} cores, {config.compile_threads} compile threads, "
        f"median of {args.rounds}\n\n{TITLES}"
    )
    rows: list[Row] = []
    for case in args.cases:
        for row in compare_contenders(case, args):
            print(row, flush=True)
            rows.append(row)
        if args.json:
            save(args.json, args, rows)


def measure_here(args: argparse.Namespace) -> None:
    """Print seconds and CPU seconds of the first contender in the first case, and nothing else."""
    dist.init_process_group("fake", rank=0, world_size=args.world)
    print(*first_step(args.contenders[0], *build(args.cases[0], args.seq)))
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [Case(4, 384), Case(16, 64), Case(32, 64)]
    parser.add_argument("--cases", type=to_case, nargs="+", default=sizes, metavar="LAYERSxWIDTH")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each contender in each case")
    parser.add_argument("--world", type=int, default=2, help="ranks to shard over")
    parser.add_argument("--seq", type=int, default=8, help="tokens in the one sequence of the batch")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--here",
        action="store_true",
        help="only print seconds and CPU seconds of the first case and contender, in this process with its caches",
    )
    return parser.parse_args()


def to_case(text: str) -> Case:
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if sizes is None:
        raise argparse.ArgumentTypeError(f"expected LAYERSxWIDTH such as 16x64, got {text}")
    return Case(int(sizes[1]), int(sizes[2]))


if __name__ == "__main__":
    main()
