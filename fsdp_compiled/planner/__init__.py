"""Plans a training run: which mesh, batch and checkpointing is fastest on a number of ranks, and what fits.

``plan`` tries what ``options`` lists, on what ``trials`` captures of a model; ``training_plan`` shows the result.
"""

from .options import Layout, Option
from .plan import plan
from .training_plan import TrainingPlan
from .trials import save_some

__all__ = ["Layout", "Option", "TrainingPlan", "plan", "save_some"]
