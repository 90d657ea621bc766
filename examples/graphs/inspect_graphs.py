"""Shows the graphs of a sharded model before there is a cluster to train it on.

    python examples/graphs/inspect_graphs.py --world 64 --cluster H100 --out graphs

One process is rank 0 of ``--world`` in a simulated process group that communicates nothing. Prints
what each unit all-gathers and keeps (``explain``) and what every collective is estimated to cost (``capture``), saves
the capture as a page, a picture, data and a trace for Perfetto, and compares two schedules. Takes a minute on 2
cores. ``python -m fsdp_compiled inspect examples/graphs/inspect_graphs.py:build`` does the same from a shell.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compiled import SchedulePolicy, fully_shard
from fsdp_compiled.inspect import Capture, capture, explain
from fsdp_compiled.passes import CLUSTERS
from fsdp_compiled.testing.llama import Config, Llama

FILES = ("graphs.html", "graphs.png", "graphs.json", "graphs.trace.json")
HEAD_WIDTH = 32


def build(layers: int = 2, width: int = 64, seq: int = 128) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Return a model with a unit for each block, and inputs for its forward: tokens and targets, ``[2, seq]``."""
    heads = width // HEAD_WIDTH
    with torch.device("meta"):
        model = Llama(Config(256, width, layers, heads, kv_heads=heads, hidden=3 * width, max_seq=seq))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.init_weights()
    tokens = torch.zeros(2, seq, dtype=torch.int64)
    return model, (tokens, tokens)


def main() -> None:
    args = parse()
    dist.init_process_group("fake", rank=0, world_size=args.world)
    model, batch = build(args.layers, args.width)
    policy = replace(args.bucket, cluster=CLUSTERS[args.cluster])

    print(explain(model, policy), end="\n\n")
    captured = capture(model, *batch, schedule=policy)
    print(captured, end="\n\n")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        print("saved", captured.save(args.out / name))

    known = {policy: captured}
    for other in (replace(policy, bucket="auto"), replace(policy, bucket="unit")):
        known[other] = known.get(other) or capture(model, *batch, schedule=other)
    compare(known)
    dist.destroy_process_group()


def compare(captures: Mapping[SchedulePolicy, Capture]) -> None:
    """Print three figures of each capture side by side."""
    of_graphs = [captured.graphs for captured in captures.values()]
    rows = {
        "": [f"bucket {policy.bucket}" for policy in captures],
        "collectives": [sum(len(graph.collectives) for graph in graphs) for graphs in of_graphs],
        "exposed µs": [round(sum(graph.exposed_us for graph in graphs)) for graphs in of_graphs],
        "peak bytes": [captured.peak_unsharded_bytes for captured in captures.values()],
    }
    print()
    for title, cells in rows.items():
        print(f"{title:12}" + "".join(f"{cell:>16}" for cell in cells))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=whole_heads, default=64, help=f"a multiple of {HEAD_WIDTH}")
    parser.add_argument("--world", type=int, default=64, help="ranks to shard over")
    parser.add_argument("--bucket", type=bucketed, default=SchedulePolicy(), metavar="auto|unit|none|BYTES")
    parser.add_argument("--cluster", choices=list(CLUSTERS), default="H100", help="that times are estimated for")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="where graphs.html and others go")
    return parser.parse_args()


def whole_heads(text: str) -> int:
    if (width := int(text)) < 1 or width % HEAD_WIDTH:
        raise argparse.ArgumentTypeError(f"expected a multiple of {HEAD_WIDTH}, got {text}")
    return width


def bucketed(text: str) -> SchedulePolicy:
    try:
        return SchedulePolicy(bucket=int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    main()
