"""Twelve drawn pairs of lengths on real ranks, through code generation.

python -m pytest tests/long/lengths.py
"""

from __future__ import annotations

import pytest

from tests.support.drawn_training import RUN_ON_4, draw_lengths, train_lengths
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("number", [number for number in range(12) if number not in RUN_ON_4])
@on_ranks(2, timeout_s=300)
def test_drawn_lengths(number):
    train_lengths(draw_lengths(number))


@pytest.mark.parametrize("number", RUN_ON_4)
@on_ranks(4, timeout_s=300)
def test_drawn_lengths_of_4_ranks(number):
    train_lengths(draw_lengths(number))
