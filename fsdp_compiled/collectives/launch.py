"""The two halves of a bucket's collective: launch returns a pending record, its ``wait`` the result.

It knows tensors, layouts and group names; it must not know parameters, units or who waits when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import ShardLayout
from ..passes.ir import Reduction, mean_reduction
from . import reference


@dataclass(frozen=True)
class Group:
    """The process groups of a bucket, by name; "" where the world is 1."""

    shard: str
    shard_world: int
    replicate: str = ""
    replicate_world: int = 1

    @property
    def world(self) -> int:
        """All ranks over which a gradient is averaged."""
        return self.shard_world * self.replicate_world


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


def launch_gather(
    shards: Sequence[Tensor], layouts: Sequence[ShardLayout], dtype: torch.dtype, group: Group
) -> PendingGather:
    """Start gathering padded ``shards``, cast to ``dtype``, as one bucket over ``group.shard``."""
    row = reference.pack_shards(shards, dtype)
    if group.shard_world > 1:
        c10d = torch.ops._c10d_functional
        row = c10d.all_gather_into_tensor(row, group.shard_world, group.shard)
    return PendingGather(row, tuple(layouts))


@dataclass(frozen=True)
class PendingReduction:
    """A reduce-scatter under way."""

    row: Tensor  # 1D
    layouts: tuple[ShardLayout, ...]
    group: Group
    scaling: Reduction

    def wait(self, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Wait, average over replicas if there are any, and return the padded sharded gradients."""
        row = _wait(self.row) if self.group.shard_world > 1 else self.row
        if self.group.replicate_world > 1:
            c10d = torch.ops._c10d_functional
            row = _wait(c10d.all_reduce(row, self.scaling.op, self.group.replicate))
        if self.scaling.post_divide != 1.0:
            row = row / self.scaling.post_divide
        return reference.unpack_reduced(row, self.layouts, dtypes)


def launch_reduction(
    grads: Sequence[Tensor], layouts: Sequence[ShardLayout], dtype: torch.dtype, group: Group
) -> PendingReduction:
    """Start averaging unsharded ``grads`` in ``dtype`` over ``group`` as one bucket."""
    scaling = mean_reduction(dtype, group.world)
    row = reference.pack_gradients(grads, layouts, dtype).view(-1)
    if scaling.pre_divide != 1.0:
        row = row / scaling.pre_divide
    if group.shard_world > 1:
        c10d = torch.ops._c10d_functional
        row = c10d.reduce_scatter_tensor(row, scaling.op, group.shard_world, group.shard)
    return PendingReduction(row, tuple(layouts), group, scaling)


def _wait(row: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(row)
