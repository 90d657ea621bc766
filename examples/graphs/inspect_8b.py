"""The schedule of an 8-billion-parameter Llama on 64 H100s, computed on a laptop: without weights, without GPUs.

    python examples/graphs/inspect_8b.py --out graphs
    python examples/graphs/inspect_8b.py --cluster A100 --card 9.375 --world 512 --seq 1024  # exposed links

One process is rank 0 of ``--world`` in a simulated process group that communicates nothing. The model has shards, but
nothing is ever written to them: graphs are traced, scheduled and not run. Prints the headline of two
schedules, buckets found by cost and a bucket for each unit as FSDP2 has it, and saves a page that compares them and a
picture of the first.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compiled import MixedPrecisionPolicy, SchedulePolicy, compile, fully_shard
from fsdp_compiled.inspect import Capture, capture
from fsdp_compiled.passes import CLUSTERS, Cluster
from fsdp_compiled.testing.llama import PRESETS, Llama


def build(layers: int, batch: int, seq: int) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Return a model with a unit for each block and one for the rest, bf16 with fp32 reductions; and its inputs."""
    with torch.device("meta"):
        model = Llama(replace(PRESETS["8b"], layers=layers, max_seq=seq))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")  # memory that the system has promised; nothing touches it
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    return model, (tokens, tokens)


def cluster_of(args: argparse.Namespace) -> Cluster:
    """Return the cluster that was asked for, with its network cards."""
    cluster = CLUSTERS[args.cluster]
    return replace(cluster, inter=replace(cluster.inter, bytes_per_s=args.card * 1e9)) if args.card else cluster


def captures(args: argparse.Namespace) -> list[Capture]:
    """Capture the model with either schedule."""
    model, inputs = build(args.layers, args.batch, args.seq)
    compile(model, regions=args.regions)  # captures use this setting; nothing is compiled yet
    found = []
    for bucket in ("auto", "unit"):
        print(f"capturing with bucket {bucket!r}", flush=True)
        schedule = SchedulePolicy(bucket=bucket, cluster=cluster_of(args))
        found.append(capture(model, *inputs, schedule=schedule, code=False))
        print(f"bucket {bucket!r}: {found[-1].headline}", flush=True)
    return found


def main() -> None:
    args = parse()
    dist.init_process_group("fake", rank=0, world_size=args.world)
    print(f"{args.layers} layers on {args.world} ranks, {args.batch} x {args.seq} tokens each, {args.cluster}")
    with compiler_messages():
        by_cost, by_unit = captures(args)
    args.out.mkdir(parents=True, exist_ok=True)
    print("saved", by_cost.save(args.out / "llama_8b.html", beside=by_unit))
    print("saved", by_cost.save(args.out / "llama_8b.png"))
    dist.destroy_process_group()


@contextmanager
def compiler_messages() -> Iterator[None]:
    """Print what the library logs while it captures: a line for each phase."""
    log, handler = logging.getLogger("fsdp_compiled"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("  %(message)s"))
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, default=PRESETS["8b"].layers)
    parser.add_argument("--batch", type=positive, default=1, help="sequences per rank")
    parser.add_argument("--seq", type=positive, default=PRESETS["8b"].max_seq)
    parser.add_argument("--regions", choices=["auto", "off"], default="auto", help="auto: trace equal blocks once")
    parser.add_argument("--world", type=positive, default=64, help="ranks to shard over")
    parser.add_argument("--cluster", choices=list(CLUSTERS), default="H100", help="that times are estimated for")
    parser.add_argument("--card", type=float, metavar="GB/S", help="bandwidth of each GPU's network card")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="where page and picture go")
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


if __name__ == "__main__":
    main()
