"""Time how a sharded model's complete weights reach an engine: streamed, and by what PyTorch has.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/bench/stream.py
    MALLOC_MMAP_THRESHOLD_=65536 torchrun --nproc-per-node 2 examples/bench/stream.py --memory

Contenders run in turn on a Llama of 100 million parameters in fp32. Each makes every weight complete in bf16 on each
rank, one after the other, and keeps none, as an engine that copies them sees it. Times are medians. ``--changed``
also times the shards that changed after a step that trains one layer. ``--memory`` gives instead what a process takes
at most beyond what it had before, by the kernel's count, which needs a malloc that returns at once what is freed.
``--json FILE`` adds the figures to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_compiled import fully_shard, stream_parameters, stream_shards
from fsdp_compiled.testing.llama import Config, Llama

BF16 = torch.bfloat16
MALLOC = "MALLOC_MMAP_THRESHOLD_"  # of glibc: from so many bytes on, free returns memory to the kernel
MODEL = Config(vocab=8192, width=768, layers=14, heads=12, kv_heads=4, hidden=2048, max_seq=128)


def build() -> nn.Module:
    model = Llama(MODEL)
    model.init_weights(seed=0)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def take(weights: object) -> None:
    for _ in weights:  # type: ignore[attr-defined]
        pass


def by_full_tensor(model: nn.Module) -> None:
    for param in model.parameters():
        param.detach().full_tensor().to(BF16)  # type: ignore[attr-defined]


def by_full_tensor_of_bf16(model: nn.Module) -> None:
    for param in model.parameters():
        param.detach().to(BF16).full_tensor()  # type: ignore[attr-defined]


def by_state_dict(model: nn.Module) -> None:
    for tensor in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).values():
        tensor.to(BF16)


def contenders(bucket_bytes: int) -> dict[str, Callable[[nn.Module], None]]:
    def streamed(model: nn.Module) -> None:
        take(stream_parameters(model, dtype=BF16, bucket_bytes=bucket_bytes))

    def streamed_in_fp32(model: nn.Module) -> None:
        for _, tensor in stream_parameters(model, bucket_bytes=bucket_bytes):
            tensor.to(BF16)

    def streamed_to_one(model: nn.Module) -> None:
        take(stream_parameters(model, dtype=BF16, bucket_bytes=bucket_bytes, ranks=[0]))

    return {
        "get_model_state_dict": by_state_dict,
        "full_tensor": by_full_tensor,
        "full_tensor of bf16": by_full_tensor_of_bf16,
        "stream_parameters": streamed,
        "stream_parameters, fp32": streamed_in_fp32,
        "stream_parameters, rank 0 only": streamed_to_one,
    }


def resident_bytes(field: str) -> int:
    """Return what the kernel counts: VmRSS, or VmHWM, the most of it."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(field))
    return int(line.split()[1]) * 1024


def seconds_of(run: Callable[[nn.Module], None], model: nn.Module) -> float:
    dist.barrier()
    start = time.perf_counter()
    run(model)
    dist.barrier()
    return time.perf_counter() - start


def peak_bytes_of(run: Callable[[nn.Module], None], model: nn.Module) -> int:
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # begins VmHWM anew
    before = resident_bytes("VmRSS")
    run(model)
    dist.barrier()
    return resident_bytes("VmHWM") - before


def changed_shards(model: nn.Module) -> dict[str, float]:
    """Return seconds to find and cast the changed shards, and how many bytes they have, after one layer's step."""
    since: dict[str, int] = {}
    take(stream_shards(model, since=since, dtype=BF16))
    with torch.no_grad():
        for param in model.blocks[0].parameters():
            param.mul_(1.1)
    start = time.perf_counter()
    nbytes = sum(each.tensor.nbytes for each in stream_shards(model, since=since, dtype=BF16))
    return {"seconds": time.perf_counter() - start, "MB": nbytes / 1e6}


def times(model: nn.Module, runs: dict[str, Callable[[nn.Module], None]], count: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count + 1):
        for name, run in runs.items():
            seconds[name].append(seconds_of(run, model))
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket-mb", type=float, default=16, help="size of a bucket, in millions of bytes")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.memory and os.environ.get(MALLOC) is None:
        parser.error(f"--memory: expected {MALLOC}=65536 in the environment, by which malloc returns what is freed")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    model, runs = build(), contenders(int(args.bucket_mb * 1e6))
    if args.memory:
        what, figures = "peak MB", {name: peak_bytes_of(run, model) / 1e6 for name, run in runs.items()}
    else:
        what, figures = "seconds", times(model, runs, args.runs)
    found: dict[str, object] = {what: figures}
    if args.changed:
        found["stream_shards, one layer of 14 changed"] = changed_shards(model)
    if dist.get_rank() == 0:
        for name, figure in figures.items():
            print(f"{name:32} {figure:8.3f} {what}")
        print({name: each for name, each in found.items() if name != what} or "")
        if args.json:
            parameters = sum(param.numel() for param in model.parameters())
            setup = {"ranks": dist.get_world_size(), "torch": torch.__version__, "bucket MB": args.bucket_mb}
            kept = json.loads(args.json.read_text()) if args.json.exists() else {}
            args.json.write_text(json.dumps({**kept, **setup, "parameters": parameters, **found}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
