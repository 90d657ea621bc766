"""Train while ranks die: torchrun restarts them, and they go on from the last checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train/elastic.py --out run --die-at 12
    torchrun --nproc-per-node 1 examples/train/elastic.py --out run --steps 60
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train/elastic.py --out other --fsdp2 --die-at 12

In the first, rank 1 kills itself at step 12; or leave ``--die-at`` out and ``kill -9`` a rank. The second goes on
with another number of ranks. The third is PyTorch's FSDP2 with compiled blocks (``--mode eager``: uncompiled).
Several machines need ``--rdzv-backend c10d``, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and ``--out`` on a shared disk.

Checkpoints are written in the background every ``--save-every`` steps, and the last two are kept. A death loses the
steps since the last complete one. The compiled graph comes from the compile caches (``TORCHINDUCTOR_CACHE_DIR``).
Rank 0 prints what each part of coming back took and appends it, like every step, to ``log.jsonl``:

    notice      from the kill to the new processes: torchrun sees it, ends the other ranks, starts all again
    restart     interpreter, imports, process group
    build       text, model, optimizer
    load        the checkpoint
    first step  with tracing and compiling
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from waiting import importing

STARTED = time.time() - time.process_time()  # also the interpreter's own start, which is busy throughout
KEPT = 2  # checkpoints

with importing("torch", __name__):
    import argparse
    from dataclasses import replace

    import data
    import torch
    import torch.distributed as dist
    import train
    from ema import EMA
    from resume import Checkpoints, arguments, check_batch, say, take_step
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    from fsdp_compiled.testing.llama import PRESETS, Llama


class Stopwatch:
    """The seconds of each part, one after the other, since this process was started."""

    def __init__(self) -> None:
        self._since, self.seconds = STARTED, dict[str, float]()

    def lap(self, part: str) -> None:
        now = time.time()
        self.seconds[part], self._since = now - self._since, now


def build(args: argparse.Namespace, device: torch.device) -> train.Trained:
    """Make the model, sharded by this library or by PyTorch's FSDP2."""
    if not args.fsdp2:
        return train.build(args, device)
    with torch.device("meta"):
        model = Llama(replace(PRESETS[args.preset], max_seq=args.seq))
    for block in model.blocks:
        if args.mode != "eager":
            block.compile()
        torch_fully_shard(block)
    torch_fully_shard(model)
    model.to_empty(device=device)
    model.init_weights(args.seed)
    return train.Trained(model, model, device)


class Log:
    """What happened, a line of JSON each; rank 0 writes, and restarted ranks append."""

    def __init__(self, folder: Path) -> None:
        self._path, self._killed = folder / "log.jsonl", folder / "killed"

    def write(self, **record: Any) -> None:
        if dist.get_rank() == 0:
            with self._path.open("a") as file:
                file.write("\n" + json.dumps(record))  # on a new line even if a kill has cut the last one

    def write_restart(self, begin: int, seconds: dict[str, float], deaths: int) -> None:
        """Say how long each part took and how many steps were lost."""
        if dist.get_rank() != 0:
            return
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        steps = [line for line in lines if line.startswith('{"step"') and line.endswith("}")]
        last = json.loads(steps[-1]) if steps else {"step": begin}
        if self._killed.exists():  # who kills may say when
            seconds = {"notice": STARTED - float(self._killed.read_text())} | seconds
            self._killed.unlink()
        elif deaths and steps:
            seconds = {"notice, at most": STARTED - last["at"]} | seconds
        lost = last["step"] - begin
        self.write(resumed=begin, lost=lost, ranks=dist.get_world_size(), seconds=seconds)
        parts = ", ".join(f"{part} {value:.2f}" for part, value in seconds.items())
        say(f"{lost} steps lost; training from step {begin} after {sum(seconds.values()):.2f} s: {parts}")


def run(args: argparse.Namespace, device: torch.device, watch: Stopwatch) -> None:
    """Train from the last checkpoint to ``args.steps``."""
    corpus = data.load(args.data, args.seq)
    trained = build(args, device)
    optimizer = torch.optim.AdamW(trained.model.parameters(), lr=args.lr)
    ema = EMA(trained.model, decay=0.9)
    watch.lap("build")
    checkpoints = Checkpoints(args.out, trained.model, optimizer, ema, args.timeout)
    checkpoints.remove_incomplete()
    begin = checkpoints.latest()
    if begin:
        checkpoints.load(begin)
    watch.lap("load")
    log, deaths = Log(args.out), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    for step in range(begin + 1, args.steps + 1):
        if args.die_at[deaths : deaths + 1] == [step] and dist.get_rank() == dist.get_world_size() - 1:
            (args.out / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        loss = take_step(args, step, trained, optimizer, ema, corpus)
        if step == begin + 1:
            watch.lap("first step")
            log.write_restart(begin, watch.seconds, deaths)
        log.write(step=step, loss=loss, at=time.time())
        say(f"step {step}  loss {loss:.4f}")
        if step == args.steps:
            checkpoints.save(step)
        elif step % args.save_every == 0:
            checkpoints.save_async(step)  # waits until the one before is written
        if step % args.save_every == 0:
            checkpoints.remove_old(KEPT)


def main() -> None:
    parser = arguments(__doc__, mode="full")
    parser.add_argument("--fsdp2", action="store_true", help="shard by torch.distributed.fsdp")
    parser.add_argument(
        "--die-at", type=train.positive, nargs="+", default=[], metavar="STEP", help="die there, once"
    )
    parser.add_argument("--timeout", type=float, default=30, help="seconds until a silent rank is taken for dead")
    parser.set_defaults(steps=30)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    watch = Stopwatch()
    device = train.start_ranks(args.timeout)
    check_batch(args)
    watch.lap("restart")
    run(args, device, watch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
