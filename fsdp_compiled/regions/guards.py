"""When torch may reuse the trace of an equal block, and the guards of a block for which it has.

Torch compares such a block with the one that it traced, but its arguments in part only; so a text that describes the
call is compared, too. And it installs no guards for the block: what changes in it later, such as its training mode,
would go unnoticed. So what was compared is guarded here. It knows a block and its traces only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from ..tracing.dynamo import guard_like, known_internals, reused_traces


class ReuseRefusedError(RuntimeError):
    """No trace of an equal block fits: each block must be traced by itself."""


def guard_as(code: CodeType) -> Callable[[Any], None]:
    """Return what ``comptime`` is to call after a region of the caller's ``self``; ``code`` is the region's.

    It raises ReuseRefusedError if torch has traces of equal blocks and none fits.
    """

    def guard(context: Any) -> None:
        with known_internals("guard a block for which the trace of an equal one is reused"):
            traces = reused_traces(context, code)
            fits = [guard_like(context, condition, trace) for condition, trace in traces]
        if traces and not any(fits):
            raise ReuseRefusedError("no trace fits the block")

    return guard


def refused_reuse(error: BaseException | None) -> bool:
    """Tell whether an error of Dynamo's comes from ReuseRefusedError; Dynamo raises errors of its own instead."""
    while error is not None and not isinstance(error, ReuseRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None
