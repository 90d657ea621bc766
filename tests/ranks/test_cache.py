"""Inductor's and AOTAutograd's caches: a second process compiles nothing and computes the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def _run(caches: Sequence[Path], **environment: Any) -> list[dict]:
    """Return what each rank, with a cache of its own or a shared one, says of its graphs without and with regions."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        **{name: json.dumps(value) for name, value in environment.items()},
    }
    program = [sys.executable, "-m", "tests.ranks.cache_program"]
    processes = [
        subprocess.Popen(program, env=env | own, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for rank, cache in enumerate(caches)
        if (own := {"RANK": str(rank), "TORCHINDUCTOR_CACHE_DIR": str(cache)})
    ]
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    found = [found for text in texts for found in json.loads(text.splitlines()[-1])]
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
    return folder, _run([folder / "shared"] * 2, SAVE=str(folder / "artifacts"))


def _assert_compiles_nothing(first: list[dict], again: list[dict]) -> None:
    for cold, warm in zip(first, again, strict=True):
        assert warm["losses"] == cold["losses"]
        assert not warm["autograd"].get("autograd_cache_miss"), warm
        _assert_hits_both(warm)


def test_a_second_process_hits_both_caches_on_both_ranks(first):
    folder, said = first
    for colds in (said[::2], said[1::2]):
        assert sum(cold["autograd"].get("autograd_cache_miss", 0) for cold in colds) >= 1
    _assert_compiles_nothing(said, _run([folder / "shared"] * 2))


def test_what_one_rank_compiled_is_loaded_on_others(first):
    """By ``load_cache_artifacts``, on machines whose cache folders are empty."""
    folder, said = first
    again = _run([folder / "one", folder / "other"], LOAD=str(folder / "artifacts"))
    _assert_compiles_nothing(said, again)


def test_a_restart_with_batches_of_other_lengths_hits_both_caches(tmp_path):
    """Also where one rank's cache is warm, with other lengths, and the other's is empty.

    With ``dynamic=True`` Dynamo looks into AOTAutograd's cache twice, since it begins anew for a float that varies.
    """
    _run([tmp_path / "0"] * 2, DYNAMIC=True, LENGTHS=[[128, 9], [512, 2000]])
    for warm in _run([tmp_path / "0"] * 2, DYNAMIC=True, LENGTHS=[[3000, 40], [100, 111]]):
        _assert_hits_both(warm)
    _run([tmp_path / "0", tmp_path / "1"], DYNAMIC=True, LENGTHS=[[700, 30], [2500, 7]])
