"""Train in replica groups that may die and come back: torchft coordinates them, each is sharded over its ranks.

    pip install torchft
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 --heartbeat_timeout_ms 1000 --bind 127.0.0.1:29510 &
    export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510
    REPLICA_GROUP_ID=0 torchrun --nproc-per-node 2 --master-port 29600 examples/train/replica_groups.py &
    REPLICA_GROUP_ID=1 torchrun --nproc-per-node 2 --master-port 29601 examples/train/replica_groups.py

Kill the processes of one group with SIGKILL: the other one trains on. Start the group again: it receives parameters
and optimizer state, and joins. Under ``torchrun --max-restarts 100`` it starts by itself. Each group draws batches of
its own. ``--log FILE`` has a line of JSON for each step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import data
import torch
import torch.distributed as dist
from train import build, positive

try:
    from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

    from fsdp_compiled.integrations.torchft import ReplicatedOptimizer
except ImportError as error:
    raise SystemExit(f"{error}; install it with: pip install torchft") from error


def start_group(args: argparse.Namespace) -> tuple[torch.device, Manager]:
    """Join this group's process group, and torchft's of all groups."""
    timeout, is_on_gpu = timedelta(seconds=args.timeout), torch.cuda.is_available()
    dist.init_process_group("nccl" if is_on_gpu else "gloo", timeout=timeout)
    device = torch.device("cuda", dist.get_rank()) if is_on_gpu else torch.device("cpu")
    if is_on_gpu:
        torch.cuda.set_device(device)
    manager = Manager(
        pg=(ProcessGroupNCCL if is_on_gpu else ProcessGroupGloo)(timeout=timeout),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=f"group_{os.environ['REPLICA_GROUP_ID']}",
        timeout=timeout,
        quorum_timeout=timedelta(minutes=10),  # which waits while another group that is alive compiles
        connect_timeout=timeout,
        init_sync=False,  # all groups begin with equal parameters
    )
    return device, manager


def run(args: argparse.Namespace) -> None:
    group = int(os.environ["REPLICA_GROUP_ID"])
    device, manager = start_group(args)
    trained = build(args, device)
    params = trained.model.parameters()
    own = torch.optim.SGD(params, args.lr, 0.9) if args.optimizer == "sgd" else torch.optim.AdamW(params, args.lr)
    optimizer = ReplicatedOptimizer(manager, own, trained.model)
    corpus = data.load(args.data, args.seq)
    while (step := manager.current_step()) < args.steps:
        begin = time.time()
        optimizer.zero_grad()  # a quorum is found during forward
        seed = step * 1000 + group * 100 + dist.get_rank()
        tokens, targets = corpus.sample(args.batch, args.seq, torch.Generator().manual_seed(seed))
        loss = trained.call(tokens.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        taken, of = manager.current_step(), manager.num_participants()
        seconds = time.time() - begin
        if taken == step:
            say(f"group {group}  step {step} again: a group failed  {seconds:.2f} s")
        elif taken > step + 1:
            say(f"group {group}  caught up to step {taken}")
        elif manager.is_participating():
            say(f"group {group}  step {taken}  loss {loss.item():.4f}  {of} groups  {seconds:.2f} s")
        took_part = taken == step + 1 and manager.is_participating()
        figures = {"group": group, "step": step, "taken": taken, "groups": of, "took_part": took_part}
        note(args.log, **figures, loss=loss.item(), begin=begin, end=time.time())
        time.sleep(args.pause)
    total = torch.stack([param.full_tensor().double().sum() for param in trained.model.parameters()]).sum()
    say(f"group {group}  done, parameters sum up to {total.item():.9f}")
    manager.shutdown()


def say(text: str) -> None:
    """Print on one rank of the group."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def note(file: Path | None, **figures: object) -> None:
    if file is not None and dist.get_rank() == 0:
        with file.open("a") as opened:
            opened.write(json.dumps(figures) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["full", "regional", "eager"], default="eager")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--data", metavar="FILE_OR_DIR", help="default: Python's standard library")
    parser.add_argument("--steps", type=positive, default=100, help="of all groups")
    parser.add_argument("--seq", type=positive, default=64)
    parser.add_argument("--batch", type=positive, default=2, help="sequences per rank")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=10, help="seconds until a silent group counts as failed")
    parser.add_argument("--pause", type=float, default=0, help="seconds after each step, to have time for a kill")
    parser.add_argument("--log", metavar="FILE", type=Path)
    code = 1
    try:
        run(parser.parse_args())
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # or torchft's threads would go on, and the others would wait for this group


if __name__ == "__main__":
    main()
