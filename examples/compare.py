"""Train one model unsharded, with PyTorch's FSDP2 and with fsdp_compiled, interleaved step by step in one run.

    torchrun --nproc-per-node 2 examples/compare.py

Every contender takes one step in turn, so that drift of the machine meets all alike. Prints the median step time
of each, its ratio to the best FSDP2, and the loss after the last step. ``--json FILE`` keeps the figures.
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

import torch
import torch.distributed as dist
from model import Config, Llama
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_compiled import fully_shard, fully_shard_with_compiled_compute


@dataclass
class Contender:
    """One way to train; ``call`` takes (tokens, targets) and returns the loss."""

    name: str
    model: nn.Module
    call: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Take one training step and record its time."""
        dist.barrier()
        start = time.perf_counter()
        loss = self.call(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()
        self.seconds.append(time.perf_counter() - start)


def unsharded(model: Llama) -> Callable[..., Tensor]:
    return torch.compile(model)


def fsdp2(model: Llama) -> Callable[..., Tensor]:
    for block in model.blocks:
        torch_fully_shard(block)
    return torch_fully_shard(model)


def fsdp2_compiled_blocks(model: Llama) -> Callable[..., Tensor]:
    for block in model.blocks:
        block.compile()
    return fsdp2(model)


def ours_eager(model: Llama) -> Callable[..., Tensor]:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def ours_regional(model: Llama) -> Callable[..., Tensor]:
    for block in model.blocks:
        fully_shard_with_compiled_compute(block)
    return fully_shard(model)


def ours_full(model: Llama) -> Callable[..., Tensor]:
    return torch.compile(ours_eager(model), fullgraph=True)


CONTENDERS = {
    "unsharded compiled": unsharded,
    "FSDP2": fsdp2,
    "FSDP2, blocks compiled": fsdp2_compiled_blocks,
    "ours eager": ours_eager,
    "ours regional": ours_regional,
    "ours full graph": ours_full,
}


def make(name: str, config: Config) -> Contender:
    model = Llama(config)
    model.init_weights(seed=0)
    call = CONTENDERS[name](model)
    return Contender(name, model, call, torch.optim.AdamW(model.parameters(), lr=3e-4))


def batches(args: argparse.Namespace, config: Config) -> list[tuple[Tensor, Tensor]]:
    """Return one batch per rank and step; random tokens, the same for every contender."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (args.warmup + args.steps, args.batch, args.seq + 1)
    tokens = torch.randint(config.vocab, shape, generator=generator)
    return [(step[:, :-1].contiguous(), step[:, 1:].contiguous()) for step in tokens]


def table(contenders: list[Contender], warmup: int) -> list[dict[str, float | str]]:
    medians = {c.name: statistics.median(c.seconds[warmup:]) * 1e3 for c in contenders}
    best = min((ms for name, ms in medians.items() if name.startswith("FSDP2")), default=float("nan"))
    rows = []
    for c in contenders:
        loss = torch.tensor(c.loss)
        dist.all_reduce(loss)
        rows.append(
            {
                "contender": c.name,
                "median_ms": medians[c.name],
                "ratio_to_best_fsdp2": medians[c.name] / best,
                "loss": loss.item() / dist.get_world_size(),
            }
        )
    return rows


def show(rows: list[dict[str, float | str]], args: argparse.Namespace) -> None:
    print(
        f"\n{args.layers} layers, width {args.width}, sequence {args.seq}, batch {args.batch} per rank, "
        f"{dist.get_world_size()} ranks, gloo, torch {torch.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} cores, {args.steps} steps\n"
    )
    print(f"{'':24} {'median ms':>10} {'of best FSDP2':>14} {'loss':>9}")
    for row in rows:
        print(f"{row['contender']:24} {row['median_ms']:10.1f} {row['ratio_to_best_fsdp2']:14.3f} {row['loss']:9.5f}")
    print("\nThe unsharded model sees its own rank's batch only, so its loss is another; its time is the floor.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--steps", type=int, default=15, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before timing, compilation among them")
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
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
    contenders = [make(name, config) for name in args.only]
    for tokens, targets in batches(args, config):
        for contender in contenders:
            contender.step(tokens, targets)
    rows = table(contenders, args.warmup)
    if dist.get_rank() == 0:
        show(rows, args)
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"args": vars(args), "torch": torch.__version__, "rows": rows}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
