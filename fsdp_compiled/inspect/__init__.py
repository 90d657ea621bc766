"""Inspects the graphs and units of a sharded model: its collectives, when they run and what they cost.

``capture`` and ``explain`` read a model into ``records``; ``report`` prints and saves them through ``render``.
"""

from .capture import capture
from .explain import explain
from .lifetimes import Allocation
from .memory import MemoryLevel, StepMemory
from .optimizer_cost import OPTIMIZERS
from .records import CapturedGraph, Collective, ComputeSpan, Kernel, MemoryStep, Region, UnitExplanation
from .report import Capture, Explanation

__all__ = [
    "OPTIMIZERS",
    "Allocation",
    "Capture",
    "CapturedGraph",
    "Collective",
    "ComputeSpan",
    "Explanation",
    "Kernel",
    "MemoryLevel",
    "MemoryStep",
    "Region",
    "StepMemory",
    "UnitExplanation",
    "capture",
    "explain",
]
