"""Errors about what users pass. Each says where, what was expected, what came instead, and what to do."""

from __future__ import annotations

from typing import Any


def expect(name: str, value: object, kind: Any, expected: str, do: str = "") -> None:
    """Raise TypeError unless ``value`` is of ``kind``, as isinstance tells, but that a bool is no number.

    ``kind`` is a class or a union of classes, which ``expected`` says in words; ``do`` is what the user can do.
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise unexpected(name, expected, shown(value), do, TypeError)


def expect_bool(name: str, value: object) -> None:
    """Raise TypeError, naming ``name``, unless ``value`` is a bool."""
    expect(name, value, bool, "True or False")


def unexpected(name: str, expected: str, got: object, do: str = "", error: type[Exception] = ValueError) -> Exception:
    """Return the error about ``name``, for the caller to raise."""
    return error(f"{name}: expected {expected}, got {got}" + (f"; {do}" if do else ""))


def shown(value: object) -> str:
    """Return a value and its class, or its class alone if the value's text is long."""
    text, cls = repr(value), type(value).__name__
    return f"{text} of {cls}" if len(text) <= 100 and "\n" not in text else cls
