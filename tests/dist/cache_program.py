"""Trains two steps on 2 ranks, without and with regions; prints each time's losses and uses of caches, as JSON."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from fsdp_compiled import compile
from tests.training import MLP as Model
from tests.training import batches, my_part, shard, square_loss


def train(regions: bool) -> dict[str, Any]:
    """Train a model of its own; return the losses and what the caches did."""
    torch.compiler.reset()
    counters.clear()
    model = Model(width=9, hidden=5)  # uneven: ranks hold different lengths
    shard(model, "eager")
    call = compile(model, regions=list(model.blocks) if regions else "off", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches(2, 8, 9):
        loss = square_loss(call, my_part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "autograd": dict(counters["aot_autograd"]), "fx": dict(counters["inductor"])}


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    print(json.dumps([train(regions) for regions in (False, True)]))
    dist.destroy_process_group()


main()
