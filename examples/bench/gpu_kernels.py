"""How many kernels a sharded model's program for a GPU has, and that of the same model unsharded.

    python examples/bench/gpu_kernels.py --out kernels.json

No GPU is needed: :func:`capture` generates and assembles the programs. One process is rank 0 of ``--world`` in a
simulated process group. The unsharded model is in bf16; the sharded one has fp32 shards and bf16 compute. Collectives
and the copies around them are operators of the library, and do not count.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_compiled import MixedPrecisionPolicy, compile, fully_shard
from fsdp_compiled.inspect import capture
from fsdp_compiled.testing.llama import PRESETS, Config, Llama

SIZES = {
    "16 x 64": (Config(width=64, layers=16, heads=4, kv_heads=4, hidden=192, max_seq=64), (2, 64)),
    "8B": (replace(PRESETS["8b"], max_seq=2048), (1, 2048)),
}


def build(config: Config, is_sharded: bool) -> Llama:
    """Return a model whose memory nothing touches."""
    with torch.device("meta"):
        model = Llama(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if is_sharded:
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:  # but for one vector, without which there would be nothing to capture
        model.to(torch.bfloat16)
        fully_shard(model, ignored_params={param for param in model.parameters() if param is not model.norm.weight})
    return model.to_empty(device="cpu")


def kernels(config: Config, shape: tuple[int, int], is_sharded: bool, device: str) -> dict[str, dict[str, int]]:
    """Return how many kernels forward and backward have."""
    model = build(config, is_sharded)
    compile(model, regions="off")  # what is captured; a region's kernels would count once for all blocks
    tokens = torch.zeros(shape, dtype=torch.int64)
    graphs = capture(model, tokens, tokens, device=device).graphs
    generated = {graph.kind: sum(kernel.is_generated for kernel in graph.kernels) for graph in graphs}
    return {graph.kind: {"generated": generated[graph.kind], "all": len(graph.kernels)} for graph in graphs}


def main() -> None:
    args = parse()
    dist.init_process_group("fake", rank=0, world_size=args.world)
    results = {"torch": torch.__version__, "device": args.device, "world": args.world, "kernels": {}}
    for size in args.sizes:
        for name in ("unsharded", "sharded"):
            began = time.perf_counter()
            found = kernels(*SIZES[size], name == "sharded", args.device)
            results["kernels"].setdefault(size, {})[name] = found
            print(f"{size} {name}: {found}, {time.perf_counter() - began:.0f} s", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--device", default="H100")
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--out", type=Path, help="where to write the numbers as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
