"""Draws models, regions and schedules until the time is up; the suite does not run it.

    python -m pytest tests/long/fuzz.py [--seconds 120] [--seed 0] [-k models]

One process draws and simplifies what fails; 2 gloo ranks train each drawn model, compared with one process.
"""

from __future__ import annotations

import functools
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from fsdp_compiled.testing import RankProcesses
from fsdp_compiled.testing.processes import Setting
from tests.support.drawn import CASES, parse
from tests.support.drawn_lengths import RANKS, Compared
from tests.support.drawn_regions import calls, check_calls, check_differences, check_program, differences, programs
from tests.support.drawn_training import train_drawn
from tests.unit.passes.test_buckets import PASSES_POLICIES, chains, check_graph
from tests.unit.passes.test_placing import PREFETCHES, ROOMS, check_schedule, loads

WORLD = 2
SETTING = Setting(group_timeout=timedelta(seconds=120), test_timeout_s=600)  # with --inductor a case takes a minute
SIMPLIFYING_S = 90.0  # beyond the time that is given
ROUND = settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@dataclass
class Search:
    """Draws values until one fails ``check``, or until the time is up; then looks for a simpler one that fails."""

    strategy: st.SearchStrategy[Any]
    check: Callable[[Any], None]  # raises where a value fails
    end: float
    tried: dict[str, str] = field(default_factory=dict)  # each value as text, and how it failed or ""

    def first_failure(self, seeds: range | count[int]) -> tuple[int, Any] | None:
        """Return the seed and the simplest value that fails, or None."""
        for seed in seeds:
            try:
                return seed, find(self.strategy, self._fails, settings=ROUND, random=random.Random(seed))
            except NoSuchExample:
                if time.monotonic() > self.end:
                    return None
        return None

    def _fails(self, value: Any) -> bool:
        text = repr(value)
        if text not in self.tried and time.monotonic() < self.end:
            try:
                self.check(value)
                self.tried[text] = ""
            except Exception as error:
                if not any(self.tried.values()):
                    self.end = time.monotonic() + SIMPLIFYING_S
                own = isinstance(error, AssertionError) and str(error).startswith("--- rank")
                self.tried[text] = str(error) if own else traceback.format_exc()
        return bool(self.tried.get(text))


@pytest.fixture
def search(request, pytestconfig, capsys):
    """Run a search for its part of the given time, say how many values were drawn, and fail if one failed."""

    def run(strategy, check, part):
        seconds, seed = pytestconfig.getoption("seconds"), pytestconfig.getoption("seed")
        found = Search(strategy, check, time.monotonic() + part * seconds)
        failure = found.first_failure(count(seed))
        if failure is None:
            with capsys.disabled():
                print(f"\n{request.node.name}: {len(found.tried)} drawn, none failed")
            return
        seed, value = failure
        pytest.fail(
            f"{found.tried[repr(value)]}\n{len(found.tried)} drawn, this failed: {value}\n"
            f"Again: python -m pytest tests/long/fuzz.py -k {request.node.name} --seed {seed}\n"
            f'A model alone: python -m pytest tests/long/fuzz.py -k models --case "{value}"',
            pytrace=False,
        )

    return run


class _Ranks:
    """Trains cases on ranks that are started anew after one has died or hung."""

    def __init__(self) -> None:
        self.pool = RankProcesses(WORLD)

    def train(self, case):
        self.run(train_drawn, case)

    def run(self, check, drawn):
        if not self.pool.alive:
            self.pool = RankProcesses(WORLD)
        self.pool.run(WORLD, functools.partial(check, drawn), SETTING)


@pytest.fixture
def ranks():
    ranks = _Ranks()
    yield ranks
    ranks.pool.close()


def test_models(search, ranks, pytestconfig):
    case = pytestconfig.getoption("case")
    if case:
        ranks.train(parse(case))
    else:
        search(CASES, ranks.train, part=0.4)


def test_regions(search):
    search(programs(), lambda drawn: check_program(*drawn), part=0.1)


def test_calls_of_regions(search, ranks):
    search(calls(), functools.partial(ranks.run, check_calls), part=0.1)


def test_differences_of_regions(search, ranks):
    search(differences(), functools.partial(ranks.run, check_differences), part=0.1)


def test_schedules(search):
    search(st.tuples(loads(), ROOMS, PREFETCHES), lambda drawn: check_schedule(*drawn), part=0.1)


def test_graphs(search):
    search(st.tuples(chains(), PASSES_POLICIES, st.floats(0, 1)), lambda drawn: check_graph(*drawn), part=0.1)


def test_lengths(search, capsys):
    compared = Compared()
    search(RANKS, compared.check, part=0.1)
    with capsys.disabled():
        print(compared)
