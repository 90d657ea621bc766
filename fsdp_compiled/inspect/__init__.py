"""Inspects the graphs and units of a sharded model: its collectives, when they run and what they cost.

``capture`` reads a model into ``records``, which ``report`` prints and saves through ``render``; ``explain`` and
``comparison`` hold records that print themselves.
"""

from .capture import capture as capture
from .explain import Explanation as Explanation
from .explain import UnitExplanation as UnitExplanation
from .explain import explain as explain
from .lifetimes import Allocation as Allocation
from .memory import MemoryLevel as MemoryLevel
from .memory import StepMemory as StepMemory
from .optimizer_cost import OPTIMIZERS as OPTIMIZERS
from .records import CapturedGraph as CapturedGraph
from .records import Collective as Collective
from .records import ComputeSpan as ComputeSpan
from .records import Kernel as Kernel
from .records import MemoryStep as MemoryStep
from .records import Region as Region
from .report import Capture as Capture
