"""Finds and calls the function that ``MODULE:BUILD`` names on the command line.

It reports mistakes in the command in one line (``UsageError``); errors in the user's code keep their traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..hooks.context import states_below


class UsageError(Exception):
    """A mistake in the command or in what BUILD returns; it is reported in one line, without a traceback."""


@dataclass(frozen=True)
class Built:
    """What BUILD returned: a sharded model, and the arguments of its forward."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def find(target: str) -> Callable[[], Any]:
    """Import MODULE and return BUILD. The working directory, and a file's folder, come first on ``sys.path``.

    Args:
        target: a dotted module or a path to a .py file, a colon, and the name of a function without arguments.

    Raises:
        UsageError: there is no such module, or no such function in it.
    """
    name, _, attribute = target.rpartition(":")
    if not name or not attribute:
        raise UsageError(f"expected MODULE:BUILD, got {target!r}; write for example train.py:build")
    sys.path.insert(0, str(Path.cwd()))
    module = _from_file(Path(name)) if name.endswith(".py") else _from_path(name)
    found = getattr(module, attribute, None)
    if not callable(found):
        here = [
            key for key, value in vars(module).items() if isfunction(value) and value.__module__ == module.__name__
        ]
        raise UsageError(
            f"{name}: expected a function {attribute!r}, found none; it defines {', '.join(here) or 'none'}"
        )
    try:
        signature(found).bind()
    except TypeError as error:
        raise UsageError(
            f"{target}: expected a function that can be called without arguments, got {attribute}{signature(found)}"
        ) from error
    return found


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{path}: found no such file in {Path.cwd()}")
    name = path.stem if path.stem not in sys.modules else f"inspected_{path.stem}"
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: expected a file that Python can import")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
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
        raise UsageError(
            f"{name}: found no module {error.name!r} in {Path.cwd()} nor among installed ones"
        ) from error


def build(target: str, function: Callable[[], Any]) -> Built:
    """Call BUILD and check what it returns.

    Raises:
        UsageError: it is no sharded model with example inputs.
    """
    result = function()
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else _named(result)
        raise UsageError(f"{target}: expected it to return (model, args) or (model, args, kwargs), got {got}")
    model, args, kwargs = (*result, {})[:3]
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target}: expected an nn.Module as the first result, got {_named(model)}")
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"{target}: expected a tuple of inputs as the second result, got {_named(args)}; write (x,)")
    _check_keywords(target, kwargs)
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if not states_below([model]):
        raise UsageError(
            f"{target}: expected a sharded model, got {_named(model)} without any unit; call fully_shard on its "
            "layers and then on the model"
        )
    return Built(model, args, kwargs)


def _check_keywords(target: str, kwargs: object) -> None:
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise UsageError(f"{target}: expected a dict of keyword inputs as the third result, got {_named(kwargs)}")
    for key in ("loss", "schedule"):
        if key in kwargs:
            raise UsageError(f"{target}: the input {key!r} cannot be given by keyword here; give it by position")


def _named(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
