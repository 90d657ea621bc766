"""Train one model unsharded, with PyTorch's FSDP2 and with fsdp_compiled, interleaved step by step in one run.

    torchrun --nproc-per-node 2 examples/bench/compare.py

Every contender takes one step in turn, so that drift of the machine affects all equally. So does the wire: two
all-gathers and one reduce-scatter of all parameters without compute, which fully sharded training has to send.
Prints the median step time of each, its ratio to the best FSDP2 and to the limit (unsharded compiled step plus
wire), and the loss after the last step. ``--memory`` also captures the full graphs and prints their estimated step,
their peak of unsharded bytes and its bound; ``--json FILE`` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_compiled
from fsdp_compiled import SchedulePolicy, fully_shard, fully_shard_with_compiled_compute, step_on_shards
from fsdp_compiled.collectives import backend
from fsdp_compiled.inspect import capture
from fsdp_compiled.testing.llama import Config, Llama

MIB = 2**20
_c10d = torch.ops._c10d_functional


@dataclass
class Contender:
    """One contender; ``call`` takes (tokens, targets) and returns the loss."""

    name: str
    model: nn.Module
    call: Callable[..., Tensor]
    optimizers: list[torch.optim.Optimizer]
    schedule: SchedulePolicy | None = None
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Take one training step and record its time."""
        dist.barrier()
        start = time.perf_counter()
        loss = self.call(tokens, targets)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.loss = loss.item()
        self.seconds.append(time.perf_counter() - start)


def mesh_of(shards: int) -> DeviceMesh:
    """Return all ranks as one shard group, or as several of ``shards`` ranks, which hold replicas."""
    world = dist.get_world_size()
    if shards in (0, world):
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard"))


class Wire:
    """What has to be sent of as many fp32 numbers as the model has parameters, without compute.

    Two all-gathers and one reduce-scatter over each shard group, and an all-reduce of a shard over replicas.
    """

    def __init__(self, parameters: int, mesh: DeviceMesh) -> None:
        self.world = mesh.size(-1)
        self.group = mesh.get_group(-1)
        self.shards = self.group.group_name
        self.replicas = mesh.get_group(0).group_name if mesh.ndim > 1 else None
        self.shard = torch.zeros(-(-parameters // self.world))
        self.unsharded = torch.zeros(self.shard.numel() * self.world)
        self.reduced = torch.empty_like(self.shard)
        self.seconds: list[float] = []

    def step(self) -> None:
        """Send once and record the time."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(2):
            _c10d.wait_tensor(_c10d.all_gather_into_tensor(self.shard, self.world, self.shards))
        backend.reduce_scatter(self.reduced, self.unsharded, self.group, dist.ReduceOp.AVG).wait()
        if self.replicas is not None:
            _c10d.wait_tensor(_c10d.all_reduce(self.reduced, "avg", self.replicas))
        self.seconds.append(time.perf_counter() - start)


@dataclass(frozen=True)
class Setup:
    """How a contender shards, compiles and steps."""

    shard: Callable[[Llama, DeviceMesh | None], Callable[..., Tensor]]
    schedule: SchedulePolicy | None = None
    on_shards: bool = False  # whether its optimizer steps on local shards


def unsharded(model: Llama, mesh: DeviceMesh | None = None) -> Callable[..., Tensor]:
    return torch.compile(model)


def fsdp2(model: Llama, mesh: DeviceMesh | None = None) -> Callable[..., Tensor]:
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh)
    return torch_fully_shard(model, mesh=mesh)


def fsdp2_compiled_blocks(model: Llama, mesh: DeviceMesh | None = None) -> Callable[..., Tensor]:
    for block in model.blocks:
        block.compile()
    return fsdp2(model, mesh)


def ours_eager(model: Llama, mesh: DeviceMesh | None = None) -> Callable[..., Tensor]:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ours_regional(model: Llama, mesh: DeviceMesh | None = None) -> Callable[..., Tensor]:
    for block in model.blocks:
        fully_shard_with_compiled_compute(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full_graph(schedule: SchedulePolicy, on_shards: bool = True, regions: str = "auto") -> Setup:
    def shard(model: Llama, mesh: DeviceMesh | None = None) -> Callable[..., Tensor]:
        return fsdp_compiled.compile(ours_eager(model, mesh), schedule=schedule, regions=regions, fullgraph=True)

    return Setup(shard, schedule, on_shards)


CONTENDERS = {
    "unsharded compiled": Setup(unsharded),
    "FSDP2": Setup(fsdp2),
    "FSDP2, blocks compiled": Setup(fsdp2_compiled_blocks),
    "FSDP2 so, our optimizer step": Setup(fsdp2_compiled_blocks, on_shards=True),
    "eager": Setup(ours_eager, on_shards=True),
    "regional": Setup(ours_regional, on_shards=True),
    "full graph": full_graph(SchedulePolicy()),
    "full graph, DTensor optimizer": full_graph(SchedulePolicy(), on_shards=False),
}
DEFAULT = list(CONTENDERS)
CONTENDERS |= {
    "full graph, no regions": full_graph(SchedulePolicy(), regions="off"),
    "full graph, unit buckets": full_graph(SchedulePolicy(bucket="unit", prefetch=1)),
    "full graph, nothing kept": full_graph(SchedulePolicy(keep_unsharded_bytes=0)),
}


def make(name: str, config: Config, args: argparse.Namespace, mesh: DeviceMesh) -> Contender:
    model = Llama(config)
    model.init_weights(seed=0)
    setup = CONTENDERS[name]
    call = setup.shard(model, mesh)
    optimizers = make_optimizers(model, args.optimizer)
    if setup.on_shards:
        optimizers = list(map(step_on_shards, optimizers))
    return Contender(name, model, call, optimizers, setup.schedule)


def make_optimizers(model: Llama, kind: str) -> list[torch.optim.Optimizer]:
    """Return AdamW, or Muon for the blocks' matrices and AdamW for the others."""
    settings = {kind: True} if kind in ("foreach", "fused") else {}
    if kind != "muon":
        return [torch.optim.AdamW(model.parameters(), lr=3e-4, **settings)]
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    chosen = set(matrices)
    others = [param for param in model.parameters() if param not in chosen]
    return [torch.optim.Muon(matrices, lr=3e-4), torch.optim.AdamW(others, lr=3e-4)]


def batches(args: argparse.Namespace, config: Config) -> list[tuple[Tensor, Tensor]]:
    """Return one batch per rank and step; random tokens, the same for every contender."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (args.warmup + args.steps, args.batch, args.seq + 1)
    tokens = torch.randint(config.vocab, shape, generator=generator)
    return [(step[:, :-1].contiguous(), step[:, 1:].contiguous()) for step in tokens]


def table(contenders: list[Contender], wire: Wire, args: argparse.Namespace) -> list[dict[str, float | str | None]]:
    medians = {c.name: statistics.median(c.seconds[args.warmup :]) * 1e3 for c in contenders}
    best = min((ms for name, ms in medians.items() if name in ("FSDP2", "FSDP2, blocks compiled")), default=None)
    wire_ms = statistics.median(wire.seconds[args.warmup :]) * 1e3
    limit = medians["unsharded compiled"] + wire_ms if "unsharded compiled" in medians else None
    rows: list[dict[str, float | str | None]] = [{"contender": "wire", "median_ms": wire_ms}]
    for c in contenders:
        loss = torch.tensor(c.loss)
        dist.all_reduce(loss)
        rows.append(
            {
                "contender": c.name,
                "median_ms": medians[c.name],
                "of_best_fsdp2": medians[c.name] / best if best else None,
                "of_limit": medians[c.name] / limit if limit else None,
                "loss": loss.item() / dist.get_world_size(),
            }
        )
    return rows


def add_memory(rows: list[dict[str, float | str | None]], contenders: list[Contender], batch: list[Tensor]) -> None:
    """Capture every full graph; note the estimated step, its peak of unsharded bytes and the bound."""
    for row, contender in zip(rows[1:], contenders, strict=True):
        if contender.schedule is not None:
            captured = capture(contender.model, *batch, schedule=contender.schedule)
            row["estimate_ms"] = captured.step_us / 1e3
            row["collectives"] = sum(len(graph.collectives) for graph in captured.graphs)
            row["peak_mib"] = captured.peak_unsharded_bytes / MIB
            row["bound_mib"] = max(graph.bound_bytes for graph in captured.graphs) / MIB
            assert all(graph.peak_unsharded_bytes <= graph.bound_bytes for graph in captured.graphs)


def show(rows: list[dict[str, float | str | None]], args: argparse.Namespace) -> None:
    print(
        f"\n{args.layers} layers, width {args.width}, sequence {args.seq}, batch {args.batch} per rank, "
        f"{dist.get_world_size()} ranks, gloo, torch {torch.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} cores, {args.steps} steps, optimizer {args.optimizer}\n"
    )
    columns = {"median_ms": "median ms", "of_best_fsdp2": "of best FSDP2", "of_limit": "of limit", "loss": "loss"}
    columns |= {
        "estimate_ms": "estimate ms",
        "collectives": "collectives",
        "peak_mib": "peak MiB",
        "bound_mib": "bound MiB",
    }
    columns = {key: title for key, title in columns.items() if any(key in row for row in rows)}
    print(f"{'':30}" + "".join(f"{title:>14}" for title in columns.values()))
    for row in rows:
        print(f"{row['contender']:30}" + "".join(f"{figure(row.get(key), key):>14}" for key in columns))
    print("\nThe unsharded model sees its own rank's batch only, so its loss is another.")


def figure(value: float | str | None, key: str) -> str:
    digits = {"median_ms": 1, "estimate_ms": 1, "loss": 5, "collectives": 0, "peak_mib": 1, "bound_mib": 1}.get(
        key, 3
    )
    return "" if value is None else f"{value:.{digits}f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    about = "ranks of a shard group; several such groups are replicas (default: all ranks)"
    parser.add_argument("--shards", type=int, default=0, metavar="N", help=about)
    parser.add_argument("--steps", type=int, default=15, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before timing, compilation among them")
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=DEFAULT)
    parser.add_argument(
        "--optimizer", choices=["default", "foreach", "fused", "muon"], default="default", help="of AdamW"
    )
    about = (
        "more full graphs, scheduled for a cluster each, a name or a file; called by the file's name without suffix"
    )
    parser.add_argument("--cluster", nargs="*", default=[], metavar="NAME|FILE", help=about)
    parser.add_argument(
        "--memory", action="store_true", help="compile full graphs once more to see their memory and estimate"
    )
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    heads = max(args.width // 64, 1)
    hidden = -(-args.width * 8 // 3 // 32) * 32
    config = Config(
        width=args.width,
        layers=args.layers,
        heads=heads,
        kv_heads=max(heads // 3, 1) if heads % 3 == 0 else 1,
        hidden=hidden,
        max_seq=args.seq,
    )
    mesh = mesh_of(args.shards)
    more = {f"full graph, {Path(c).stem}": full_graph(SchedulePolicy(cluster=c)) for c in args.cluster}
    CONTENDERS.update(more)
    contenders = [make(name, config, args, mesh) for name in (*args.only, *more)]
    wire = Wire(sum(param.numel() for param in Llama(config).parameters()), mesh)
    for tokens, targets in (data := batches(args, config)):
        wire.step()
        for contender in contenders:
            contender.step(tokens, targets)
    rows = table(contenders, wire, args)
    if args.memory:
        add_memory(rows, contenders, data[0])
    if dist.get_rank() == 0:
        show(rows, args)
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"args": vars(args), "torch": torch.__version__, "rows": rows}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
