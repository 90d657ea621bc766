"""Finds and calls the function that ``MODULE:BUILD`` names on the command line.

It reports mistakes in the command in one line (``UsageError``); errors in the user's code keep their traceback.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..expect import model_and_inputs
from ..hooks.state import states_of
from ..inspect import capture
from ..tracing.dynamo import module_inside


class UsageError(Exception):
    """A mistake in the command or in what BUILD returns; it is reported in one line, without a traceback."""


def find(target: str, *args: int) -> Callable[..., Any]:
    """Import MODULE, a dotted name or a path to a .py file, and return BUILD, a function that takes ``args``.

    The working directory, and a file's folder, come first on ``sys.path``.
    """
    name, _, attribute = target.rpartition(":")
    if not name or not attribute:
        raise UsageError(f"expected MODULE:BUILD, got {target!r}; write for example train.py:build")
    sys.path.insert(0, str(Path.cwd()))
    module = _from_file(Path(name)) if name.endswith(".py") else _from_path(name)
    found = getattr(module, attribute, None)
    if not callable(found):
        functions = filter(isfunction, vars(module).values())
        own = [function.__name__ for function in functions if function.__module__ == module.__name__]
        advice = f"it defines {', '.join(own) or 'none'}"
        raise UsageError(f"{name}: expected a function {attribute!r}, found none; {advice}")
    try:
        signature(found).bind(*args)
    except TypeError as error:
        got = f"{attribute}{signature(found)}"
        how = "with the number of sequences" if args else "without arguments"
        raise UsageError(f"{target}: expected a function that can be called {how}, got {got}") from error
    return found


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{path}: found no such file in {Path.cwd()}")
    name = path.stem if path.stem not in sys.modules else f"inspected_{path.stem}"
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # where dataclasses find a class's module
    spec.loader.exec_module(module)
    return module


def _from_path(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"expected a dotted module or a path to a .py file before the colon, got {name!r}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but a module that it imports does not
        place = f"in {Path.cwd()} nor among installed ones"
        raise UsageError(f"{name}: found no module {error.name!r} {place}") from error


def build(target: str, function: Callable[[], Any]) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """Call BUILD and return its results: a sharded model, and the positional and keyword arguments of its forward."""
    result = function()
    try:
        model, args, kwargs = model_and_inputs("BUILD", result)
        model = module_inside(model)
        states_of(model)  # or it is not sharded
    except (TypeError, ValueError) as error:
        raise UsageError(f"{target}: {error}") from error
    if taken := set(kwargs) & signature(capture).parameters.keys() - {"args", "kwargs"}:
        raise UsageError(f"{target}: the input {min(taken)!r} cannot be given by keyword here; give it by position")
    return model, args, kwargs
