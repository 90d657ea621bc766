"""Inductor's and AOTAutograd's caches: a second process compiles nothing and computes the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def _run(cache: Path) -> list[dict]:
    """Return what each rank says of its graphs without regions, and then with them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    program = [sys.executable, "-m", "tests.dist.cache_program"]
    processes = [
        subprocess.Popen(program, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [found for text in texts for found in json.loads(text.splitlines()[-1])]


def test_a_second_process_hits_both_caches_on_both_ranks(tmp_path):
    first, second = _run(tmp_path), _run(tmp_path)
    for cold, warm in zip(first, second, strict=True):
        assert warm["losses"] == cold["losses"]
        # torch 2.11 caches these graphs too: their inputs are plain tensors, not DTensors
        assert warm["autograd"].get("autograd_cache_hit") == 1, warm
        assert not warm["autograd"].get("autograd_cache_miss"), warm
        assert not warm["autograd"].get("autograd_cache_bypass"), warm
        assert warm["fx"].get("fxgraph_cache_hit", 0) >= 1, warm
        assert not warm["fx"].get("fxgraph_cache_miss"), warm
    for colds in (first[::2], first[1::2]):
        assert sum(cold["autograd"].get("autograd_cache_miss", 0) for cold in colds) >= 1
    assert first[0]["losses"] == pytest.approx(first[1]["losses"], rel=1e-6)
    assert torch.tensor(first[0]["losses"]).isfinite().all()
