"""Measures the collective stack on one GPU alone: copies, whole steps, and overlap with a simulated link.

    python examples/bench/bench_gpu.py --json examples/bench/results/bench-gpu.json

*Copies*: each of the four copies of a bucket, in bytes read and written per second, compared with a device-to-device
copy and with PyTorch's own operators for FSDP2.

*Steps*: forward and backward of a Llama-style model as rank 0 of ranks that are not there (``simulated_group.py``):
compute and copies are real, and collectives write their results, but nothing is sent. The unsharded compiled model is
what sharding must not slow down.

*Wire*: the same programs, with collectives that keep their stream busy for as long as the cluster's model says, so
that whatever does not overlap is seen. What is exposed is the step's time beyond that without a wire.

``--device cpu --preset tiny --seq 32 --world 4 --sizes 1`` runs the same program without a GPU, to try it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

import simulated_group
import torch
import torch.distributed as dist
from simulated_group import SimulatedGroup
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_compiled import MixedPrecisionPolicy, fully_shard
from fsdp_compiled.collectives import copies
from fsdp_compiled.testing.llama import PRESETS, Llama, loss

MIB = 2**20
COPY_WORLD = 8
COLD_BYTES = 256 * MIB  # more than any GPU's cache


# ---- time ----


def seconds_of(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median time of ``run``, on the device where it has a clock.

    There caches are cold, and the device is kept busy until the host has queued the work, whose time does not count.
    """
    found = []
    other = torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            other.zero_()
            torch.cuda._sleep(10**6)  # about half a millisecond
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
    return statistics.median(found)


def seconds_each(run: Callable[[], Any], device: torch.device, times: int) -> float:
    """Return the mean time of ``run`` when called so many times without a pause, host and device together."""
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(times):
        run()
    _synchronize(device)
    return (time.perf_counter() - begin) / times


def seconds_of_host(run: Callable[[], Any], device: torch.device) -> float:
    """Return how long the host takes to give an idle device all of ``run``."""
    _synchronize(device)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- copies ----


@dataclass(frozen=True)
class Copied:
    """One copy of one bucket: bytes read and written per second, by whom."""

    copy: str
    mib: int  # of the bucket's unsharded parameters
    moved_mib: float  # read and written by this copy
    ours_gb_s: float
    torch_gb_s: float
    device_gb_s: float  # of a copy from one buffer to another


def copies_table(device: torch.device, sizes_mib: Sequence[int], repeats: int) -> Iterator[Copied]:
    """Time the copies of buckets whose unsharded parameters have so many MiB in bf16."""
    for mib in sizes_mib:
        bucket = _Bucket(_block_shapes(mib * MIB // 2), device)
        other = torch.empty_like(bucket.output)
        plain = _rate(4 * bucket.numel, partial(other.copy_, bucket.output), device, repeats)
        for name, size, ours, theirs in bucket.cases():
            yield Copied(name, mib, size / MIB, *(_rate(size, run, device, repeats) for run in (ours, theirs)), plain)


def _rate(size: int, run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    run()  # compiles, and fills the caches
    return size / seconds_of(run, device, repeats) / 1e9


class _Bucket:
    """A decoder block's parameters, sharded and unsharded, and the packed buffers that copies read and write."""

    def __init__(self, shapes: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.numel = sum(length * width for length, width in shapes)
        self.unsharded = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
        self.shards = [torch.randn(length // COPY_WORLD, width, device=device) for length, width in shapes]
        packed = (COPY_WORLD, self.numel // COPY_WORLD)  # no gaps: every shard is a multiple of 16 elements
        self.output = torch.empty(packed, device=device, dtype=torch.bfloat16)
        self.reduced = torch.empty(packed, device=device)

    def cases(self) -> list[tuple[str, int, Callable[[], Any], Callable[[], Any]]]:
        """Return each copy's name, the bytes that it reads and writes, ours and PyTorch's."""
        by_torch, dims = torch.ops.fsdp, [0] * len(self.unsharded)
        sizes = [shard.numel() for shard in self.shards]
        flat = [shard.view(-1) for shard in self.shards]
        chunks = [each.view(COPY_WORLD, -1) for each in self.unsharded]
        part = self.numel // COPY_WORLD
        return [
            (
                "pack shards",
                6 * part,
                partial(copies.pack, self.shards, self.output[0]),
                partial(torch._foreach_copy_, list(self.output[0].split(sizes)), flat),
            ),
            (
                "unpack parameters",
                4 * self.numel,
                partial(copies.unpack, self.output, self.unsharded, dims),
                partial(by_torch.split_with_sizes_copy, self.output, sizes, 1, out=chunks),
            ),
            (
                "pack gradients",
                6 * self.numel,
                partial(copies.pack, self.unsharded, self.reduced, dims),
                partial(by_torch.chunk_cat, self.unsharded, 0, COPY_WORLD, out=self.reduced),
            ),
            (
                "unpack gradients",
                8 * part,
                partial(copies.unpack, self.reduced[0], self.shards),
                partial(torch._foreach_copy_, flat, list(self.reduced[0].split(sizes))),
            ),
        ]


def _block_shapes(numel: int) -> list[tuple[int, int]]:
    """Return shapes like those of a decoder block, of about so many elements."""
    width = max(COPY_WORLD * 16, int((numel / 11.5) ** 0.5) // 128 * 128)
    return [(width, width), (width // 4, width), (width // 4, width), (width, width), *[(3 * width, width)] * 3] + [
        (COPY_WORLD, width // COPY_WORLD)
    ] * 2


# ---- steps ----


def unsharded(model: Llama) -> Callable[..., Tensor]:
    return torch.compile(model.to(torch.bfloat16), fullgraph=True)


def _in_blocks(model: Llama, shard: Callable[..., Any]) -> Callable[..., Tensor]:
    for block in model.blocks:
        shard(block)
    return shard(model)


def fsdp2(model: Llama) -> Callable[..., Tensor]:
    policy = TorchMixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _in_blocks(model, partial(torch_fully_shard, mp_policy=policy))


def fsdp2_compiled_blocks(model: Llama) -> Callable[..., Tensor]:
    for block in model.blocks:
        block.compile()
    logits_of, loss_of = fsdp2(model), torch.compile(loss, fullgraph=True)
    return lambda tokens, targets: loss_of(logits_of(tokens), targets)


def ours_eager(model: Llama) -> Callable[..., Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _in_blocks(model, partial(fully_shard, mp_policy=policy))


def ours_full_graph(model: Llama) -> Callable[..., Tensor]:
    return torch.compile(ours_eager(model), fullgraph=True)


CONTENDERS = {
    "unsharded compiled": unsharded,
    "FSDP2": fsdp2,
    "FSDP2, blocks compiled": fsdp2_compiled_blocks,
    "eager": ours_eager,
    "full graph": ours_full_graph,
}


@dataclass(frozen=True)
class Stepped:
    """Forward and backward of one contender."""

    world: int
    contender: str
    ms: float
    host_ms: float  # until the host has given all of a step to an idle device
    wired_ms: float | None  # with a simulated wire
    peak_mib: float | None  # of allocated memory, sharded parameters and gradients included
    error: str = ""  # why there is no figure

    @property
    def exposed_ms(self) -> float | None:
        return None if self.wired_ms is None else self.wired_ms - self.ms


def steps_table(args: argparse.Namespace, device: torch.device) -> Iterator[Stepped]:
    """Time the unsharded model, and every other contender in every simulated world."""
    for world in [1, *args.world]:
        if world > 1:
            simulated_group.start(world)
        for name in args.only:
            if (name == "unsharded compiled") == (world == 1):
                yield _stepped(world, name, args, device)
        if world > 1:
            dist.destroy_process_group()


def _stepped(world: int, name: str, args: argparse.Namespace, device: torch.device) -> Stepped:
    try:
        return Stepped(world, name, *_step(name, args, device))
    except Exception as error:  # the others still count
        traceback.print_exc()
        return Stepped(world, name, math.nan, math.nan, None, None, f"{type(error).__name__}: {error}"[:500])


def _step(
    name: str, args: argparse.Namespace, device: torch.device
) -> tuple[float, float, float | None, float | None]:
    """Return milliseconds without a wire, of the host alone and with a wire, and the peak of allocated MiB."""
    torch._dynamo.reset()
    gc.collect()
    config = replace(PRESETS[args.preset], max_seq=args.seq, layers=args.layers)
    with torch.device(device):
        model = Llama(config)
        tokens = torch.randint(config.vocab, (args.batch, args.seq + 1))
    initialize(model)
    call = CONTENDERS[name](model)

    def step() -> None:
        call(tokens[:, :-1], tokens[:, 1:]).backward()
        for param in model.parameters():
            param.grad = None

    for _ in range(3):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_each(step, device, args.steps)
    host_s = statistics.median(seconds_of_host(step, device) for _ in range(5))
    peak = torch.cuda.max_memory_allocated() / MIB if device.type == "cuda" else None
    wired = None if name == "unsharded compiled" else _wired(step, device, args.steps)
    return seconds * 1e3, host_s * 1e3, wired, peak


def initialize(model: nn.Module) -> None:
    """Draw parameters; a function of its own, so that no variable holds the last of them when they are sharded."""
    for param in model.parameters():
        nn.init.normal_(param, std=0.02) if param.ndim > 1 else nn.init.ones_(param)


def _wired(step: Callable[[], None], device: torch.device, times: int) -> float:
    SimulatedGroup.wire = True
    step()
    seconds = seconds_each(step, device, times)
    SimulatedGroup.wire = False
    return seconds * 1e3


# ---- the report ----


COPY_TITLES = (
    f"{'copy':20}{'MiB':>6}{'moved':>8}{'ours GB/s':>12}{'torch GB/s':>12}{'copy GB/s':>12}"
    f"{'of copy':>10}{'of torch':>10}"
)
STEP_TITLES = (
    f"{'ranks':>5}  {'contender':26}{'ms':>10}{'of unsharded':>14}{'host':>10}{'with wire':>12}{'exposed':>10}"
    f"{'peak MiB':>10}"
)


def copy_line(row: Copied) -> str:
    return (
        f"{row.copy:20}{row.mib:6}{row.moved_mib:8.0f}{row.ours_gb_s:12.1f}{row.torch_gb_s:12.1f}{row.device_gb_s:12.1f}"
        f"{row.ours_gb_s / row.device_gb_s:10.2f}{row.ours_gb_s / row.torch_gb_s:10.2f}"
    )


def step_line(row: Stepped, before: Sequence[Stepped]) -> str:
    base = [each.ms for each in before if each.contender == "unsharded compiled"]
    ratio = f"{row.ms / base[0]:.3f}" if base else ""
    tail = "".join(
        f"{'' if value is None else format(value, '.1f'):>{width}}"
        for value, width in ((row.host_ms, 10), (row.wired_ms, 12), (row.exposed_ms, 10), (row.peak_mib, 10))
    )
    return f"{row.world:5}  {row.contender:26}{row.ms:10.1f}{ratio:>14}{tail}  {row.error}"


def save(file: str | None, about: dict[str, Any], copied: Sequence[Copied], stepped: Sequence[Stepped]) -> None:
    """Write what has been measured so far."""
    if file:
        tables = {"copies": [asdict(row) for row in copied], "steps": [asdict(row) for row in stepped]}
        with open(file, "w") as out:
            json.dump({**about, **tables}, out, indent=1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", choices=list(PRESETS), default="1b")
    parser.add_argument("--layers", type=int, help="of the model, default: the preset's")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="timed; 3 more come first")
    parser.add_argument("--world", type=int, nargs="*", default=[8, 64], help="sizes of the simulated group")
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 256, 1024], help="of buckets, in MiB")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    args.layers = args.layers or PRESETS[args.preset].layers
    return args


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        os.environ.setdefault("LOCAL_WORLD_SIZE", "8")  # ranks on a node, for the cluster's model
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    about: dict[str, Any] = {"device": name, "torch": torch.__version__, "date": f"{datetime.now():%Y-%m-%d}"}
    about["args"] = vars(args)
    print(f"{name}, torch {torch.__version__}, {about['date']}\n\n{COPY_TITLES}")
    copied, stepped = list[Copied](), list[Stepped]()
    for copied_row in copies_table(device, args.sizes, repeats=20):
        copied.append(copied_row)
        print(copy_line(copied_row), flush=True)
    about["cycles_per_second"] = simulated_group.measure_clock(device)
    save(args.json, about, copied, stepped)
    print(
        f"\n{args.preset}, {args.layers} layers, sequence {args.seq}, batch {args.batch}, bf16 compute, fp32 reduce\n"
    )
    print(STEP_TITLES)
    for stepped_row in steps_table(args, device):
        print(step_line(stepped_row, stepped), flush=True)
        stepped.append(stepped_row)
        save(args.json, about, copied, stepped)


if __name__ == "__main__":
    main()
