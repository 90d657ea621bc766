"""What optimizers keep and what their steps take, from what they update, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ..expect import shown, unexpected
from ..passes.cost import Cluster
from ..passes.cost.matrix_cost import newton_schulz_us, owners_us, rounds_bytes
from ..sharding.spec import Group


class Updated(NamedTuple):
    """What an optimizer updates."""

    parameters: int  # how many there are
    elements: int  # of all, unsharded
    matrices: tuple[tuple[int, int], ...] = ()  # shapes in units below the outermost one, those of a stack apart

    @property
    def matrix_elements(self) -> int:
        return sum(map(prod, self.matrices))


class Optimizer(NamedTuple):
    """What an optimizer keeps and does, as multiples of the parameters that it updates."""

    state: int  # tensors like each parameter that it keeps
    temporaries: int  # tensors that its step needs for a while, where it updates all parameters at a time
    traffic: float  # how often its step reads or writes a tensor like each parameter
    of_matrices: tuple[int, float] = (0, 0.0)  # state and traffic where owners update matrices; zeros: as others

    def _share(self, updated: Updated) -> float:
        """Return which part of the elements it updates by owners."""
        return updated.matrix_elements / max(1, updated.elements) if any(self.of_matrices) else 0.0

    def state_bytes(self, trained_bytes: int, updated: Updated) -> int:
        """Return what it keeps for shards of so many bytes."""
        share = self._share(updated)
        return int(trained_bytes * (share * self.of_matrices[0] + (1 - share) * self.state))

    def needed_bytes(self, reduced_bytes: int, updated: Updated, world: int) -> int:
        """Return what its step needs for a while, given the bytes of all gradients of a rank."""
        share = self._share(updated)
        others = int((1 - share) * self.temporaries * reduced_bytes)
        return max(others, rounds_bytes(updated.matrices, world) if share else 0)

    def step_us(
        self, cluster: Cluster, reduced_bytes: float, updated: Updated, ranks: Sequence[int] = (0,), shards: int = 1
    ) -> float:
        """Return the time of its step, elementwise on one gradient of equal size after the other.

        ``ranks`` hold the parameters in groups of ``shards``; matrices go to owners among them.
        """
        if not updated.parameters:
            return 0.0
        share = self._share(updated)
        traffic = share * self.of_matrices[1] + (1 - share) * self.traffic
        us = updated.parameters * cluster.memory_us(traffic * reduced_bytes / updated.parameters)
        if not share:
            return us
        costs = newton_schulz_us(updated.matrices, cluster)
        shared = {False, len(ranks) > shards}
        return us + min(
            owners_us(costs, updated.matrix_elements, ranks, shards, shares, cluster) for shares in shared
        )


def clipping_us(cluster: Cluster, reduced_bytes: float, parameters: int, sharding: Sequence[Group]) -> float:
    """Return the time of ``torch.nn.utils.clip_grad_norm_``, which reads gradients, then reads and writes them.

    *Source:* its operators in torch 2.13.0; the norm is all-reduced over each mesh dimension that shards.
    """
    if not parameters:
        return 0.0
    norm_us = sum(cluster.link(each.name, each.world).collective_us(4, each.world, passes=2) for each in sharding)
    return norm_us + parameters * cluster.memory_us(3 * reduced_bytes / parameters)


# *Source:* torch/optim of torch 2.13.0: the defaults of each class, implementation "foreach", its operators in turn.
# Of Muon: our step on fp32 shards; what is no matrix, and the outermost unit, is updated by AdamW.
OPTIMIZERS = {
    "adamw": Optimizer(2, 1, 20),
    "adam": Optimizer(2, 1, 18),
    "rmsprop": Optimizer(1, 1, 13),
    "sgd_momentum": Optimizer(1, 0, 8),
    "sgd": Optimizer(0, 0, 3),
    "muon": Optimizer(2, 1, 20, of_matrices=(1, 13.5)),
}


def check_optimizer(kind: str) -> None:
    """Raise ValueError unless there is an optimizer of this kind."""
    if kind not in list(OPTIMIZERS):  # a list, as not all that users give has a hash
        raise unexpected("optimizer", f"one of {', '.join(OPTIMIZERS)}", shown(kind))
