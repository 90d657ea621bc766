"""Pure arithmetic of sharding: chunks, padding, offsets. It knows neither process groups nor modules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True)
class ShardLayout:
    """How one tensor is cut along one dimension into equal, padded chunks.

    Rank ``r`` owns ``[r * chunk, (r + 1) * chunk)`` of the dimension as far as it exists, which is how
    ``torch.chunk`` and DTensor's ``Shard`` cut; the last ranks may own less, or nothing. Every rank stores a
    whole chunk, so that all ranks trace the same graph.

    Args:
        shape: of the whole tensor.
        dim: the sharded dimension, not negative.
        world: the number of ranks.
    """

    shape: tuple[int, ...]
    dim: int
    world: int

    @cached_property
    def chunk(self) -> int:
        """Length of one padded chunk along ``dim``."""
        return -(-self.shape[self.dim] // self.world)

    @cached_property
    def is_even(self) -> bool:
        """Whether no rank has padding."""
        return self.chunk * self.world == self.shape[self.dim]

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one padded chunk, the same on every rank."""
        return (*self.shape[: self.dim], self.chunk, *self.shape[self.dim + 1 :])

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one padded chunk."""
        return prod(self.shard_shape)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    def offset(self, rank: int) -> int:
        """First index along ``dim`` that ``rank`` owns, clipped to the dimension."""
        return min(rank * self.chunk, self.shape[self.dim])

    def length(self, rank: int) -> int:
        """Number of indices along ``dim`` that ``rank`` owns; 0 for an empty shard."""
        return self.offset(rank + 1) - self.offset(rank)
