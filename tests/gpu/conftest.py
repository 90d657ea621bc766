"""Tests that need a GPU; without one they are skipped."""

import pytest
import torch
import torch.distributed as dist


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def many_ranks(monkeypatch):
    """Rank 0 of 8 that are not there: every rank's shard is rank 0's, and reductions do nothing."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    dist.init_process_group("fake", rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_rank(tmp_path):
    """NCCL with one rank."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
