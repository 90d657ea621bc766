"""Time Muon's step on sharded matrices: ours, with DTensors, and what no step can do without.

    torchrun --nproc-per-node 2 examples/bench/muon.py

Contenders step in turn, so that drift of the machine affects all alike, on the matrices of a Llama's layers. The
floor is Newton-Schulz of one rank's share of them and AdamW's step on shards. Also measured: the step where every
all-to-all takes a time D longer, half of a round's Newton-Schulz, beside the step without and twice D; and the host's
time for many small matrices. ``--json FILE`` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Muon, Optimizer

from fsdp_compiled import step_on_shards
from fsdp_compiled.collectives import backend
from fsdp_compiled.optim.matrix_rules import MUON

Shape = tuple[int, int]
LAYERS = {"16 x 256": (16, 256), "4 x 384": (4, 384), "16 x 128": (16, 128)}


def matrices_of(layers: int, width: int) -> list[Shape]:
    """Return the shapes of a Llama's matrices: attention with a quarter of the heads for keys, and the MLP."""
    hidden, kv = -(-width * 8 // 3 // 32) * 32, width // 4
    return layers * [
        (width, width),
        (kv, width),
        (kv, width),
        (width, width),
        *2 * [(hidden, width)],
        (width, hidden),
    ]


def sharded(shapes: list[Shape], mesh: DeviceMesh) -> list[nn.Parameter]:
    """Return parameters with gradients, drawn."""

    def drawn(shape: Shape) -> DTensor:
        local = torch.randn(-(-shape[0] // mesh.size()), shape[1])
        return DTensor.from_local(local, mesh, [Shard(0)])

    params = [nn.Parameter(drawn(shape)) for shape in shapes]
    for param in params:
        param.grad = drawn(tuple(param.shape))
    return params


def newton_schulz(shapes: list[Shape]) -> Callable[[], None]:
    """Return what orthogonalises drawn matrices of these shapes by torch's own function."""
    matrices, settings = [torch.randn(shape) for shape in shapes], Muon([torch.zeros(1, 1)]).defaults

    def run() -> None:
        for matrix in matrices:
            MUON.matrix_function(settings, matrix.bfloat16())

    return run


def in_turn(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each, but for a first one."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, step in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(each[1:]) for name, each in seconds.items()}


class Late(dist.Work):
    """Work that ends no sooner than so many seconds after its start."""

    def __init__(self, work: dist.Work, delay_s: float) -> None:
        super().__init__()
        self.work, self.ends = work, time.perf_counter() + delay_s

    def wait(self, timeout: timedelta = timedelta(minutes=5)) -> bool:
        self.work.wait()
        time.sleep(max(0.0, self.ends - time.perf_counter()))
        return True


@contextmanager
def delayed(delay_s: float) -> Iterator[None]:
    """Let every all-to-all take longer."""
    start = backend.all_to_all
    with mock.patch.object(backend, "all_to_all", lambda *args: Late(start(*args), delay_s)):
        yield


def compare(shapes: list[Shape], mesh: DeviceMesh, steps: int) -> dict[str, float]:
    """Return milliseconds of each contender, and ratios."""
    ours = step_on_shards(Muon(sharded(shapes, mesh)))
    contenders: dict[str, Callable[[], Any]] = {
        "ours": ours.step,
        "Newton-Schulz of all on every rank": newton_schulz(shapes),
        "AdamW on shards": step_on_shards(AdamW(sharded(shapes, mesh))).step,
    }
    found = in_turn(contenders, steps)
    dtensors = Muon(sharded(shapes, mesh))
    pair = in_turn({"ours, again": ours.step, "Muon on DTensors": dtensors.step}, 3)
    found["Muon on DTensors"] = pair["Muon on DTensors"]
    everywhere = found["Newton-Schulz of all on every rank"]
    found["of the floor"] = found["ours"] / (everywhere / mesh.size() + found["AdamW on shards"])
    found["of Newton-Schulz on every rank"] = found["ours"] / everywhere
    found["faster than DTensors"] = pair["Muon on DTensors"] / pair["ours, again"]
    return found


def hide(mesh: DeviceMesh, steps: int) -> dict[str, float]:
    """Return milliseconds of a step of four rounds with all-to-alls that take longer, and without."""
    ours = step_on_shards(Muon(sharded([(512, 512)] * 4 * mesh.size(), mesh)))
    a_round = in_turn({"": newton_schulz([(512, 512)])}, steps)[""]
    delay_s = a_round / 2e3

    def late() -> None:
        with delayed(delay_s):
            ours.step()

    found = in_turn({"without a delay": ours.step, "with a delay": late}, steps)
    found |= {"delay": 1e3 * delay_s, "a round's Newton-Schulz": a_round}
    found["of the step and two delays"] = found["with a delay"] / (found["without a delay"] + 2e3 * delay_s)
    return found


def small(mesh: DeviceMesh, steps: int, count: int = 1000) -> dict[str, float]:
    """Return milliseconds of a step of many small matrices, and of what owners compute in it."""
    shapes: list[Shape] = [(64, 64)] * count
    ours: Optimizer = step_on_shards(Muon(sharded(shapes, mesh)))
    found = in_turn({"ours": ours.step, "Newton-Schulz of a share": newton_schulz(shapes[:: mesh.size()])}, steps)
    found["beyond Newton-Schulz"] = found["ours"] - found["Newton-Schulz of a share"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="*", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--steps", type=int, default=9, help="of which the median counts")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(dist.get_rank())
    found = {size: compare(matrices_of(*LAYERS[size]), mesh, args.steps) for size in args.size}
    found["four rounds"] = hide(mesh, args.steps)
    found["1000 matrices of 64 x 64"] = small(mesh, args.steps)
    if dist.get_rank() == 0:
        for name, figures in found.items():
            print(f"\n{name}, {mesh.size()} ranks, gloo, torch {torch.__version__}; milliseconds and ratios")
            for what, figure in figures.items():
                print(f"  {what:36}{figure:10.{1 if figure > 5 else 3}f}")
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"ranks": mesh.size(), "torch": torch.__version__, "figures": found}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
