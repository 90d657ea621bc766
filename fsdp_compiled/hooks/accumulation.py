"""What the backwards of compiled steps teach of how a unit accumulates: what graphs leave to backward's end.

It knows one unit's settings and what its backwards have left; it must not know parameters nor gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..param.unit import UnitConfig


@dataclass
class Accumulation:
    """What the compiled backwards of one unit have done so far, in this step and those like it."""

    backwards: int = 0  # since gradients were reduced
    is_partial: bool = False  # the last one left gradients that are reduced over the shards only
    is_unsynced: bool = False  # the last one was without sync
    reduces_late: bool = False  # a graph has reduced though sync was off in its backward: forward was told otherwise
    kept_between: bool = False  # the user has kept the unit unsharded between the backwards of a step

    def note_backward(self, config: UnitConfig, is_reduced: bool, is_left: bool, is_partial: bool) -> None:
        """Note whether the graph has reduced, and which sums are left: not reduced, and over the shards only."""
        self.backwards = self.backwards + 1 if is_left else 0
        self.is_partial = is_partial
        if not config.reduce_grads:
            self.kept_between |= not config.reshard_after_backward
            self.reduces_late |= is_reduced

    def end_backward(self, config: UnitConfig) -> None:
        """Note that a backward of the unit has ended, compiled or not, and was told by ``config`` whether to sync."""
        if config.reduce_grads and not self.is_unsynced:  # the step was of one backward
            self.reduces_late = self.kept_between = False
        self.is_unsynced = not config.reduce_grads

    @property
    def reduces_in_hooks(self) -> bool:
        """Whether graphs leave gradients unsharded, since hooks will reduce what is left anyway.

        After two backwards: adding the third gradient to the sums takes no more memory than the second took.
        """
        return self.reduces_late or self.backwards > 1

    @property
    def all_reduces_in_hooks(self) -> bool:
        """Whether graphs reduce over the shards only, since hooks will reduce what is left over replicas anyway."""
        return self.is_partial
