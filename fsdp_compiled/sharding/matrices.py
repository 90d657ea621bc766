"""Matrices of sharded parameters: which part of each a rank holds, and the all-to-all that brings them to owners.

While an optimizer works on a matrix, one rank owns it: the others send their parts there, and get theirs back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import shard_layout
from .spec import Group, ParamSpec, word


class Part(NamedTuple):
    """What one rank holds of a matrix: rows of its shard, which are rows and columns of the matrix."""

    shard_rows: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]
    at: int = 0  # of the matrix in the shard, if that is a stack

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def of_shard(self, shard: Tensor) -> Tensor:
        """Return the part of a shard without padding, of two dimensions or three: a view."""
        return (shard if shard.dim() == 2 else shard[self.at])[slice(*self.shard_rows)]

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """Return the part of the complete matrix: a view."""
        return matrix[slice(*self.rows), slice(*self.columns)]


@dataclass(frozen=True)
class Matrix:
    """Rows of a parameter of two dimensions, or of one that a stack of such is: its last two are the matrix's."""

    param: ParamSpec
    start: int  # the first of its rows
    rows: int
    index: int = 0  # in the stack, along its first dimension

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self._sizes[-1]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def _sizes(self) -> tuple[int, ...]:
        assert self.param.shape is not None
        return self.param.shape

    def part(self, shard: int, world: int) -> Part | None:
        """Return what shard number ``shard`` of ``world`` holds; None if it holds nothing."""
        layout, dim = shard_layout(self._sizes, self.param.dim, world), self.param.dim - len(self._sizes) + 2
        first, last = layout.offset(shard), layout.offset(shard) + layout.length(shard)
        every, (_, columns) = (self.start, self.start + self.rows), self.shape
        if dim == 1:
            return Part(every, (0, self.rows), (first, last), self.index) if first < last else None
        if dim < 0:
            at = self.index - first
            return Part(every, (0, self.rows), (0, columns), at) if first <= self.index < last else None
        top, bottom = max(first, every[0]), min(last, every[1])
        if top >= bottom:
            return None
        return Part((top - first, bottom - first), (top - self.start, bottom - self.start), (0, columns), self.index)

    def home(self, world: int) -> int | None:
        """Return the number of the shard that has all of it; None if it is cut."""
        layout, dim = shard_layout(self._sizes, self.param.dim, world), self.param.dim
        place = self.index if dim == len(self._sizes) - 3 else self.start if dim == len(self._sizes) - 2 else 0
        shard = place // layout.chunk
        part = self.part(shard, world)
        return shard if part is not None and part.shape == self.shape else None


class Move(NamedTuple):
    """One part that travels: to or from rank ``peer`` of the group."""

    peer: int
    matrix: int  # in the bucket
    part: Part


@dataclass(frozen=True)
class AllToAllSpec:
    """Between the shards of matrices and their owners."""

    group: Group  # the ranks of one shard group, or of all replicas of one: rank ``r`` has shard ``r % shards``
    dtype: torch.dtype  # that travels
    shards: int  # how many ranks share a parameter
    to_owners: bool  # complete matrices arrive, at one rank each; else their parts, on every rank

    @property
    def how(self) -> str:
        """What ranks compare besides the parameters."""
        return f"sent as {word(self.dtype)} {'to' if self.to_owners else 'from'} owners"


@dataclass(frozen=True)
class AllToAllBucket:
    """What one all-to-all carries: matrices, and the rank in the group that owns each.

    Ranks send and receive parts in the order of :meth:`sent` and :meth:`received`, by rank of the group, and for each
    rank in the order of ``matrices``.
    """

    spec: AllToAllSpec
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]

    def sent(self, rank: int) -> list[Move]:
        return sorted(self._of_shard(rank) if self.spec.to_owners else self._of_owner(rank))

    def received(self, rank: int) -> list[Move]:
        return sorted(self._of_owner(rank) if self.spec.to_owners else self._of_shard(rank))

    def _of_shard(self, rank: int) -> Iterator[Move]:
        """Yield the parts of the rank's shards, to or from their owners; owners take those of their own replica."""
        shards = self.spec.shards
        for at, (matrix, owner) in enumerate(zip(self.matrices, self.owners, strict=True)):
            if self.spec.to_owners and owner // shards != rank // shards:
                continue
            if (part := matrix.part(rank % shards, shards)) is not None:
                yield Move(owner, at, part)

    def _of_owner(self, rank: int) -> Iterator[Move]:
        """Yield the parts of the matrices that the rank owns, from its replica's shards, or to those of all."""
        shards = self.spec.shards
        first = rank // shards * shards
        ranks = range(first, first + shards) if self.spec.to_owners else range(self.spec.group.world)
        for at in (at for at, owner in enumerate(self.owners) if owner == rank):
            for peer in ranks:
                if (part := self.matrices[at].part(peer % shards, shards)) is not None:
                    yield Move(peer, at, part)
