"""Looking at the graphs of a sharded model: what is gathered and reduced, when, and what that costs."""

from .capture import capture
from .explain import Explanation, UnitExplanation, explain
from .records import CapturedGraph, Collective, ComputeSpan, MemoryStep
from .report import Capture

__all__ = [
    "Capture",
    "CapturedGraph",
    "Collective",
    "ComputeSpan",
    "Explanation",
    "MemoryStep",
    "UnitExplanation",
    "capture",
    "explain",
]
