"""Kills ranks of a compiled training under torchrun, ten in a row, at drawn moments: in training, and as they start.

    python -m pytest tests/long/kills.py [--seed 0]

Prints how far each restart came, what it lost and how long each part took.
"""

from __future__ import annotations

import random
import time

from tests.support.killing import EVERY, Training

KILLS = 10
STEPS = 400


def test_ten_kills_in_a_row(pytestconfig, capsys, tmp_path):
    drawn = random.Random(pytestconfig.getoption("seed"))
    whole, training = (Training(tmp_path / name, tmp_path / "cache") for name in ("whole", "killed"))
    whole.run("--steps", STEPS)
    killed = 0
    with training.start("--steps", STEPS, restarts=KILLS) as started:
        while killed < KILLS:
            if drawn.random() < 0.5 and killed < KILLS - 1:  # a rank that starts, loads or compiles
                time.sleep(drawn.uniform(0, 8))
                started.kill(drawn.randrange(2), world=2)
                time.sleep(1)
                killed += 1
            else:
                time.sleep(drawn.uniform(0, 2))
            restart = training.kill(started, drawn.randrange(2))
            killed += 1
            with capsys.disabled():
                parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in restart["seconds"].items())
                print(f"\n{killed} kills; from step {restart['resumed']}, {restart['lost']} lost; {parts}", end="")
        started.finish()
    training.assert_losses_are_those_of(whole, range(1, STEPS + 1))
    assert training.saved() == [STEPS - EVERY, STEPS]
