"""The two halves of a bucket's collective: launch returns a pending record, its ``wait`` the result.

It knows tensors, layouts and routes; it must not know parameters, units or who waits when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import ShardLayout
from ..passes.ir import Route
from . import comm, reference


@dataclass(frozen=True)
class PendingGather:
    """An all-gather under way; it holds the buffer until :meth:`wait`."""

    row: Tensor  # 1D
    layouts: tuple[ShardLayout, ...]

    def wait(self, outs: Sequence[Tensor]) -> None:
        """Wait, then copy the parameters out; see :func:`reference.unpack_gathered` for ``outs``."""
        world = self.layouts[0].world
        rows = _wait(self.row) if world > 1 else self.row
        reference.unpack_gathered(rows.view(world, -1), self.layouts, outs)

    def drop(self) -> None:
        """Wait, so that no collective is left behind, and copy nothing."""
        if self.layouts[0].world > 1:
            _wait(self.row)


def launch_gather(shards: Sequence[Tensor], layouts: Sequence[ShardLayout], route: Route) -> PendingGather:
    """Start gathering padded ``shards``, cast to ``route.dtype``, as one bucket over the route's shard group."""
    if route.device:
        shards = [shard.to(route.device, non_blocking=True) for shard in shards]
    row = reference.pack_shards(shards, route.dtype)
    if route.gather_comm and route.shard_world > 1:
        row = comm.all_gather(row, route.shard_world, route.shard_group, route.gather_comm)
    elif route.shard_world > 1:
        row = torch.ops._c10d_functional.all_gather_into_tensor(row, route.shard_world, route.shard_group)
    return PendingGather(row, tuple(layouts))


@dataclass(frozen=True)
class PendingReduction:
    """A reduce-scatter under way, or a row that is to be reduced over replicas only."""

    row: Tensor  # 1D
    layouts: tuple[ShardLayout, ...]
    route: Route
    is_scattered: bool = False  # nothing is under way: the row is this rank's already

    def wait(self, dtypes: Sequence[torch.dtype], carried: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """Wait, reduce over replicas if there are any, and return the padded sharded gradients.

        Args:
            dtypes: of the results.
            carried: what earlier reductions over the shard group left, added before the replicas are reduced.
        """
        row = self.row if self.is_scattered or self.route.shard_world == 1 else _wait(self.row)
        if any(part is not None for part in carried):
            row = row + _row_of(carried, self.layouts, row)
        if self.route.replicate_world > 1:
            launched = torch.ops._c10d_functional.all_reduce(row, self.route.op, self.route.replicate_group)
            row = _wait(launched)
        if self.route.reduce_hook:
            row = comm.reduce_hook(row, self.route.reduce_hook)
        if self.route.post_divide != 1.0:
            row = row / self.route.post_divide
        return reference.unpack_reduced(row, self.layouts, dtypes)


def launch_reduction(grads: Sequence[Tensor], layouts: Sequence[ShardLayout], route: Route) -> PendingReduction:
    """Start reducing unsharded ``grads`` in ``route.reduce_dtype`` as one bucket."""
    row = reference.pack_gradients(grads, layouts, route.reduce_dtype).view(-1)
    if route.pre_divide != 1.0:
        row = row / route.pre_divide
    place = (route.op, route.shard_world, route.scatter_group)
    if route.reduce_comm and route.shard_world > 1:
        row = comm.reduce_scatter(row, *place, route.reduce_comm)
    elif route.shard_world > 1:
        row = torch.ops._c10d_functional.reduce_scatter_tensor(row, *place)
    return PendingReduction(row, tuple(layouts), route)


def launch_replica_reduction(
    parts: Sequence[Tensor], layouts: Sequence[ShardLayout], route: Route
) -> PendingReduction:
    """Start reducing over replicas what the shard group has reduced already: padded shards in reduce dtype."""
    return PendingReduction(torch.cat([part.reshape(-1) for part in parts]), tuple(layouts), route, True)


def _row_of(parts: Sequence[Tensor | None], layouts: Sequence[ShardLayout], like: Tensor) -> Tensor:
    pieces = [
        like.new_zeros(layout.shard_numel) if part is None else part.reshape(-1)
        for part, layout in zip(parts, layouts, strict=True)
    ]
    return torch.cat(pieces)


def _wait(row: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(row)
