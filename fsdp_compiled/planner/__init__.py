"""Plans a training run: which mesh, batch and checkpointing is fastest on a number of ranks, and what fits.

``plan`` decides what to try on what ``trials`` captures of a model; ``training_plan`` holds and shows the result.
"""

from .plan import plan
from .training_plan import Layout, Option, TrainingPlan
from .trials import save_some

__all__ = ["Layout", "Option", "TrainingPlan", "plan", "save_some"]
