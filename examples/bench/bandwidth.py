"""Calibrate, then measure all-gathers and reduce-scatters anew and hold them against what calibration has recorded.

Sizes are all powers of two from 64 KiB to 64 MiB; at those that calibration left out, its record is interpolated.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/bench/bandwidth.py

Collectives of one size follow each other, two of them started, as in a step: a run is 8 MiB of them, or one. Rates
are those of unsharded bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compiled.cli.calibrate import calibrate
from fsdp_compiled.collectives import backend
from fsdp_compiled.passes.cost import per_second

MIB = 2**20
RUN = 8 * MIB
SIZES = [MIB // 16 * 2**n for n in range(11)]
ROUNDS, ROUND_S = 4, 0.2


def all_gather(group: dist.ProcessGroup, size: int) -> Callable[[], dist.Work]:
    shard = torch.zeros(size // 4 // dist.get_world_size())
    unsharded = torch.zeros(size // 4)
    return partial(backend.all_gather, unsharded, shard, group)


def reduce_scatter(group: dist.ProcessGroup, size: int) -> Callable[[], dist.Work]:
    shard = torch.zeros(size // 4 // dist.get_world_size())
    unsharded = torch.zeros(size // 4)
    return partial(backend.reduce_scatter, shard, unsharded, group, dist.ReduceOp.SUM)


def run(start: Callable[[], dist.Work], count: int) -> float:
    """Return the seconds that ``count`` collectives take, the mean over the ranks."""
    dist.barrier()
    began = time.perf_counter()
    under_way = [start() for _ in range(min(2, count))]
    for _ in range(count - len(under_way)):
        under_way.pop(0).wait()
        under_way.append(start())
    for work in under_way:
        work.wait()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds)
    return seconds.item() / dist.get_world_size()


def rates(kind: Callable[[int], Callable[[], dist.Work]], sizes: list[int]) -> dict[int, float]:
    """Return bytes per second by size, of the lower quartile of runs that are spread over several rounds."""
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size in sizes:
            start, count = kind(size), max(1, RUN // size)
            run(start, count)
            times = 2 + min(40, int(ROUND_S / run(start, count)))
            taken[size] += [run(start, count) for _ in range(times)]
    return {size: max(size, RUN) / statistics.quantiles(each, n=4)[0] for size, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    group = dist.new_group()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cluster = calibrate(Path(folder) / "cluster.json")
    (group_curves,) = cluster.intra.measured
    table: list[dict[str, Any]] = []
    for kind, curve in ((all_gather, group_curves.all_gather), (reduce_scatter, group_curves.reduce_scatter)):
        for size, measured in rates(partial(kind, group), SIZES).items():
            recorded = per_second(curve, size)
            figures = {"KiB": size / 1024, "recorded": recorded, "measured": measured}
            table.append({"kind": kind.__name__, **figures, "off": measured / recorded - 1})
    off = [abs(line["off"]) for line in table]
    if dist.get_rank() == 0:
        for line in table:
            print(
                "{kind:15} {KiB:6.0f} KiB {recorded:9.3g} recorded {measured:9.3g} bytes/s {off:+5.0%}".format(**line)
            )
        print(f"off by {statistics.median(off):.1%} in the median, {max(off):.1%} at worst")
        if args.json:
            setup = {"ranks": dist.get_world_size(), "torch": torch.__version__}
            args.json.write_text(json.dumps({**setup, "collectives": table}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
