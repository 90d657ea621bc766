"""Ranks that run another version of the library, and ranks that hit the compile caches where others miss."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fsdp_compiled.agreement import ledger
from fsdp_compiled.passes import Agree
from tests.faults.steps import MODES, WIDTH, Trainer, assert_all_refuse, trainer
from tests.support.ranks import CRASHES, on_ranks

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 6.0


def test_another_version(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "fsdp_compiled", copy / "fsdp_compiled", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "fsdp_compiled" / "errors.py").open("a") as changed:
        changed.write("# another version\n")
    codes, said = _run_versions(tmp_path / "store", (ROOT, copy))
    if any(-code in CRASHES for code in codes):
        warnings.warn(f"once more, after processes ended with {codes}: {said}", stacklevel=1)
        codes, said = _run_versions(tmp_path / "second_store", (ROOT, copy))
    assert codes == [0, 0], said


def _run_versions(store: Path, folders: tuple[Path, ...]) -> tuple[list[int], list[str]]:
    """Run a rank in each folder; return how each ended and what it wrote to stderr."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.version_program", str(rank), str(store)],
            cwd=folder,  # -m finds modules here first
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    said = [process.communicate(timeout=200)[1] for process in processes]
    return [process.returncode for process in processes], said


@pytest.mark.parametrize("mode", MODES)
@on_ranks(4, timeout_s=30)
def test_another_version_on_4_ranks(mode):
    """Here one rank only says that it runs another; processes that do take long to start."""
    training = trainer(mode)
    said = ledger.versions() if dist.get_rank() != 2 else "fsdp_compiled 0123456789ab, torch 2.0"
    with patch.object(ledger, "versions", lambda: said):
        assert_all_refuse(
            training.step,
            "ranks run other versions: ranks 0, 1, 3: fsdp_compiled ",
            "; rank 2: fsdp_compiled 0123456789ab, torch 2.0; install one on all",
        )


class Products(nn.Module):
    """Layers that Inductor generates no code for, which would take long to compile."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _steps() -> list[float]:
    training = trainer("eager", Products())
    training = Trainer(training.model, torch.compile(training.model, fullgraph=True))
    return [training.step(number) for number in range(2)]


def _slow(self, graph):
    if not _slow.has_slept:
        _slow.has_slept = True
        time.sleep(_TIMEOUT_S + 2)
    _compile_as_ever(self, graph)


_slow.has_slept = False
_compile_as_ever = Agree.__call__


@on_ranks(2, timeout_s=_TIMEOUT_S)
def test_one_rank_hits_the_caches_and_another_compiles_longer_than_the_timeout():
    with torch._inductor.config.patch(force_disable_caches=False), tempfile.TemporaryDirectory() as warm:
        with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=warm):
            want = _steps()
        torch.compiler.reset()
        counters.clear()
        for each in ledger._ledgers.values():
            each.agreed.clear()  # as in a new process
        cache, is_cold = warm, dist.get_rank() == 1
        if is_cold:
            cache = f"{warm}/empty"
        agree = patch.object(Agree, "__call__", _slow if is_cold else _compile_as_ever)
        with agree, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache):
            assert _steps() == want
    found = counters["inductor"]
    assert (found["fxgraph_cache_miss"] > 0) == is_cold and (found["fxgraph_cache_hit"] > 0) != is_cold, found
    assert _slow.has_slept == is_cold
