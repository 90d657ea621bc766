"""What the backwards of compiled steps teach, where the user tells of sync between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from ..param.unit import UnitConfig


@dataclass
class Accumulation:
    """What the compiled backwards of one unit have done so far, in this step and those like it."""

    is_unsynced: bool = False  # the last backward was without sync
    reduces_late: bool = False  # a graph has reduced though sync was off in its backward: forward was told otherwise
    kept_between: bool = False  # the user has kept the unit unsharded between the backwards of a step

    def note_backward(self, config: UnitConfig, is_reduced: bool) -> None:
        """Note whether the graph of a backward has reduced gradients."""
        if not config.reduce_grads:
            self.kept_between |= not config.reshard_after_backward
            self.reduces_late |= is_reduced

    def end_backward(self, config: UnitConfig) -> None:
        """Note that a backward of the unit has ended, compiled or not, and was told by ``config`` whether to sync."""
        if config.reduce_grads and not self.is_unsynced:  # the step was of one backward
            self.reduces_late = self.kept_between = False
        self.is_unsynced = not config.reduce_grads
