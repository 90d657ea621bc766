"""Packing and unpacking in plain torch: the specification that every faster version must equal.

What one rank contributes to a bucket is packed as :class:`PackedLayout` says, with zeros in the gaps. A bucket's
all-gather output and its reduce-scatter input are ``[world, packed numel]``. No communication here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..sharding.layout import PackedLayout, ShardLayout, packed_layout, shard_layout


def take_shard(unsharded: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """Return rank ``rank``'s padded shard of ``unsharded``, contiguous and in memory of its own."""
    mine = unsharded.narrow(layout.dim, layout.offset(rank), layout.length(rank))
    return padded_shard(mine.clone(memory_format=torch.contiguous_format), layout)


def padded_shard(local: Tensor, layout: ShardLayout) -> Tensor:
    """Return ``local`` with ``layout.shard_shape``, padded with zeros; itself if it has that already."""
    if tuple(local.shape) == layout.shard_shape:
        return local.contiguous()
    padded = local.new_zeros(layout.shard_shape)
    padded.narrow(layout.dim, 0, local.shape[layout.dim]).copy_(local)
    return padded


def pack_shards(shards: Sequence[Tensor], packed: Tensor) -> None:
    """Copy padded shards into the packed buffer of this rank, cast to its dtype.

    Args:
        shards: of this rank, any shapes and dtypes.
        packed: 1-D, as long as their :class:`PackedLayout`; overwritten.
    """
    layout = packed_layout(tuple(shard.numel() for shard in shards))
    flat = [shard.reshape(-1) for shard in shards]
    if any(shard.dtype != packed.dtype for shard in shards):
        flat = [shard.to(packed.dtype) for shard in flat]
    torch.cat(list(_with_gaps(flat, layout, packed.new_zeros(max(layout.gaps)))), out=packed)


def unpack_parameters(output: Tensor, outs: Sequence[Tensor], dims: Sequence[int]) -> None:
    """Copy an all-gather output into the unsharded parameters.

    Args:
        output: ``[world, packed numel]``, every rank's padded shards.
        outs: contiguous, padded to a multiple of ``world`` along the sharded dimension; overwritten.
        dims: the sharded dimension of each.
    """
    world = output.shape[0]
    layout = packed_layout(tuple(out.numel() // world for out in outs))
    targets, sources = [], []
    for piece, out, dim in zip(layout.pieces(output), outs, dims, strict=True):
        if dim != 0:
            chunk = (*out.shape[:dim], out.shape[dim] // world, *out.shape[dim + 1 :])
            piece = piece.reshape(world, *chunk).movedim(0, dim)
        targets.append(out.view(piece.shape))
        sources.append(piece)
    torch._foreach_copy_(targets, sources)


def pack_gradients(
    grads: Sequence[Tensor], dims: Sequence[int], world: int, dtype: torch.dtype, divisor: float
) -> Tensor:
    """Return the reduce-scatter input ``[world, packed numel]``: gradients cast to ``dtype``, then divided.

    Args:
        grads: of the parameters' shapes; what a parameter lacks of a multiple of ``world`` becomes zeros.
        dims: the sharded dimension of each.
        world: number of ranks.
        dtype: of the result.
        divisor: 1 for none.
    """
    layouts = [shard_layout(grad.shape, dim, world) for grad, dim in zip(grads, dims, strict=True)]
    chunks = [_chunked(grad.to(dtype), layout) for grad, layout in zip(grads, layouts, strict=True)]
    packed = packed_layout(tuple(layout.shard_numel for layout in layouts))
    zeros = chunks[0].new_zeros(world, max(packed.gaps))
    input = torch.cat(list(_with_gaps(chunks, packed, zeros)), dim=1)
    return input if divisor == 1.0 else input.div_(divisor)


def unpack_gradients(packed: Tensor, outs: Sequence[Tensor], divisor: float) -> None:
    """Copy reduced, packed gradients into padded sharded gradients: divided, then cast to their dtypes.

    Args:
        packed: 1-D, as long as the :class:`PackedLayout` of ``outs``.
        outs: contiguous; overwritten.
        divisor: 1 for none.
    """
    packed = packed if divisor == 1.0 else packed / divisor
    pieces = packed_layout(tuple(out.numel() for out in outs)).pieces(packed)
    torch._foreach_copy_(list(outs), [piece.view(out.shape) for piece, out in zip(pieces, outs, strict=True)])


def _with_gaps(pieces: Sequence[Tensor], layout: PackedLayout, zeros: Tensor) -> Iterator[Tensor]:
    for piece, gap in zip(pieces, layout.gaps, strict=True):
        yield piece
        if gap:
            yield zeros.narrow(-1, 0, gap)


def _chunked(grad: Tensor, layout: ShardLayout) -> Tensor:
    """Return ``[world, shard_numel]``."""
    if layout.dim != 0:
        cut = grad.unflatten(layout.dim, (layout.world, layout.chunk)).movedim(layout.dim, 0)
        return cut.reshape(layout.world, -1)
    if layout.is_even:
        return grad.reshape(layout.world, -1)
    padded = grad.new_zeros(layout.padded_numel)
    padded[: layout.numel].copy_(grad.reshape(-1))
    return padded.view(layout.world, -1)
