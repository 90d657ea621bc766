"""Measure the peak memory of a training step, and hold ``Capture.memory`` against it.

    torchrun --nproc-per-node 2 examples/bench/memory.py

The measured peak is that of live bytes on rank 0: what parameters, buffers, optimizer state and the batch hold before
a step, plus what PyTorch's allocator hands out and takes back during the step, as ``torch.profiler`` records it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fsdp_compiled
from fsdp_compiled import MixedPrecisionPolicy, SchedulePolicy, fully_shard, step_on_shards
from fsdp_compiled.inspect import Capture, capture
from fsdp_compiled.passes import CLUSTERS
from fsdp_compiled.planner import save_some
from fsdp_compiled.testing.llama import PRESETS, Block, Config, Llama

MIB = 2**20
SCHEDULES = {"default": SchedulePolicy(), "unit": SchedulePolicy(bucket="unit")}


CHECKPOINTING: dict[str, dict[str, Any] | None] = {
    "none": None,
    "blocks": {},
    "selective": {"context_fn": save_some},
}


class Checkpointed(Block):
    """A block that is recomputed in backward."""

    options: dict[str, Any]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return checkpoint(super().forward, x, cos, sin, use_reentrant=False, **self.options)


def checkpointed(model: Llama, kind: str) -> Llama:
    """Let the blocks of a model be recomputed in backward: not at all, wholly, or but for some operators."""
    if (options := CHECKPOINTING[kind]) is not None:
        for block in model.blocks:
            block.__class__, block.options = Checkpointed, options
    return model


@dataclass(frozen=True)
class Case:
    """A model of so many layers and this width, the batch of a rank, and how both are run."""

    layers: int
    width: int
    seq: int
    batch: int
    checkpointing: str = "none"
    schedule: str = "default"

    def model(self) -> tuple[Llama, tuple[Tensor, Tensor]]:
        """Return the sharded model, as compare.py has it, and a batch."""
        heads, hidden = max(self.width // 64, 1), -(-self.width * 8 // 3 // 32) * 32
        config = Config(
            width=self.width,
            layers=self.layers,
            heads=heads,
            kv_heads=max(heads // 3, 1) if heads % 3 == 0 else 1,
            hidden=hidden,
            max_seq=self.seq,
        )
        model = checkpointed(Llama(config), self.checkpointing)
        model.init_weights()
        for block in model.blocks:
            fully_shard(block)
        tokens = torch.randint(config.vocab, (self.batch, self.seq + 1))
        return fully_shard(model), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


SIZES = {"16 x 64": (16, 64, 8, 1), "6 x 256": (6, 256, 128, 2), "4 x 384": (4, 384, 256, 4)}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of these tensors' memory, shared memory once."""
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measured_peak(step: Callable[[], None], held: Callable[[], Iterable[Tensor]], steps: int = 5) -> int:
    """Return the peak of live bytes in a step: those of ``held()`` before it, and what is allocated meanwhile.

    It is the median of several steps: now and then a buffer of gloo's is freed late, on a busy machine more often.
    """
    for _ in range(2):  # compiles, and makes the optimizer's state
        step()
    return statistics.median_low(_peak(step, held) for _ in range(steps))


def _peak(step: Callable[[], None], held: Callable[[], Iterable[Tensor]]) -> int:
    gc.collect()
    before = bytes_of(held())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return before + max(itertools.accumulate(changes))


def measure(case: Case) -> tuple[int, Capture]:
    """Train for a few steps; return the measured peak and a capture, which has the estimate."""
    model, batch = case.model()
    schedule = SCHEDULES[case.schedule]
    call = fsdp_compiled.compile(model, schedule=schedule, fullgraph=True)
    optimizer = step_on_shards(torch.optim.AdamW(model.parameters(), lr=3e-4))

    def step() -> None:
        call(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def held() -> Iterator[Tensor]:
        states = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
        return itertools.chain(model.parameters(), model.buffers(), batch, filter(torch.is_tensor, states))

    peak = measured_peak(step, held)
    return peak, capture(model, *batch, schedule=schedule, code=False)


def table(args: argparse.Namespace) -> None:
    """Print a row for each case as soon as it is measured."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    first = dist.get_rank() == 0
    if first:
        print("| layers x width | checkpointing | schedule | measured, MiB | estimate, MiB | error | highest part |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for size, kind, schedule in itertools.product(args.size, args.checkpointing, args.schedule):
        peak, captured = measure(Case(*SIZES[size], kind, schedule))
        estimate, part = captured.peak_bytes, next(iter(captured.memory.parts))
        if first:
            figures = f"{peak / MIB:.2f} | {estimate / MIB:.2f} | {estimate / peak - 1:+.1%}"
            print(f"| {size} | {kind} | {schedule} | {figures} | {part} |", flush=True)
        torch.compiler.reset()
    dist.destroy_process_group()


def published() -> None:
    """Print the estimate for a Llama of 8 billion parameters on 8 ranks, where 77.0 GiB were published."""
    dist.init_process_group("fake", rank=0, world_size=8)
    with torch.device("meta"):
        model = checkpointed(Llama(PRESETS["8b"]), "selective")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")  # memory that the system has promised; nothing touches it
    tokens = torch.zeros(2, PRESETS["8b"].max_seq, dtype=torch.int64)
    captured = capture(model, tokens, tokens, schedule=SchedulePolicy(cluster=CLUSTERS["H100"]), code=False)
    print(captured)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--checkpointing", nargs="*", choices=list(CHECKPOINTING), default=list(CHECKPOINTING))
    parser.add_argument("--schedule", nargs="*", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--published", action="store_true", help="estimate 8 billion parameters on 8 ranks instead")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    published() if args.published else table(args)


if __name__ == "__main__":
    main()
