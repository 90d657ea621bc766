"""Trains two steps on 2 ranks and prints, per rank, the losses and what the compile caches did, as JSON."""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.training import MLP as Model
from tests.training import batches, my_part, shard, square_loss


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    model = Model(width=9, hidden=5)  # uneven: ranks hold different lengths
    shard(model, "eager")
    call = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches(2, 8, 9):
        loss = square_loss(call, my_part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(
        json.dumps(
            {
                "rank": dist.get_rank(),
                "losses": losses,
                "autograd": dict(counters["aot_autograd"]),
                "fx": dict(counters["inductor"]),
            }
        )
    )
    dist.destroy_process_group()


main()
