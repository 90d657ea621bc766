"""Errors about what users pass or have. Each says where, what was expected, what came instead, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def expect(name: str, value: object, kind: Any, expected: str, do: str = "") -> None:
    """Raise TypeError unless ``value`` is of ``kind``, as isinstance tells, but that a bool is no number.

    ``kind`` is a class or a union of classes, which ``expected`` says in words; ``do`` is what the user can do.
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise unexpected(name, expected, shown(value), do, TypeError)


def expect_bool(name: str, value: object) -> None:
    """Raise TypeError, naming ``name``, unless ``value`` is a bool."""
    expect(name, value, bool, "True or False")


def model_and_inputs(name: str, result: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a model and the inputs of its forward, which a user's function ``name`` has returned."""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        expected = "a tuple (model, args) or (model, args, kwargs) to be returned"
        raise unexpected(name, expected, shown(result), error=TypeError)
    model, args, kwargs = (*result, {})[:3]
    expect(name, model, nn.Module, "an nn.Module as the first result")
    expect(name, args, tuple | list, "a tuple of inputs as the second result", "write (x,)")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise unexpected(name, "a dict of keyword inputs as the third result", shown(kwargs), error=TypeError)
    return model, tuple(args), dict(kwargs)


def unexpected(name: str, expected: str, got: object, do: str = "", error: type[Exception] = ValueError) -> Exception:
    """Return the error about ``name``, for the caller to raise."""
    return error(f"{name}: expected {expected}, got {got}" + (f"; {do}" if do else ""))


def shown(value: object) -> str:
    """Return a value and its class, or its class alone if the value's text is long."""
    text, cls = repr(value), type(value).__name__
    return f"{text} of {cls}" if len(text) <= 100 and "\n" not in text else cls


@contextmanager
def known_internals(what: str) -> Iterator[None]:
    """Raise RuntimeError where Dynamo lacks a name that the block or function reads, and say what cannot be done."""
    try:
        yield
    except AttributeError as error:
        raise RuntimeError(
            f"torch {torch.__version__}: expected Dynamo's internals to be those of torch 2.11 to 2.15, without "
            f"which fsdp_compiled cannot {what}, got {type(error).__name__}: {error}; install a supported torch"
        ) from error
