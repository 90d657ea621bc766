"""Inductor's and AOTAutograd's caches: a second process compiles nothing and computes the same."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from fsdp_compiled import compile
from fsdp_compiled.testing import RankProcesses
from tests.support.training import MLP, batches, mean_over_ranks, my_part, shard, square_loss, train_replicas
from tests.support.variants import thorough


@dataclass(frozen=True)
class _Program:
    """Trains on 2 ranks, without regions and with; writes each time's losses and uses of caches.

    ``lengths`` holds twice the rows of each rank's batch, step by step. Where ``dynamic``, which ``torch.compile``
    gets, is set, torch refuses regions, and the second time is left out.
    """

    caches: Sequence[Path]  # one for each rank, which may be one folder
    said: Path
    lengths: Sequence[Sequence[int]] = ((8, 8), (8, 8))
    dynamic: bool | None = None
    loads: Path | None = None  # artifacts that each rank loads first
    saves: Path | None = None  # artifacts that rank 0 writes in the end

    def __call__(self, rank: int) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.caches[rank])
        if self.loads is not None:
            assert torch.compiler.load_cache_artifacts(self.loads.read_bytes()) is not None
        found = [self.train(regions) for regions in ((False, True) if self.dynamic is None else (False,))]
        (self.said / str(rank)).write_text(json.dumps(found))
        if self.saves is not None and rank == 0:
            artifacts, _ = torch.compiler.save_cache_artifacts()
            self.saves.write_bytes(artifacts)

    def train(self, regions: bool) -> dict[str, Any]:
        """Train a model of its own; return the losses, those of replicas, and what the caches did."""
        torch.compiler.reset()
        counters.clear()
        alone, model = MLP(width=9, hidden=5), MLP(width=9, hidden=5)  # uneven: ranks hold different lengths
        shard(model, "eager")
        blocks = list(model.blocks) if regions else "off"
        call = compile(model, regions=blocks, fullgraph=True, dynamic=self.dynamic)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, wanted = [], []
        for step, rows in enumerate(self.lengths[dist.get_rank()]):
            batch = batches(1, rows, 9, seed=10 * step + dist.get_rank())
            wanted += train_replicas(alone, alone, batch, square_loss)
            loss = square_loss(call, my_part(batch[0]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
        uses = {"autograd": dict(counters["aot_autograd"]), "fx": dict(counters["inductor"])}
        return {"losses": losses, "wanted": wanted} | uses


def _run(folder: Path, *caches: str, **setting: Any) -> list[dict]:
    """Return what each rank, in a process of its own, says of its graphs without and with regions."""
    processes = RankProcesses(2)
    try:
        processes.run(2, _Program([folder / cache for cache in caches], folder, **setting))
    finally:
        processes.close()
    found = [found for rank in "01" for found in json.loads((folder / rank).read_text())]
    for each in found:
        assert torch.tensor(each["losses"]).isfinite().all()
        assert each["losses"] == pytest.approx(each["wanted"], rel=1e-4)
    return found


def _assert_hits_both(warm: dict) -> None:
    # torch 2.11 caches these graphs too: their inputs are plain tensors, not DTensors
    assert warm["autograd"].get("autograd_cache_hit") == 1, warm
    assert not warm["autograd"].get("autograd_cache_bypass"), warm
    assert warm["fx"].get("fxgraph_cache_hit", 0) >= 1, warm
    assert not warm["fx"].get("fxgraph_cache_miss"), warm


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder with the ranks' cache, with what ``save_cache_artifacts`` gives in a file, and what the ranks said."""
    folder = tmp_path_factory.mktemp("caches")
    return folder, _run(folder, "shared", "shared", saves=folder / "artifacts")


def _assert_compiles_nothing(first: list[dict], again: list[dict]) -> None:
    for cold, warm in zip(first, again, strict=True):
        assert warm["losses"] == cold["losses"]
        assert not warm["autograd"].get("autograd_cache_miss"), warm
        _assert_hits_both(warm)


@thorough()
def test_a_second_process_hits_both_caches_on_both_ranks(first):
    folder, said = first
    for colds in (said[::2], said[1::2]):
        assert sum(cold["autograd"].get("autograd_cache_miss", 0) for cold in colds) >= 1
    _assert_compiles_nothing(said, _run(folder, "shared", "shared"))


@thorough()
def test_what_one_rank_compiled_is_loaded_on_others(first):
    """By ``load_cache_artifacts``, on machines whose cache folders are empty."""
    folder, said = first
    _assert_compiles_nothing(said, _run(folder, "one", "other", loads=folder / "artifacts"))


def test_a_restart_with_batches_of_other_lengths_hits_both_caches(tmp_path):
    """Also where one rank's cache is warm, with other lengths, and the other's is empty.

    With ``dynamic=True`` Dynamo looks into AOTAutograd's cache twice, since it begins anew for a float that varies.
    """
    run = partial(_run, tmp_path, dynamic=True)
    run("warm", "warm", lengths=[[128, 9], [512, 2000]])
    for warm in run("warm", "warm", lengths=[[3000, 40], [100, 111]]):
        _assert_hits_both(warm)
    run("warm", "empty", lengths=[[700, 30], [2500, 7]])
