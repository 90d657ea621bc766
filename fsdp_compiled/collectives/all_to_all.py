"""The recipe of an all-to-all: cast, pack, exchange, as views of one buffer. Optimizers call it.

No graph holds one: what a rank sends and receives depends on the rank, and graphs are the same on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..sharding.dtensor import process_group
from ..sharding.matrices import AllToAllBucket, Move
from . import backend, reference, streams
from .streams import Pending


@dataclass(frozen=True)
class Exchange:
    """An all-to-all as one rank of its group sees it; it may be started many times."""

    bucket: AllToAllBucket
    rank: int

    @cached_property
    def sent(self) -> _Side:
        return _Side(self.bucket.sent(self.rank), self.bucket.spec.group.world)

    @cached_property
    def received(self) -> _Side:
        return _Side(self.bucket.received(self.rank), self.bucket.spec.group.world)

    def launch(self, parts: Sequence[Tensor], device: torch.device) -> Pending[list[Tensor]]:
        """Start it.

        Args:
            parts: in the order of :attr:`sent`, of any dtype; they may be views, and must not change until the wait.
            device: where they are.

        Returns:
            Work that ends in the parts in the order of :attr:`received`: views of one new buffer, in the dtype that
            travels.
        """
        group, dtype = process_group(self.bucket.spec.group.name), self.bucket.spec.dtype
        with backend.profiled("all_to_all", "matrices"):
            packed = torch.empty(self.sent.numel, dtype=dtype, device=device)
            output = torch.empty(self.received.numel, dtype=dtype, device=device)

            def begin() -> tuple[dist.Work, Tensor]:
                reference.copy_each(parts, self.sent.views(packed))
                work = backend.all_to_all(output, packed, self.received.splits, self.sent.splits, group)
                return work, packed  # which it reads until it is done

            def finish(started: tuple[dist.Work, Tensor]) -> list[Tensor]:
                backend.wait(started[0], device)
                return self.received.views(output)

            waiting = partial(backend.profiled, "all_to_all_wait", "matrices")
            return streams.launch("all-to-alls", device, begin, finish, waiting)


class _Side:
    """What a rank sends, or what it receives."""

    def __init__(self, moves: Sequence[Move], world: int) -> None:
        self.moves = moves
        self._shapes = [move.part.shape for move in moves]
        self._numels = [rows * columns for rows, columns in self._shapes]
        self.numel = sum(self._numels)
        self.splits = [0] * world  # elements, by rank
        for move, numel in zip(moves, self._numels, strict=True):
            self.splits[move.peer] += numel

    def views(self, packed: Tensor) -> list[Tensor]:
        pieces = packed.split(self._numels) if self.moves else ()
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
