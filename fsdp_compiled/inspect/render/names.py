"""How many names, of parameters or units, are written in little space."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

LISTED_WIDTH = 48  # characters that a list of names may take in a sentence


def abbreviate(names: Sequence[str], width: int) -> str:
    """Return at most ``width`` characters that tell which parameters these are.

    What all names begin and end with is written once: ``layers.3.{wq,wk,…,w2}.weight``. A list that is still too
    long keeps its beginning and its last name, then only ``layers.3.*.weight``, else its first name.
    """
    if len(names) < 2:
        return _elide("".join(names), width)
    before, varying, after = _factored(names)
    shorter = ([*varying[:kept], "…", varying[-1]] for kept in range(len(varying) - 2, 0, -1))
    texts = [",".join(shown) for shown in (varying, *shorter)]
    if before or after:
        texts = [f"{before}{{{text}}}{after}" for text in texts]
    if before:
        texts.append(f"{before}*{after}")
    fitting = (text for text in texts if len(text) <= width)
    return next(fitting, f"{_elide(names[0], width - 2)},…")


def _factored(names: Sequence[str]) -> tuple[str, list[str], str]:
    """Return what all names begin with, what differs, and what all end with, cut at dots."""
    parts = [name.split(".") for name in names]
    spare = min(map(len, parts)) - 1  # every name keeps a part of its own
    head = _shared([p[:spare] for p in parts])
    tail = _shared([p[head:][::-1][: spare - head] for p in parts])
    first = parts[0]
    before = "".join(f"{part}." for part in first[:head])
    after = "".join(f".{part}" for part in first[len(first) - tail :])
    return before, [".".join(p[head : len(p) - tail]) for p in parts], after


def _shared(lists: list[list[str]]) -> int:
    """Return how many first items all lists have in common."""
    return sum(1 for _ in takewhile(lambda items: len(set(items)) == 1, zip(*lists, strict=False)))


def _elide(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def counted(count: int, noun: str) -> str:
    """Return for example ``2 units``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(noun: str, names: Sequence[str]) -> str:
    """Return how many there are and, in little space, which: ``2 parameters, {up,down}.weight``."""
    return f"{counted(len(names), noun)}, {abbreviate(names, LISTED_WIDTH)}"
