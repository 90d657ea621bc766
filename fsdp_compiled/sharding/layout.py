"""The arithmetic of shards and of packed buffers: chunks, padding, alignment, offsets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from math import prod
from operator import add

import torch
from torch import Tensor

Split = Callable[..., Sequence[Tensor]]  # as torch.split_with_sizes, or one that copies


@dataclass(frozen=True)
class ShardLayout:
    """How one tensor is cut along one dimension into equal, padded chunks.

    Rank ``r`` owns ``[r * chunk, (r + 1) * chunk)`` of the dimension as far as it exists, as ``torch.chunk`` and
    DTensor's ``Shard`` cut. Every rank stores a full chunk, so that all ranks trace the same graph.
    A scalar is cut among one rank only, of which it is the one chunk.
    """

    shape: tuple[int, ...]  # of the unsharded tensor
    dim: int  # the sharded dimension, not negative
    world: int  # the number of ranks

    @cached_property
    def _extent(self) -> int:
        return self.shape[self.dim] if self.shape else 1

    @cached_property
    def chunk(self) -> int:
        """Length of one padded chunk along ``dim``."""
        return -(-self._extent // self.world)

    @cached_property
    def is_even(self) -> bool:
        """Whether no rank has padding."""
        return self.chunk * self.world == self._extent

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one padded chunk, the same on every rank."""
        return self._of_length(self.chunk)

    @cached_property
    def shard_numel(self) -> int:
        return prod(self.shard_shape)

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of all chunks together, padding included."""
        return self._of_length(self.chunk * self.world)

    def _of_length(self, length: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]) if self.shape else ()

    @cached_property
    def padded_numel(self) -> int:
        """Elements of all chunks together, padding included."""
        return self.shard_numel * self.world

    def padded_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all chunks together in ``dtype``, padding included."""
        return self.padded_numel * dtype.itemsize

    @cached_property
    def like_shard(self) -> Tensor:
        """A padded chunk without memory, from which torch's loops in C++ read the shape."""
        return torch.empty(self.shard_shape, device="meta")

    @cached_property
    def like_padded(self) -> Tensor:
        """All chunks together, as :attr:`like_shard`."""
        return torch.empty(self.padded_shape, device="meta")

    def offset(self, rank: int) -> int:
        """First index along ``dim`` that ``rank`` owns, clipped to the dimension."""
        return min(rank * self.chunk, self._extent)

    def length(self, rank: int) -> int:
        """Number of indices along ``dim`` that ``rank`` owns; 0 for an empty shard."""
        return self.offset(rank + 1) - self.offset(rank)


# The same object for the same arguments: copies ask for it in every step.
shard_layout = lru_cache(maxsize=4096)(ShardLayout)

ALIGNMENT = 16  # elements; in every dtype a multiple of the 16 bytes that a GPU thread and Inductor ask for


@dataclass(frozen=True)
class PackedLayout:
    """Where one rank's shards lie in the packed buffer of a bucket.

    Each begins at a multiple of :data:`ALIGNMENT` elements, so that every copy is wide and every result aligned.
    """

    numels: tuple[int, ...]  # elements of each shard

    @cached_property
    def numel(self) -> int:
        """Elements that one rank contributes, gaps included."""
        return sum(self.numels) + sum(self.gaps)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return tuple(accumulate(map(add, self.numels[:-1], self.gaps), initial=0))

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """Elements of zeros behind each shard; none behind one alone."""
        return (0,) if len(self.numels) == 1 else tuple(-numel % ALIGNMENT for numel in self.numels)

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        """Of each shard, and of the gap behind each if there are any."""
        return tuple(chain(*zip(self.numels, self.gaps, strict=True))) if any(self.gaps) else self.numels

    def parts(self, packed: Tensor, split: Split = torch.split_with_sizes) -> tuple[list[Tensor], list[Tensor]]:
        """Return a packed buffer's shards and gaps along its last dimension: views, or copies if ``split`` copies."""
        found = list(split(packed, self._lengths, -1))
        return (found[::2], found[1::2]) if any(self.gaps) else (found, [])

    def pieces(self, packed: Tensor, split: Split = torch.split_with_sizes) -> list[Tensor]:
        """Return the shards alone."""
        return self.parts(packed, split)[0]


packed_layout = lru_cache(maxsize=4096)(PackedLayout)  # as shard_layout
