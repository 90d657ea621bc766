"""examples/train/elastic.py under torchrun: ranks are killed, and training goes on as if nothing had happened.

tests/long/kills.py kills many in a row.
"""

from __future__ import annotations

import random
import time

from tests.support.killing import EVERY, Training

STEPS = 40
EAGER = ("--mode", "eager")


def test_killed_ranks(tmp_path):
    drawn = random.Random(seed := random.randrange(1000))
    print(f"seed {seed}")
    whole, training = (Training(tmp_path / name, tmp_path / "cache") for name in ("whole", "killed"))
    whole.run("--steps", STEPS + 2 * EVERY, *EAGER)
    with training.start("--steps", STEPS, *EAGER, restarts=2) as started:
        started.until(training.saved, "checkpoint")
        started.until(training.is_writing, "checkpoint that is being written")
        training.kill(started, rank=0)
        time.sleep(drawn.uniform(0, 0.3))
        training.kill(started, rank=drawn.randrange(2))
        started.finish()
    training.assert_losses_are_those_of(whole, range(1, STEPS + 1))
    assert training.saved() == [STEPS - EVERY, STEPS]

    broken = training.folder / f"step_{STEPS + EVERY}"
    broken.mkdir()
    for name in ("__0_0.distcp", ".metadata.tmp"):
        (broken / name).write_bytes(b"half")
    for end, options in ((STEPS + EVERY, ()), (STEPS + 2 * EVERY, ("--fsdp2",))):
        training.run("--steps", end, *EAGER, *options, ranks=1)
        restart = training.records("resumed")[-1]
        assert (restart["resumed"], restart["lost"], restart["ranks"]) == (end - EVERY, 0, 1)
        assert training.saved() == [end - EVERY, end]
    training.assert_losses_are_those_of(whole, range(1, STEPS + 2 * EVERY + 1), rel=1e-4)


def test_a_killed_rank_of_a_compiled_graph(tmp_path):
    """Restarted ranks find the graph in the compile caches."""
    whole, training = (Training(tmp_path / name, tmp_path / "cache") for name in ("whole", "killed"))
    whole.run("--steps", STEPS)
    generated = set(whole.cache.rglob("*.so"))
    assert generated
    with training.start("--steps", STEPS, restarts=1) as started:
        started.until(training.saved, "checkpoint")
        training.kill(started, rank=1)
        started.finish()
    assert set(whole.cache.rglob("*.so")) == generated
    training.assert_losses_are_those_of(whole, range(1, STEPS + 1))
    assert training.saved() == [STEPS - EVERY, STEPS]
