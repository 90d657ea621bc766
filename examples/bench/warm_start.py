"""Time a start with warm compile caches, from the command to the end of the first step, part by part.

    OMP_NUM_THREADS=1 python examples/bench/warm_start.py --layers 32 --width 64

Starts 2 ranks three times with one new cache folder: the first fills it. ``--no-regions`` compiles every block;
``--unsharded`` trains one process without this library. ``--json FILE`` keeps the figures.
"""

from __future__ import annotations

import time

STARTED = time.time()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--no-regions", action="store_true")
    parser.add_argument("--unsharded", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    """Take one step and print how long its parts took, as JSON."""
    laps, last = {"interpreter": STARTED - float(os.environ["BEGAN"])}, STARTED

    def lap(part: str) -> None:
        nonlocal last
        now = time.time()
        laps[part] = now - last
        last = now

    import torch
    import torch.distributed as dist

    lap("import torch")
    from fsdp_compiled import compile, fully_shard, step_on_shards
    from fsdp_compiled.testing.llama import Config, Llama

    lap("import fsdp_compiled")
    torch.set_num_threads(1)
    if not args.unsharded:
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
        lap("process group")
    hidden = -(-args.width * 8 // 3 // 32) * 32
    heads = max(args.width // 32, 2)
    model = Llama(
        Config(
            vocab=256, width=args.width, layers=args.layers, heads=heads, kv_heads=heads, hidden=hidden, max_seq=32
        )
    )
    model.init_weights(seed=0)
    lap("model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call = torch.compile(model, fullgraph=True)
    if not args.unsharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = step_on_shards(torch.optim.AdamW(model.parameters(), lr=1e-3))
        call = compile(model, regions="off" if args.no_regions else "auto", fullgraph=True)
        lap("sharding")
    tokens = torch.randint(256, (2, 33))
    loss = call(tokens[:, :-1], tokens[:, 1:])
    lap("first forward")
    loss.backward()
    lap("first backward")
    optimizer.step()
    lap("optimizer")
    from torch._dynamo.utils import compilation_time_metrics, counters

    clocks = {name: sum(seconds) for name, seconds in compilation_time_metrics.items()}
    hits = dict(counters["aot_autograd"])
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"parts": laps, "clocks": clocks, "caches": hits}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def start(args: argparse.Namespace, folder: str) -> dict[str, dict[str, float]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = 1 if args.unsharded else 2
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    shared |= {"TORCHINDUCTOR_CACHE_DIR": folder, "BEGAN": repr(time.time())}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env=os.environ | shared | {"RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(world)
    ]
    texts = [process.communicate(timeout=600)[0].decode() for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed")
    return json.loads(texts[0].splitlines()[-1])


def main() -> None:
    args = arguments()
    if "BEGAN" in os.environ:
        train(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = [start(args, folder) for _ in range(3)]
    named = dict(zip(("cold", "warm", "warm again"), runs, strict=True))
    if args.json:
        args.json.write_text(json.dumps({"layers": args.layers, "width": args.width, **named}, indent=1) + "\n")
    for name, run in named.items():
        print(f"{name:12}", "  ".join(f"{part} {seconds:.2f}" for part, seconds in run["parts"].items()))
        print(f"{'':12} total {sum(run['parts'].values()):.2f}", run["caches"])
        top = sorted(run["clocks"].items(), key=lambda each: -each[1])[:24]
        print("   ", "  ".join(f"{part} {seconds:.2f}" for part, seconds in top))


if __name__ == "__main__":
    main()
