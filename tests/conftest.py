from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest

from .ranks import close_pool


@pytest.fixture(scope="session", autouse=True)
def _rank_pool():
    yield
    close_pool()


@pytest.fixture
def fake_group():
    """A default process group of 4 ranks of which this process is rank 0; collectives return garbage."""
    import torch.distributed as dist

    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    dist.destroy_process_group()
