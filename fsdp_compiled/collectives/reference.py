"""Packing and unpacking in plain torch: the specification that every faster version must equal.

What one rank contributes to a bucket is packed as :class:`PackedLayout` says, with zeros in the gaps. A bucket's
all-gather output and its reduce-scatter input are ``[world, packed numel]``. No communication here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors  # checked on torch 2.11.0, 2.13.0 and 2.15.0

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
    pieces = _with_gaps([shard.reshape(-1) for shard in shards], layout)
    if {shard.dtype for shard in shards} == {packed.dtype}:
        torch.cat(pieces, out=packed)
    else:
        packed.copy_(torch.cat(pieces))


def unpack_parameters(output: Tensor, outs: Sequence[Tensor], dims: Sequence[int]) -> None:
    """Copy an all-gather output into the unsharded parameters.

    Args:
        output: ``[world, packed numel]``, every rank's padded shards.
        outs: contiguous, padded to a multiple of ``world`` along the sharded dimension; overwritten.
        dims: the sharded dimension of each.
    """
    world = output.shape[0]
    layout = packed_layout(tuple(out.numel() // world for out in outs))
    chunks = [_chunks(out, dim, world) for out, dim in zip(outs, dims, strict=True)]
    pieces = [piece.view(chunk.shape) for piece, chunk in zip(layout.pieces(output), chunks, strict=True)]
    copy_each(pieces, chunks)


def unpacked_parameters(output: Tensor, layouts: Sequence[ShardLayout]) -> list[Tensor]:
    """Return the unsharded parameters, padded, each in new memory of its own; see :func:`unpack_parameters`."""
    pieces = packed_layout(tuple(layout.shard_numel for layout in layouts)).copied_pieces(output)
    return [
        piece.resize_as_(layout.like_padded)
        if layout.dim == 0
        else piece.view(layout.world, *layout.shard_shape).movedim(0, layout.dim).reshape(layout.padded_shape)
        for piece, layout in zip(pieces, layouts, strict=True)
    ]


def packed_shards(packed: Tensor, layouts: Sequence[ShardLayout]) -> list[Tensor]:
    """Return the padded shards that lie in a packed buffer of one rank: views."""
    numels = tuple(layout.shard_numel for layout in layouts)
    place = packed_layout(numels)
    if all(numels) and not any(place.gaps):
        return list(_unflatten_dense_tensors(packed, [layout.like_shard for layout in layouts]))
    return [piece.view(layout.shard_shape) for piece, layout in zip(place.pieces(packed), layouts, strict=True)]


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
    chunks = [
        grad if dim == 0 else _chunks(grad, dim, world).reshape(world, -1)
        for grad, dim in zip(grads, dims, strict=True)
    ]
    if len({chunk.dtype for chunk in chunks}) > 1:
        chunks = [chunk.to(dtype) for chunk in chunks]
    packed = packed_layout(tuple(layout.shard_numel for layout in layouts))
    pieces = [piece for piece in _with_gaps(chunks, packed, world) if piece.numel()]  # torch refuses empty ones
    if not pieces:
        return grads[0].new_empty(world, 0, dtype=dtype)
    input = torch._chunk_cat(pieces, 0, world).to(dtype)
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
    copy_each([piece.view(out.shape) for piece, out in zip(pieces, outs, strict=True)], outs)


def copy_each(tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Copy each tensor into the one at its place in ``outs``, of its shape."""
    torch._foreach_copy_(list(outs), list(tensors))


def _with_gaps(pieces: Sequence[Tensor], layout: PackedLayout, world: int = 1) -> list[Tensor]:
    """Return the pieces with zeros in between where the layout has gaps, which every rank's part has."""
    if not any(layout.gaps):
        return list(pieces)
    zeros = pieces[0].new_zeros(world * max(layout.gaps))
    return [
        each
        for piece, gap in zip(pieces, layout.gaps, strict=True)
        for each in ((piece, zeros[: world * gap]) if gap else (piece,))
    ]


def _chunks(tensor: Tensor, dim: int, world: int) -> Tensor:
    """Return a view of a tensor, even along ``dim``, with the chunk of each rank first: ``[world, *chunk]``."""
    return tensor.unflatten(dim, (world, -1)).movedim(dim, 0)
