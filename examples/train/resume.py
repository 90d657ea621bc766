"""Train, save, stop, and resume on another number of ranks; at the end write one safetensors file.

    torchrun --nproc-per-node 2 examples/train/resume.py --steps 10 --out run
    torchrun --nproc-per-node 1 examples/train/resume.py --steps 20 --out run

The second command loads what the first has saved; PyTorch's distributed checkpoint (DCP) reshards it for the new
number of ranks. Every step takes the same sequences however many ranks share them, so losses equal those of an
uninterrupted run. Checkpoints hold the model, the optimizer, an average of the parameters (``ema.py``) and the step.
Intermediate checkpoints are saved by ``async_save``: a step waits until its shards are copied, not until they are
written. The file at the end holds the averaged parameters under their full names, for other programs to load.
"""

from __future__ import annotations

import argparse
import shutil
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import data
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ema import EMA
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from train import Trained, build, mean_over_ranks, positive, start_ranks

try:
    from safetensors.torch import save_file
except ImportError as error:
    raise SystemExit(f"{error}; install it with: pip install safetensors") from error


class Checkpoints:
    """The checkpoints of one run, a folder ``step_N`` for each."""

    def __init__(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA, timeout_s: float = 600
    ) -> None:
        self._folder = folder
        self._model, self._optimizer, self._ema = model, optimizer, ema
        self._writing: Future[Any] | None = None
        # The thread that writes communicates too: in training's group its messages would meet training's.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def _state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "ema": self._ema.average, "step": step}

    def _saved(self) -> dict[int, bool]:
        """Return the steps that have a folder, newest first, and whether DCP wrote its last file, ``.metadata``."""
        folders = {int(path.name[5:]): (path / ".metadata").exists() for path in self._folder.glob("step_*")}
        return dict(sorted(folders.items(), reverse=True))

    def latest(self) -> int:
        """Return the last step that was saved completely, 0 for none; all ranks learn what rank 0 sees."""
        found = [next((step for step, complete in self._saved().items() if complete), 0)]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def remove_old(self, kept: int) -> None:
        """Remove all complete checkpoints but the newest ones."""
        for step in [step for step, complete in self._saved().items() if complete][kept:]:
            self._remove(step)

    def remove_incomplete(self) -> None:
        """Remove what a process that died was writing; nothing must be being written."""
        for step in [step for step, complete in self._saved().items() if not complete]:
            self._remove(step)

    def _remove(self, step: int) -> None:
        if dist.get_rank() == 0:
            folder = self._folder / f"step_{step}"
            (folder / ".metadata").unlink(missing_ok=True)  # first: half a checkpoint must not look complete
            shutil.rmtree(folder)

    def load(self, step: int) -> None:
        """Read each rank's part of a checkpoint that any number of ranks has saved."""
        state = self._state(step)
        dcp.load(state, checkpoint_id=self._folder / f"step_{step}")
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def save_async(self, step: int) -> None:
        """Copy the shards, and write them while training continues."""
        self.finish()
        folder = self._folder / f"step_{step}"
        self._writing = dcp.async_save(self._state(step), checkpoint_id=folder, process_group=self._group)

    def save(self, step: int) -> None:
        """Write the shards before returning."""
        self.finish()
        dcp.save(self._state(step), checkpoint_id=self._folder / f"step_{step}")

    def finish(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None


def export(model: nn.Module, ema: EMA, path: Path) -> None:
    """Write the averaged parameters, unsharded, to one safetensors file; rank 0 alone holds and writes them."""
    with ema.applied():
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        unsharded = get_model_state_dict(model, options=options)  # a collective: all ranks call it
        if dist.get_rank() == 0:  # still with the average: on one rank these are the parameters' own memory
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in unsharded.items()}, path)
    dist.barrier()


def take_step(
    args: argparse.Namespace,
    step: int,
    trained: Trained,
    optimizer: torch.optim.Optimizer,
    ema: EMA,
    corpus: data.Corpus,
) -> float:
    """Train on the sequences of this step, shared among the ranks; return their mean loss."""
    sequences = corpus.sample(args.batch, args.seq, torch.Generator().manual_seed(step))
    tokens, targets = (each.tensor_split(dist.get_world_size())[dist.get_rank()] for each in sequences)
    loss = trained.call(tokens.to(trained.device), targets.to(trained.device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.update()
    return mean_over_ranks(loss.detach())


def run(args: argparse.Namespace, device: torch.device, corpus: data.Corpus) -> dict[int, float]:
    """Train from the last checkpoint to ``args.steps``; return the mean loss of each step that was taken."""
    trained = build(args, device)
    optimizer = torch.optim.AdamW(trained.model.parameters(), lr=args.lr)
    ema = EMA(trained.model, decay=0.9)
    checkpoints = Checkpoints(args.out, trained.model, optimizer, ema)
    begin, losses = checkpoints.latest(), dict[int, float]()
    if begin:
        checkpoints.load(begin)
    for step in range(begin + 1, args.steps + 1):
        losses[step] = take_step(args, step, trained, optimizer, ema, corpus)
        say(f"step {step}  loss {losses[step]:.4f}")
        if step % args.save_every == 0 and step < args.steps:
            checkpoints.save_async(step)
            say(f"step {step}  saving while training continues")
    checkpoints.save(args.steps)
    export(trained.model, ema, args.out / "model.safetensors")
    say(f"saved {args.out}/step_{args.steps}, and the average as {args.out}/model.safetensors")
    return losses


def say(text: str) -> None:
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def arguments(description: str | None, mode: str = "eager") -> argparse.ArgumentParser:
    """Return the options of a run that keeps checkpoints."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["full", "regional", "eager"], default=mode)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--data", metavar="FILE_OR_DIR", help="default: Python's standard library")
    parser.add_argument("--steps", type=positive, default=10, help="of the whole run, earlier ones included")
    parser.add_argument("--save-every", type=positive, default=5)
    parser.add_argument("--seq", type=positive, default=128)
    parser.add_argument(
        "--batch", type=positive, default=8, help="sequences of all ranks; a multiple of their number"
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("run"), help="where checkpoints go")
    return parser


def check_batch(args: argparse.Namespace) -> None:
    """Refuse a batch that ranks cannot share equally."""
    if args.batch % dist.get_world_size():
        raise SystemExit(f"--batch: expected a multiple of {dist.get_world_size()} ranks, got {args.batch}")


def main() -> None:
    args = arguments(__doc__).parse_args()
    device = start_ranks()
    check_batch(args)
    run(args, device, data.load(args.data, args.seq))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
