"""Packing and unpacking in plain torch: the specification that every faster version must equal.

What one rank contributes to a bucket is packed as :class:`PackedLayout` says, with zeros in the gaps. A bucket's
all-gather output and its reduce-scatter input are ``[world, packed numel]``. No communication here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors  # checked on torch 2.11.0, 2.13.0 and 2.15.0

from ..sharding.layout import ShardLayout, packed_layout, shard_layout


def take_shard(unsharded: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """Return rank ``rank``'s padded shard of ``unsharded``, contiguous and in memory of its own."""
    if layout.world > 1:
        unsharded = unsharded.narrow(layout.dim, layout.offset(rank), layout.length(rank))
    return padded_shard(unsharded.clone(memory_format=torch.contiguous_format), layout)


def padded_shard(local: Tensor, layout: ShardLayout) -> Tensor:
    """Return ``local`` with ``layout.shard_shape``, padded with zeros; itself if it has that already."""
    if tuple(local.shape) == layout.shard_shape:
        return local.contiguous()
    padded = local.new_zeros(layout.shard_shape)
    padded.narrow(layout.dim, 0, local.shape[layout.dim]).copy_(local)
    return padded


def pack(tensors: Sequence[Tensor], packed: Tensor, dims: Sequence[int], divisor: float = 1.0) -> None:
    """Copy tensors into a packed buffer, ``[world, packed numel]``, cast to its dtype, then divided.

    They are unsharded, of any dtypes; what one lacks of a multiple of ``world`` along its sharded dimension, which is
    in ``dims``, becomes zeros. A divisor of 1 is none.
    """
    world = packed.shape[0]
    if world == 1:
        _join(tensors, packed[0])
    else:
        _join_chunks(tensors, packed, dims)
    if divisor != 1.0:
        packed.div_(divisor)


def _join(tensors: Sequence[Tensor], packed: Tensor) -> None:
    layout = packed_layout(tuple([tensor.numel() for tensor in tensors]))
    is_copy = {tensor.dtype for tensor in tensors} == {packed.dtype} and not any(layout.gaps)
    if is_copy and all(layout.numels) and all(tensor.dim() for tensor in tensors):  # it crashes at scalars
        torch._chunk_cat(list(tensors), 0, 1, out=packed.view(1, -1))  # takes 144 tensors of any shapes in 0.1 ms
        return
    pieces, gaps = layout.parts(packed)
    copy_each([tensor.reshape(-1) for tensor in tensors], pieces)
    if gaps:
        torch._foreach_zero_(gaps)


def _join_chunks(tensors: Sequence[Tensor], packed: Tensor, dims: Sequence[int]) -> None:
    world, pairs = packed.shape[0], list(zip(tensors, dims, strict=True))
    layout = packed_layout(tuple([shard_layout(each.shape, dim, world).shard_numel for each, dim in pairs]))
    chunks = [each if dim == 0 else _chunks(each, dim, world).reshape(world, -1) for each, dim in pairs]
    if len({chunk.dtype for chunk in chunks}) > 1:
        chunks = [chunk.to(packed.dtype) for chunk in chunks]
    is_cast = chunks[0].dtype != packed.dtype
    pieces = chunks
    if any(layout.gaps):
        zeros = chunks[0].new_zeros(world * max(layout.gaps))
        parts = zip(chunks, layout.gaps, strict=True)
        pieces = [piece for chunk, gap in parts for piece in (chunk, zeros[: world * gap])]
    pieces = [piece for piece in pieces if piece.numel()]  # torch refuses empty ones
    if pieces:
        joined = torch._chunk_cat(pieces, 0, world, out=None if is_cast else packed)
        if is_cast:
            packed.copy_(joined)


def unpack(packed: Tensor, outs: Sequence[Tensor], dims: Sequence[int], divisor: float = 1.0) -> None:
    """Copy a packed buffer, ``[world, packed numel]``, into tensors: divided, then cast to their dtypes.

    ``outs`` are contiguous and padded to a multiple of ``world`` along their ``dims``, and are overwritten.
    """
    world = packed.shape[0]
    packed = packed if divisor == 1.0 else packed / divisor
    chunks = [_chunks(out, dim, world) for out, dim in zip(outs, dims, strict=True)]
    pieces = packed_layout(tuple(out.numel() // world for out in outs)).pieces(packed)
    pairs = zip(pieces, chunks, strict=True)
    copy_each([piece if chunk.dim() == 2 else piece.view(chunk.shape) for piece, chunk in pairs], chunks)


def unpacked_parameters(output: Tensor, layouts: Sequence[ShardLayout]) -> list[Tensor]:
    """Return the unsharded parameters, padded, each in new memory of its own; see :func:`unpack`."""
    place = packed_layout(tuple(layout.shard_numel for layout in layouts))
    pieces = place.pieces(output, torch.ops.aten.split_with_sizes_copy)
    return [
        piece.resize_as_(layout.like_padded)
        if layout.dim == 0
        # chunks of length 1 would stay a view, whose strides are not those that compiled code expects
        else piece.view(layout.world, *layout.shard_shape)
        .movedim(0, layout.dim)
        .contiguous()
        .view(layout.padded_shape)
        for piece, layout in zip(pieces, layouts, strict=True)
    ]


def packed_shards(packed: Tensor, layouts: Sequence[ShardLayout]) -> list[Tensor]:
    """Return the padded shards that lie in a packed buffer of one rank: views."""
    numels = tuple(layout.shard_numel for layout in layouts)
    place = packed_layout(numels)
    if all(numels) and not any(place.gaps):
        return list(_unflatten_dense_tensors(packed, [layout.like_shard for layout in layouts]))
    return [piece.view(layout.shard_shape) for piece, layout in zip(place.pieces(packed), layouts, strict=True)]


def copy_each(tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Copy each tensor into the one at its place in ``outs``, of its shape."""
    if tensors:  # torch refuses none
        torch._foreach_copy_(list(outs), list(tensors))


def _chunks(tensor: Tensor, dim: int, world: int) -> Tensor:
    """Return a view of a tensor, even along ``dim``, with the chunk of each rank first, flat if ``dim`` is 0."""
    if dim == 0:
        return tensor.view(world, tensor.numel() // world)
    return tensor.unflatten(dim, (world, -1)).movedim(dim, 0)
