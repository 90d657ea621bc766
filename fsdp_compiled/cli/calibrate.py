"""Measures the machine that it runs on, all ranks together, and writes what estimates need as a cluster file.

What the host takes is found by compiling and training two small models.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.functional import scaled_dot_product_attention

from ..api import compile, fully_shard
from ..collectives import backend
from ..inspect import capture
from ..optim import step_on_shards
from ..passes.cost import Cluster, Curve, Link, Measured, as_text, detect
from ..policy import SchedulePolicy

KIB = 2**10
_SIZES = (*(64 * KIB * 4**n for n in range(5)), 32 * KIB**2, 64 * KIB**2)  # of collectives, unsharded bytes
_RUN = 8 * KIB**2  # bytes of small collectives that follow each other
_HIDDEN = 16 * KIB**2  # bytes of the all-gather that compute hides
_TURNS, _TURN_S = 3, 0.16  # of each size, and how long a turn takes: cores are faster at one time than at another
_ENOUGH_S = 0.6  # of one size: what is slow takes as long at any time
_COPIES = tuple(4 * KIB * 4**n for n in range(8))  # bytes copied: to 64 MiB
_WIDTHS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)  # of square matrices
_LENGTHS = (4, 16, 64, 256, 1024, 4096)  # of attention's sequences
_LONGEST_S = 0.1  # what would take longer, at the rate of the size before, is left out
_COLD = 128  # MiB, more than what caches hold
_PIECES = 16  # buffers of the all-gather that tells what a further one costs
_LAYER_WIDTH = 16  # of matrices whose products take no time
_LAYERS = 48  # so that what a step takes whatever its parameters counts little


def calibrate(out: Path) -> Cluster:
    """Measure products, copies, collectives and their overlap, and let rank 0 write the cluster to ``out``.

    Run it as training is run, with torchrun on all machines: every rank measures at the same time, since ranks share
    cores, memory and network cards. Without a launcher it measures one process and no links, which then are those of
    the cluster that ships for this device. A rank's node is told by ``LOCAL_RANK``.

    Raises:
        RuntimeError: nodes have different numbers of ranks.
    """
    with _process_group() as device:
        base, bench = detect(device), _Bench(device)
        products_32bit, products_16bit = map(bench.products, (torch.float32, torch.bfloat16))
        copies = bench.curve({size: 2.0 * size for size in _COPIES}, bench.copy)
        found = replace(
            base,
            name=f"{base.name}, calibrated",
            flops_32bit=max(rate for _, rate in products_32bit) / base.efficiency,
            flops_16bit=max(rate for _, rate in products_16bit) / base.efficiency,
            memory_bytes_per_s=copies[-1][1] / base.memory_efficiency,
            kernel_us=1e6 * bench.seconds_of_one(bench.product(torch.float32, 8)),
            host_bytes_per_s=bench.host_bytes_per_s() / base.efficiency,
            products_32bit=products_32bit,
            products_16bit=products_16bit,
            attention_16bit=bench.attention(torch.bfloat16, is_backward=False),
            attention_16bit_backward=bench.attention(torch.bfloat16, is_backward=True),
            attention_32bit=bench.attention(torch.float32, is_backward=False),
            attention_32bit_backward=bench.attention(torch.float32, is_backward=True),
            copies=copies,
            memory_bytes=_memory_bytes(device),
            new_mib_us=bench.new_mib_us() if base.on_host else 0.0,
        )
        found = _with_host_costs(_with_links(found, bench), bench)
        if dist.get_rank() == 0:
            out.write_text(as_text(found, _machine(device)))
        dist.barrier()
    return found


@contextmanager
def _process_group() -> Iterator[torch.device]:
    """Yield this rank's device, within a default process group."""
    device = torch.device("cpu")
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device)
    if is_first := not dist.is_initialized():
        given: dict[str, Any] = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timedelta(minutes=3), **given)
    try:
        yield device
    finally:
        if is_first:
            dist.destroy_process_group()


@dataclass(frozen=True)
class _Bench:
    """Measures on one device; times are seconds, alike on all ranks."""

    device: torch.device

    def seconds(self, run: Callable[[], Any], times: int = 5) -> float:
        """Return the time that a run typically takes."""
        return self.typical(self.taken(run, 1 + times)[1:])  # the first run warms up

    def taken(self, run: Callable[[], Any], times: int) -> list[float]:
        """Return this rank's times of several runs that all ranks begin together."""
        found = []
        for _ in range(times):
            dist.barrier()
            start = time.perf_counter()
            run()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            found.append(time.perf_counter() - start)
        return found

    def typical(self, taken: Sequence[float]) -> float:
        """Return the lower quartile, and over the ranks the mean of it.

        The lower one, since a scheduler takes a core away for milliseconds at a time, which is no property of a link.
        """
        quartile = statistics.quantiles(taken, n=4, method="inclusive")[0] if len(taken) > 1 else taken[0]
        total = torch.tensor([quartile], device=self.device, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def seconds_of_one(self, run: Callable[[], Any]) -> float:
        """Return the mean time of short runs that follow each other."""
        times = max(1, min(300, int(0.03 / self.seconds(run, 3))))

        def runs() -> None:
            for _ in range(times):
                run()

        return self.seconds(runs) / times

    def curve(self, amounts: Mapping[int, float], run_of: Callable[[int], Callable[[], Any]]) -> Curve:
        """Return work per second by the amount of work, given that of each size; what takes long is left out."""
        found = list[tuple[float, float]]()
        for size, amount in amounts.items():
            if found and amount / found[-1][1] > _LONGEST_S:
                break
            found.append((amount, amount / self.seconds_of_one(run_of(size))))
        return tuple(found)

    def products(self, dtype: torch.dtype) -> Curve:
        """Return FLOP/s by FLOPs of products of square matrices."""
        return self.curve({width: 2.0 * width**3 for width in _WIDTHS}, partial(self.product, dtype))

    def product(self, dtype: torch.dtype, width: int) -> Callable[[], Tensor]:
        given = self._cold([width, width], dtype)
        return lambda: torch.mm(next(given), next(given))

    def _cold(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
        """Return tensors in turn, so many that none is in a cache when its turn comes, as in a training step."""
        count = min(4096, 1 + _COLD * KIB**2 // (math.prod(shape) * dtype.itemsize))  # seconds_of_one takes fewer
        numel = count * math.prod(shape)
        some = torch.randn(min(numel, KIB**2), device=self.device).to(dtype)  # all of them take long
        return itertools.cycle(some.repeat(-(-numel // some.numel()))[:numel].view(count, *shape))

    def attention(self, dtype: torch.dtype, is_backward: bool) -> Curve:
        """Return FLOP/s by FLOPs of causal attention, or of its backward, which has 2.5 times as many."""
        heads, features, flops_of_pair = 8, 64, 5.0 if is_backward else 2.0

        def run_of(length: int) -> Callable[[], Any]:
            query = torch.randn(1, heads, length, features, device=self.device).to(dtype).requires_grad_()
            forward = partial(scaled_dot_product_attention, query, query, query, is_causal=True)
            out = forward()
            return partial(torch.autograd.grad, out, query, out, retain_graph=True) if is_backward else forward

        return self.curve({length: flops_of_pair * heads * length**2 * features for length in _LENGTHS}, run_of)

    def new_mib_us(self) -> float:
        """Return what a MiB costs that the system gives and takes back."""
        there = torch.zeros(64 * KIB**2, dtype=torch.uint8, device="cpu")

        def use_new() -> None:
            with mmap.mmap(-1, len(there), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                torch.frombuffer(memory, dtype=torch.uint8).zero_()

        return 1e6 * max(0.0, self.seconds(use_new) - self.seconds(there.zero_)) / (len(there) / KIB**2)

    def copy(self, size: int) -> Callable[[], Tensor]:
        """Return what copies ``size`` bytes within device memory."""
        given = self._cold([size // 4])
        return lambda: next(given).copy_(next(given))

    def host_bytes_per_s(self) -> float:
        """Return how fast bytes go from pinned memory of the host to the device; on the CPU, within its memory."""
        size = 64 * KIB**2
        host = torch.ones(size // 4, device="cpu", pin_memory=self.device.type != "cpu")
        return size / self.seconds(partial(torch.empty_like(host, device=self.device).copy_, host))


def _with_links(cluster: Cluster, bench: _Bench) -> Cluster:
    """Return the cluster with what groups inside nodes, and groups between them, have measured."""
    first = [0] * dist.get_world_size()  # of each rank's node
    dist.all_gather_object(first, dist.get_rank() - int(os.environ.get("LOCAL_RANK", "0")))
    local, nodes = ranks_per_node(first)
    world = local * nodes
    intra, inter = cluster.intra, cluster.inter
    if local > 1:
        inside = _Groups(bench, [range(node * local, (node + 1) * local) for node in range(nodes)], local)
        intra = inside.link(intra)
        cluster = replace(cluster, piece_us=inside.piece_us())
    if nodes > 1:
        across = _Groups(bench, [range(world)], local)
        inter = across.link(inter)
        if local > 1:  # as the replicas of hybrid sharding, all at once
            few = _Groups(bench, [range(place, world, local) for place in range(local)], in_node=1)
            inter = replace(inter, measured=(*inter.measured, few.measured()))
        else:
            cluster = replace(cluster, piece_us=across.piece_us())
    return replace(cluster, intra=intra, inter=inter, ranks_per_node=local)


def ranks_per_node(first: Sequence[int]) -> tuple[int, int]:
    """Return how many ranks each node has, and how many nodes there are, given the first of each rank's node."""
    counts = {node: first.count(node) for node in first}
    if len(set(counts.values())) > 1:
        raise RuntimeError(f"calibrate: expected as many ranks on each node, got {list(counts.values())}")
    return len(first) // len(counts), len(counts)


class _Groups:
    """Groups of equal size that hold all ranks together and communicate all at once; this rank's measures."""

    def __init__(self, bench: _Bench, ranks: Sequence[Sequence[int]], in_node: int) -> None:
        self.bench, self.in_node, self.world = bench, in_node, len(ranks[0])
        self.group, _ = dist.new_subgroups_by_enumeration([list(each) for each in ranks])

    def measured(self) -> Measured:
        """Return the rates by size of collectives that follow each other, two of them started, as in a step.

        After a pause, many networks let some bytes through faster than their rate (the burst of Linux's ``tc-tbf``),
        so that a small collective alone is faster than it is in a step.
        """
        kinds = (self.all_gather, self.reduce_scatter, self.all_reduce)
        taken, spent_s = defaultdict[Any, list[float]](list), defaultdict[Any, float](float)
        for _, kind, size in itertools.product(range(_TURNS), kinds, _SIZES):
            if spent_s[kind, size] > _ENOUGH_S:
                continue
            run = partial(_follow, kind(size), max(1, _RUN // size))
            first = self.bench.taken(run, 1)  # warms up, and counts only where it alone lasts the turn
            more = min(40, int(_TURN_S / (first_s := self.bench.typical(first))))
            taken[kind, size] += self.bench.taken(run, more) or first
            spent_s[kind, size] += first_s * (1 + more)  # alike on all ranks, which all leave out the same
        curves = (
            tuple((float(size), max(size, _RUN) / self.bench.typical(taken[kind, size])) for size in _SIZES)
            for kind in kinds
        )
        return Measured(self.world, self.in_node, *curves)

    def _seconds(self, start: Callable[[], dist.Work], times: int = 5) -> float:
        return self.bench.seconds(lambda: start().wait(), times)

    def link(self, base: Link) -> Link:
        """Return the link as these groups have it; its formula serves groups of other sizes."""
        measured = self.measured()
        (least, rate), (_, highest) = measured.all_gather[0], measured.all_gather[-1]
        least_us, share = 1e6 * least / rate / 2, (self.world - 1) / self.world
        per_rank = highest * share / (self.in_node if self.in_node < self.world else 1)
        host_s = self._longer(_SIZES[0], 20)[1] if self.bench.device.type == "cpu" else 0.0
        alone_s, longer_s = self._longer(_HIDDEN, 1)
        return replace(
            base,
            latency_us=least_us,
            hop_us=least_us / (self.world - 1),
            bytes_per_s=per_rank,
            reduce_factor=highest / measured.reduce_scatter[-1][1],
            knee_bytes=0,
            compute_blocked_fraction=min(1.0, max(0.0, longer_s - host_s) / alone_s),
            host_us=1e6 * host_s,
            measured=(measured,),
        )

    def all_gather(self, size: int) -> Callable[[], dist.Work]:
        return partial(backend.all_gather, *self._buffers(size), self.group)

    def reduce_scatter(self, size: int) -> Callable[[], dist.Work]:
        unsharded, shard = self._buffers(size)
        return partial(backend.reduce_scatter, shard, unsharded, self.group, dist.ReduceOp.SUM)

    def all_reduce(self, size: int) -> Callable[[], dist.Work]:
        return partial(backend.all_reduce, self._buffers(size)[0], self.group, dist.ReduceOp.SUM)

    def _buffers(self, size: int) -> tuple[Tensor, Tensor]:
        shard = torch.ones(size // 4 // self.world, device=self.bench.device)  # ones: zeros get memory at first use
        return shard.new_ones(shard.numel() * self.world), shard

    def _longer(self, size: int, count: int) -> tuple[float, float]:
        """Return the time of an all-gather, and what each of ``count`` takes from compute that hides it."""
        gather = self.all_gather(size)
        alone = self._seconds(gather, 7)
        left = torch.randn(256, 256, device=self.bench.device)
        times = 1 + int(1.5 * alone / self.bench.seconds_of_one(partial(torch.mm, left, left)))

        def compute(gathers: bool) -> None:
            for _ in range(count):
                work = gather() if gathers else None
                for _ in range(times):
                    torch.mm(left, left)
                if work is not None:
                    work.wait()

        both_s, without_s = (self.bench.seconds(partial(compute, gathers), 7) for gathers in (True, False))
        return alone, max(0.0, both_s - without_s) / count

    def piece_us(self) -> float:
        """Return what each further buffer adds to an all-gather."""
        unsharded, shard = zip(*(self._buffers(16 * KIB) for _ in range(_PIECES)), strict=True)
        coalesced = partial(backend.all_gather_coalesced, unsharded, shard, self.group)
        more = self._seconds(coalesced, 20) - self._seconds(self.all_gather(16 * KIB * _PIECES), 20)
        return max(0.0, 1e6 * more / (_PIECES - 1))


def _follow(start: Callable[[], dist.Work], count: int) -> None:
    """Run collectives that follow each other, two of them started."""
    last = start()
    for _ in range(count - 1):
        work, last = last, start()
        work.wait()
    last.wait()


class _Layers(nn.Module):
    """Products with something between them that is not fused into them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_LAYER_WIDTH, _LAYER_WIDTH) for _ in range(_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.sum()


def _with_host_costs(cluster: Cluster, bench: _Bench) -> Cluster:
    """Return the cluster with what the host takes for a kernel and for a parameter, by compiling two small models.

    All ranks of the default group must call it. A kernel's time is that of a forward, less what its work is taken to
    last if ranks compute on the host. A parameter's is what a training step takes beyond everything else that it is
    estimated to take.
    """
    model, batch = _Layers().to(bench.device), torch.randn(_LAYER_WIDTH, _LAYER_WIDTH, device=bench.device)
    forward = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        kernel_us = 1e6 * bench.seconds(lambda: forward(batch), 20) / (2 * _LAYERS)
    launch_us = max(0.0, kernel_us - cluster.kernel_us) if cluster.on_host else kernel_us
    cluster = replace(cluster, launch_us=launch_us, parameter_us=0.0)

    schedule = SchedulePolicy(cluster=cluster)
    call = compile(fully_shard(model), schedule=schedule, fullgraph=True)
    optimizer = step_on_shards(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step() -> None:
        call(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    found = capture(model, batch, schedule=schedule, code=False)
    known_us = found.step_us if cluster.on_host else launch_us * sum(len(graph.kernels) for graph in found.graphs)
    left_us = 1e6 * bench.seconds(step, 20) - known_us
    return replace(cluster, parameter_us=max(0.0, left_us / found.trained))


def _memory_bytes(device: torch.device) -> int:
    """Return the device's memory; of the host's, what each of its ranks may take."""
    if device.type != "cpu":
        return torch.get_device_module(device).get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _machine(device: torch.device) -> dict[str, Any]:
    """Return what a reader wants to know of the machine; nothing reads it back."""
    name = None if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return {
        "device": name or platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads of a rank": torch.get_num_threads(),
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "torch": torch.__version__,
    }
