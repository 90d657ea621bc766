"""The schedule of an 8-billion-parameter Llama on 64 H100s, looked at on a laptop: without weights, without GPUs.

    python examples/inspect_8b.py --out graphs
    python examples/inspect_8b.py --cluster A100 --card 9.375 --world 512 --seq 1024  # where scheduling matters

One process takes the part of rank 0 of ``--world`` in a simulated process group that communicates nothing. The model
has shards, but nothing is ever written to them: graphs are traced, scheduled and not run. Prints the headline of two
schedules, buckets found by cost and a bucket for each unit as FSDP2 has it, and saves a page that compares them and a
picture of the first.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from model import PRESETS, Llama
from torch import Tensor
from train import positive
from view import Progress

from fsdp_compiled import MixedPrecisionPolicy, SchedulePolicy, compile, fully_shard
from fsdp_compiled.inspect import Capture, capture
from fsdp_compiled.passes import CLUSTERS, Cluster


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


def look(args: argparse.Namespace, progress: Progress) -> list[Capture]:
    """Capture the model with either schedule."""
    model, inputs = build(args.layers, args.batch, args.seq)
    compile(model, regions=args.regions)  # which captures heed; nothing is compiled yet
    found = []
    for bucket in ("auto", "unit"):
        progress.begin(f"capturing with bucket {bucket!r}")
        schedule = SchedulePolicy(bucket=bucket, cluster=cluster_of(args))
        found.append(capture(model, *inputs, schedule=schedule, code=False))
        progress.say(f"bucket {bucket!r}: {found[-1].headline}")
    return found


def main() -> None:
    args = parse()
    dist.init_process_group("fake", rank=0, world_size=args.world)
    title = f"{args.layers} layers on {args.world} ranks, {args.batch} x {args.seq} tokens each, {args.cluster}"
    with Progress(title, visible=True) as progress:
        by_cost, by_unit = look(args, progress)
        progress.begin("saving")
        args.out.mkdir(parents=True, exist_ok=True)
        progress.say(f"saved {by_cost.save(args.out / 'llama_8b.html', beside=by_unit)}")
        progress.say(f"saved {by_cost.save(args.out / 'llama_8b.png')}")
    dist.destroy_process_group()


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`cluster_of` reads."""
    parser.add_argument("--cluster", choices=list(CLUSTERS), default="H100", help="that times are estimated for")
    parser.add_argument(
        "--card", type=float, metavar="GB/S", help="what a GPU's network card carries, if not as known"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, default=PRESETS["8b"].layers)
    parser.add_argument("--batch", type=positive, default=1, help="sequences per rank")
    parser.add_argument("--seq", type=positive, default=PRESETS["8b"].max_seq)
    parser.add_argument("--regions", choices=["auto", "off"], default="auto", help="auto: trace equal blocks once")
    parser.add_argument("--world", type=positive, default=64, help="ranks to shard over")
    add_cluster(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="where page and picture go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
