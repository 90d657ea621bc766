"""Copy-in and copy-out in plain torch: what every faster version must equal. No communication here.

A **row** is what one rank contributes to a bucket: its shards (or its chunks of every gradient) one after the
other. A gathered or to-be-scattered bucket is ``[world, row length]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import ShardLayout


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


def pack_shards(shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Copy padded shards, each of its layout's ``shard_shape``, into one row of ``dtype``."""
    return torch.cat([shard.reshape(-1).to(dtype) for shard in shards])


def unpack_gathered(rows: Tensor, layouts: Sequence[ShardLayout], outs: Sequence[Tensor]) -> None:
    """Copy ``rows`` ``[world, row length]`` into the unsharded tensors, dropping no padding.

    Args:
        rows: the gathered bucket.
        layouts: of the parameters, in the order of the row.
        outs: flat, contiguous, of ``world * shard_numel`` elements each; the first ``numel`` of them are the
            parameter in row-major order.
    """
    pieces = rows.split([layout.shard_numel for layout in layouts], dim=1)
    for piece, layout, out in zip(pieces, layouts, outs, strict=True):
        if layout.dim == 0:
            out.view(layout.world, -1).copy_(piece)
        else:
            chunks = piece.reshape(layout.world, *layout.shard_shape).movedim(0, layout.dim)
            out.view(chunks.shape).copy_(chunks)


def pack_gradients(grads: Sequence[Tensor], layouts: Sequence[ShardLayout], dtype: torch.dtype) -> Tensor:
    """Copy unsharded gradients into ``[world, row length]`` of ``dtype``, padded with zeros."""
    chunks = [_chunked(grad.to(dtype), layout) for grad, layout in zip(grads, layouts, strict=True)]
    return torch.cat(chunks, dim=1) if len(chunks) > 1 else chunks[0].contiguous()


def unpack_reduced(row: Tensor, layouts: Sequence[ShardLayout], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Cut a reduced row into padded sharded gradients, cast to ``dtypes``; they may share its storage."""
    pieces = row.split([layout.shard_numel for layout in layouts])
    return [
        piece.view(layout.shard_shape).to(dtype) for piece, layout, dtype in zip(pieces, layouts, dtypes, strict=True)
    ]


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
