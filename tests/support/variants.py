"""Tests that vary what others show: a run of the entire suite leaves them out, unless it is given ``--thorough``.

    @thorough(when=lambda name, mode: mode == "full" and name != "llama")
    def test_something(name, mode): ...

A run of some files has all of their tests.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import pytest


def thorough(when: Callable[..., bool] = lambda: True) -> pytest.MarkDecorator:
    """Mark a test with those parameters, taken by their names, for which ``when`` is true."""
    return pytest.mark.thorough(when=when)


def is_variant(item: pytest.Item) -> bool:
    """Tell whether a test is marked for its parameters."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    whens = [mark.kwargs["when"] for mark in item.iter_markers("thorough")]
    return any(when(**{name: params[name] for name in signature(when).parameters}) for when in whens)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take variants out of what a run has collected, if it is one of the entire suite without ``--thorough``."""
    if asks_for_everything(config) and not config.getoption("--thorough"):
        items[:] = [item for item in items if not is_variant(item)]


def asks_for_everything(config: pytest.Config) -> bool:
    """Tell whether a run is one of the entire suite."""
    tests = config.rootpath / "tests"
    folders = [(config.invocation_params.dir / arg).resolve() for arg in config.args]
    asked = any(tests.is_relative_to(folder) for folder in folders)
    left_out = ("ignore", "ignore_glob", "keyword", "markexpr", "deselect")
    return asked and not any(map(config.getoption, left_out))
