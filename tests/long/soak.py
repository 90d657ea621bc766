"""Trains for long on 2 gloo ranks and fails if a rank's memory or anything else grows; the suite does not run it.

    python -m pytest tests/long/soak.py [--seconds 120]

Prints what each rank held at its first and last sample.
"""

from __future__ import annotations

import functools
import json
from datetime import timedelta

import pytest

from fsdp_compiled.testing.processes import Setting
from tests.support.measures import Sample, growing, table
from tests.support.ranks import pool
from tests.support.soaking import LAYERS, train_for_long, train_many
from tests.support.training import MODES

SETTING = Setting(group_timeout=timedelta(seconds=90), test_timeout_s=600)
STEPS, MODELS = 300, 50
RANKS = 2
PER_STEP = {"rss_kib": 8.0}
# torch keeps a wrapper, its attributes and part of a context for every call of torch.compile, of unsharded models too
KEPT_OBJECTS = {"eager": 1, "regional": 4 * LAYERS, "full": 4}
each_mode = pytest.mark.parametrize("mode", MODES)


@each_mode
def test_300_steps_some_of_which_fail(mode, run):
    run(train_for_long, mode, STEPS, PER_STEP, part=0.25)


@each_mode
def test_50_models_of_one_class(mode, run):
    run(train_many, mode, MODELS, {"rss_kib": 64.0, "objects": KEPT_OBJECTS[mode]}, part=0.08)


@pytest.fixture
def run(request, pytestconfig, capsys, tmp_path):
    """Run a body on the ranks, show what they held, and fail if any of it grows."""

    def on_ranks(body, mode, most, allowed, part):
        seconds = pytestconfig.getoption("seconds") * part
        path = str(tmp_path / "samples")
        pool().run(RANKS, functools.partial(body, mode, most, seconds, path), SETTING)
        lines = [(tmp_path / f"samples.{rank}").read_text().splitlines() for rank in range(RANKS)]
        found = [[Sample(**json.loads(line)) for line in each] for each in lines]
        with capsys.disabled():
            print(f"\n{request.node.name}")
            print(table([(f"rank {rank}", samples) for rank, samples in enumerate(found)]))
        grown = [f"rank {rank}: {each}" for rank, samples in enumerate(found) for each in growing(samples, allowed)]
        assert not grown, "\n".join(grown)

    return on_ranks
