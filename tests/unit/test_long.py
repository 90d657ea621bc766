"""The tests that run for minutes, in tests/long, find what they import."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

LONG = sorted(path.stem for path in (Path(__file__).parents[1] / "long").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", LONG)
def test_is_importable(name):
    assert LONG and any(attribute.startswith("test_") for attribute in vars(import_module(f"tests.long.{name}")))
