"""Trains on 2 ranks, without regions and with; prints each time's losses and uses of caches, as JSON.

``LOAD`` names a file of artifacts that each rank loads first, ``SAVE`` one that rank 0 writes in the end. ``LENGTHS``
holds twice the rows of each rank's batch, step by step: ``[[8, 8], [8, 8]]`` by default. ``DYNAMIC`` is what
``torch.compile`` gets as ``dynamic``; where that is set, torch refuses regions, and the second time is left out.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from fsdp_compiled import compile
from tests.support.training import MLP as Model
from tests.support.training import (
    batches,
    mean_over_ranks,
    my_part,
    shard,
    square_loss,
    train_replicas,
)

DYNAMIC = json.loads(os.environ.get("DYNAMIC", "null"))


def train(regions: bool) -> dict[str, Any]:
    """Train a model of its own; return the losses, those of replicas, and what the caches did."""
    torch.compiler.reset()
    counters.clear()
    alone, model = Model(width=9, hidden=5), Model(width=9, hidden=5)  # uneven: ranks hold different lengths
    shard(model, "eager")
    blocks = list(model.blocks) if regions else "off"
    call = compile(model, regions=blocks, fullgraph=True, dynamic=DYNAMIC)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, wanted = [], []
    for step, rows in enumerate(json.loads(os.environ.get("LENGTHS", "[[8, 8], [8, 8]]"))[dist.get_rank()]):
        batch = batches(1, rows, 9, seed=10 * step + dist.get_rank())
        wanted += train_replicas(alone, alone, batch, square_loss)
        loss = square_loss(call, my_part(batch[0]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    uses = {"autograd": dict(counters["aot_autograd"]), "fx": dict(counters["inductor"])}
    return {"losses": losses, "wanted": wanted} | uses


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    if "LOAD" in os.environ:
        assert torch.compiler.load_cache_artifacts(Path(json.loads(os.environ["LOAD"])).read_bytes()) is not None
    print(json.dumps([train(regions) for regions in ((False, True) if DYNAMIC is None else (False,))]))
    if "SAVE" in os.environ and dist.get_rank() == 0:
        artifacts, _ = torch.compiler.save_cache_artifacts()
        Path(json.loads(os.environ["SAVE"])).write_bytes(artifacts)
    dist.destroy_process_group()


main()
