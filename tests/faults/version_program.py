"""Ends well if every rank refuses to work with another version of the library; rank and store are arguments."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch.distributed as dist

from tests.faults.steps import assert_all_refuse, trainer


def main(rank: int, store: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for mode in ("eager", "full"):
        assert_all_refuse(
            trainer(mode).step, "ranks run other versions: rank 0: fsdp_compiled ", "; rank 1: ", "install one on all"
        )
    dist.destroy_process_group()


main(int(sys.argv[1]), sys.argv[2])
