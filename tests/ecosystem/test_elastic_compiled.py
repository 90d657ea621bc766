"""A rank of one compiled graph is killed under torchrun; restarted ranks find the graph in the compile caches."""

from __future__ import annotations

from tests.support.killing import EVERY, Training

STEPS = 40


def test_a_killed_rank_of_a_compiled_graph(tmp_path):
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
