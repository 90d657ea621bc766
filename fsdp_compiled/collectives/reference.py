"""Copy-in and copy-out in plain torch: what every faster version must equal. No communication here.

A **row** is what one rank contributes to a bucket: its shards (or its chunks of every gradient) one after the
other, and zeros up to :func:`row_numel`. A gathered or to-be-scattered bucket is ``[world, row length]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import ShardLayout
from ..passes import ir


def row_numel(numels: Sequence[int]) -> int:
    """Return the elements of a row of shards of so many; a few more where that aligns the next rank's row."""
    return ir.aligned(sum(numels)) if len(numels) > 1 else sum(numels)


def take_shard(whole: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """Return rank ``rank``'s padded shard of ``whole``, contiguous and in memory of its own."""
    mine = whole.narrow(layout.dim, layout.offset(rank), layout.length(rank))
    return padded_shard(mine.clone(memory_format=torch.contiguous_format), layout)


def padded_shard(local: Tensor, layout: ShardLayout) -> Tensor:
    """Return ``local`` with ``layout.shard_shape``, padded with zeros; itself if it has that already."""
    if tuple(local.shape) == layout.shard_shape:
        return local.contiguous()
    padded = local.new_zeros(layout.shard_shape)
    padded.narrow(layout.dim, 0, local.shape[layout.dim]).copy_(local)
    return padded


def copy_in_shards(shards: Sequence[Tensor], row: Tensor) -> None:
    """Copy padded shards into one row, cast to its dtype.

    Args:
        shards: of this rank, any shapes and dtypes.
        row: 1-D, of at least as many elements as all shards together; overwritten.
    """
    used = sum(shard.numel() for shard in shards)
    torch.cat([shard.reshape(-1).to(row.dtype) for shard in shards], out=row[:used])
    if used < len(row):
        row[used:].zero_()


def copy_out_gathered(rows: Tensor, outs: Sequence[Tensor], dims: Sequence[int]) -> None:
    """Copy a gathered bucket into the unsharded tensors.

    Args:
        rows: ``[world, row length]``, every rank's row of padded shards.
        outs: contiguous, padded to a multiple of ``world`` along the sharded dimension; overwritten.
        dims: the sharded dimension of each.
    """
    world = rows.shape[0]
    for piece, out, dim in zip(_pieces(rows, [out.numel() // world for out in outs]), outs, dims, strict=True):
        chunk = (*out.shape[:dim], out.shape[dim] // world, *out.shape[dim + 1 :])
        chunks = piece.reshape(world, *chunk).movedim(0, dim)
        out.view(chunks.shape).copy_(chunks)


def copy_in_gradients(
    grads: Sequence[Tensor], dims: Sequence[int], world: int, dtype: torch.dtype, divisor: float
) -> Tensor:
    """Return the input of a reduce-scatter, ``[world, row length]``: gradients cast to ``dtype``, then divided.

    Args:
        grads: of the parameters' shapes; what a parameter lacks of a multiple of ``world`` becomes zeros.
        dims: the sharded dimension of each.
        world: number of ranks.
        dtype: of the result.
        divisor: 1 for none.
    """
    layouts = [ShardLayout(tuple(grad.shape), dim, world) for grad, dim in zip(grads, dims, strict=True)]
    chunks = [_chunked(grad.to(dtype), layout) for grad, layout in zip(grads, layouts, strict=True)]
    if len(chunks) == 1:
        rows = chunks[0].contiguous()
    else:
        numels = [layout.shard_numel for layout in layouts]
        missing = row_numel(numels) - sum(numels)
        rows = torch.cat([*chunks, chunks[0].new_zeros(world, missing)] if missing else chunks, dim=1)
    return rows if divisor == 1.0 else rows / divisor


def copy_out_reduced(row: Tensor, outs: Sequence[Tensor], divisor: float, accumulate: bool) -> None:
    """Copy a reduced row into padded sharded gradients: divided, then cast to their dtypes.

    Args:
        row: 1-D.
        outs: contiguous, of at most as many elements together.
        divisor: 1 for none.
        accumulate: add to ``outs`` rather than overwrite them.
    """
    row = row if divisor == 1.0 else row / divisor
    for piece, out in zip(_pieces(row, [out.numel() for out in outs]), outs, strict=True):
        value = piece.view(out.shape).to(out.dtype)
        out.add_(value) if accumulate else out.copy_(value)


def _pieces(rows: Tensor, numels: Sequence[int]) -> Sequence[Tensor]:
    return rows.narrow(-1, 0, sum(numels)).split(list(numels), dim=-1)


def _chunked(grad: Tensor, layout: ShardLayout) -> Tensor:
    """Return ``[world, shard_numel]``."""
    if layout.dim != 0:
        cut = grad.unflatten(layout.dim, (layout.world, layout.chunk)).movedim(layout.dim, 0)
        return cut.reshape(layout.world, -1)
    if layout.is_even:
        return grad.reshape(layout.world, -1)
    padded = grad.new_zeros(layout.world * layout.shard_numel)
    padded[: layout.numel].copy_(grad.reshape(-1))
    return padded.view(layout.world, -1)
