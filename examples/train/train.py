"""Train a Llama-style byte-level model, sharded, as one compiled forward and one compiled backward graph.

    torchrun --nproc-per-node 2 examples/train/train.py

Trains on the Python standard library's own source files unless ``--data`` names others. On a machine with GPUs
each rank takes one, with NCCL and bf16; else gloo and fp32 on the CPU. Says at every moment what it is doing, and
while it compiles what the logger ``fsdp_compiled`` says. At the end it evaluates on held-out files, writes the loss
curve to loss.png and prints a sampled continuation.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from waiting import importing, is_first_rank

with importing("torch", __name__):
    import data
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from view import Progress, Speed, plot_losses

    from fsdp_compiled import (
        MixedPrecisionPolicy,
        fully_shard,
        fully_shard_with_compiled_compute,
        step_on_shards,
    )
    from fsdp_compiled.testing.llama import PRESETS, Llama


@dataclass(frozen=True)
class Trained:
    """A sharded model and what to call for a training or evaluation step."""

    model: Llama
    call: Callable[..., Tensor]
    device: torch.device


def build(args: argparse.Namespace, device: torch.device) -> Trained:
    """Make the model without memory, shard it, and only then give each rank its shards."""
    config = replace(PRESETS[args.preset], max_seq=args.seq)
    with torch.device("meta"):
        model = Llama(config)
    policy = MixedPrecisionPolicy()
    if device.type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_block = fully_shard_with_compiled_compute if args.mode == "regional" else fully_shard
    for block in model.blocks:
        shard_block(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    model.init_weights(args.seed)
    call = torch.compile(model, fullgraph=True) if args.mode == "full" else model
    return Trained(model, call, device)


def train(args: argparse.Namespace, trained: Trained, corpus: data.Corpus, progress: Progress) -> list[float]:
    """Run ``args.steps`` optimizer steps; return the mean training loss of each."""
    optimizers = make_optimizers(args, trained.model)
    factor = lambda step: warmup_and_cosine(step, args.steps)  # noqa: E731
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    generator = torch.Generator().manual_seed(args.seed + 1 + dist.get_rank())
    losses, speed = [], Speed()
    progress.begin("training", args.steps) if args.mode == "eager" else progress.begin("compiling")
    for step in range(args.steps):
        start = time.perf_counter()
        total = torch.zeros((), device=trained.device)
        for micro in range(args.accumulate):
            trained.model.set_requires_gradient_sync(micro == args.accumulate - 1)
            tokens, targets = corpus.sample(args.batch, args.seq, generator)
            loss = trained.call(tokens.to(trained.device), targets.to(trained.device)) / args.accumulate
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained.model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(mean_over_ranks(total))
        tokens_seen = args.batch * args.seq * args.accumulate * dist.get_world_size()
        per_second = speed.step(time.perf_counter() - start, tokens_seen)
        if step == 0 and args.mode != "eager":
            progress.begin("training", args.steps)
        if step == 1 and args.mode != "eager":
            progress.say(f"compiling took {speed.compiling_s:.1f} s: step 1 beyond step 2")
        progress.advance(f"loss {losses[-1]:.4f}  {per_second}")
    return losses


def make_optimizers(args: argparse.Namespace, model: Llama) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the blocks' matrices and AdamW for the others."""
    settings = {"lr": args.lr, "weight_decay": 0.1}
    matrices = [] if args.optimizer == "adamw" else [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = set(matrices)
    others = [param for param in model.parameters() if param not in chosen]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, betas=(0.9, 0.95), **settings)]
    if matrices:  # by this adjustment, with AdamW's learning rate and weight decay
        optimizers.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **settings))
    return list(map(step_on_shards, optimizers))


def warmup_and_cosine(step: int, steps: int) -> float:
    """Return the factor on the learning rate: a short warm-up, then half a cosine down to a tenth."""
    warmup = max(min(20, steps // 10), 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(args: argparse.Namespace, trained: Trained, corpus: data.Corpus, progress: Progress) -> float:
    """Return the mean loss over held-out windows, each rank taking its own.

    The model runs uncompiled: a graph without gradients would be compiled for these few batches.
    """
    rounds = 4
    progress.begin("evaluating on held-out text", rounds)
    tokens, targets = corpus.held_out_windows(rounds * args.batch * dist.get_world_size(), args.seq)
    total = torch.zeros((), device=trained.device)
    for index in range(rounds):
        mine = slice((index * dist.get_world_size() + dist.get_rank()) * args.batch, None)
        x, y = tokens[mine][: args.batch], targets[mine][: args.batch]
        total += trained.model(x.to(trained.device), y.to(trained.device))
        progress.advance()
    return mean_over_ranks(total) / rounds


@torch.no_grad()
def continuation(
    args: argparse.Namespace, trained: Trained, corpus: data.Corpus, progress: Progress, length: int = 120
) -> str:
    """Continue the beginning of the held-out text, byte by byte; every rank samples the same.

    The window keeps one shape, so that compiled blocks are not compiled for every length.
    """
    prompt = corpus.held_out[: min(64, args.seq // 2)].long().tolist()
    generator = torch.Generator().manual_seed(args.seed)
    text = list(prompt)
    progress.begin("sampling a continuation", length)
    for _ in range(length):
        recent = text[-args.seq :]
        window = torch.zeros(1 if args.mode != "regional" else args.batch, args.seq, dtype=torch.int64)
        window[:, : len(recent)] = torch.tensor(recent)
        logits = trained.model(window.to(trained.device))[0, len(recent) - 1].float().cpu()
        chances = torch.softmax(logits[:256] / 0.8, dim=-1)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
        progress.advance()
    decode = lambda part: bytes(part).decode(errors="replace")  # noqa: E731
    return f"{decode(prompt)}[...]{decode(text[len(prompt) :])}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["full", "regional", "eager"], default="full")
    parser.add_argument("--preset", choices=list(PRESETS), default="small")
    parser.add_argument("--data", metavar="FILE_OR_DIR", help="default: Python's standard library")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--seq", type=positive, default=256)
    parser.add_argument("--batch", type=positive, default=4, help="sequences per rank and micro-batch")
    parser.add_argument("--accumulate", type=positive, default=1, help="micro-batches per step")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: of matrices in blocks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="where loss.png goes")
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def store_without_past() -> dict[str, Any]:
    """Return what lets restarted ranks of one torchrun ignore the keys of those before.

    torchrun gives restarted processes the store of the first ones, where they find addresses of processes that are
    dead (torch 2.11 to 2.15). Several torchruns do not restart equally often; for them set
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, with which each start makes a new store.
    """
    restarts, shared = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "USE_AGENT_STORE"))
    if restarts in (None, "0") or shared != "True" or os.environ["GROUP_WORLD_SIZE"] != "1":
        return {}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    here = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    return {"store": dist.PrefixStore(f"restart_{restarts}", store), **here}


def start_ranks(timeout_s: float = 600) -> torch.device:
    """Join the process group that torchrun describes; without torchrun, be the only rank."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29561",
    }.items():
        os.environ.setdefault(name, value)
    settings = {"timeout": timedelta(seconds=timeout_s), **store_without_past()}
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **settings)
        return device
    torch.set_num_threads(max((os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"]), 1))
    dist.init_process_group("gloo", **settings)
    return torch.device("cpu")


def main() -> None:
    args = parse()
    with Progress(f"a {args.preset} Llama, {args.mode}", visible=is_first_rank()) as progress:
        progress.begin("joining the other ranks")
        device = start_ranks()
        progress.begin("reading text")
        corpus = data.load(args.data, args.seq)
        progress.begin("building the model")
        trained = build(args, device)
        parameters = sum(p.numel() for p in trained.model.parameters())
        ranks = f"{dist.get_world_size()} ranks on {device.type}"
        progress.say(f"{parameters / 1e6:.1f} M parameters, {ranks}; {corpus.description}")
        losses = train(args, trained, corpus, progress)
        held_out = evaluate(args, trained, corpus, progress)
        sample = continuation(args, trained, corpus, progress)
    if dist.get_rank() == 0:
        picture = plot_losses(losses, held_out, args.out / "loss.png")
        print(f"held-out loss {held_out:.4f} ({held_out / math.log(2):.3f} bits per byte); loss curve in {picture}")
        print(f"--- sampled continuation ---\n{sample}\n---")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
