from __future__ import annotations

import gc
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # after each test suffices
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # see RankProcesses

import pytest

from fsdp_compiled.testing.processes import GC_THRESHOLDS

from .support.parity_plugin import ParityPlugin
from .support.ranks import DEVICE, close_pool
from .support.spared import HEADERS
from .support.variants import leave_out

if HEADERS not in os.environ:  # as in a worker's process
    _headers = tempfile.TemporaryDirectory(prefix="headers-")
    os.environ[HEADERS] = _headers.name


def pytest_addoption(parser):
    parser.addoption("--inductor", action="store_true", help="generate code for every compiled model; takes long")
    parser.addoption("--device", help="where the ranks of a test compute, all on one GPU: cuda; they talk by gloo")
    parser.addoption("--thorough", action="store_true", help="also tests that vary what others show")
    parser.addoption("--write-parity", action="store_true", help="write tests/PARITY.md from this run's results")
    parser.addoption("--seconds", type=float, default=120, help="of tests/long/soak.py or tests/long/fuzz.py")
    parser.addoption("--seed", type=int, default=0, help="of the first models that tests/long/fuzz.py draws")
    parser.addoption("--case", help="the one model for tests/long/fuzz.py to train")


def pytest_configure(config):
    config.addinivalue_line("markers", "row(*names, mode=None): features that the test shows to work, see parity.py")
    config.addinivalue_line("markers", "thorough(when): left out of runs of the entire suite, see variants.py")
    if config.getoption("--inductor"):
        from .support.training import INDUCTOR

        os.environ[INDUCTOR] = "1"
    if device := config.getoption("--device"):
        os.environ[DEVICE] = device
    # files in order: by default those with few tests, which take the longest, would come last, on one worker
    config.option.loadscopereorder = False
    config.pluginmanager.register(ParityPlugin(config))


def pytest_collection_modifyitems(config, items):
    leave_out(config, items)


@pytest.fixture(scope="session", autouse=True)
def _rank_pool():
    gc.set_threshold(*GC_THRESHOLDS)
    gc.freeze()  # what was imported until now
    yield
    close_pool()


@pytest.fixture
def nothing_older():
    """Let the collector, and who asks it for objects, see only what the test makes: far fewer objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fake_group():
    """A default process group of 4 ranks of which this process is rank 0; collectives return garbage."""
    import torch.distributed as dist

    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    dist.destroy_process_group()
