"""Copy-in and copy-out of a whole bucket by one Triton kernel, for GPUs. It equals :mod:`reference`.

All four copies move **pieces**: what one rank contributes of one tensor, contiguous in the packed buffer and, in the
tensor, ``outer`` runs of ``inner`` elements. The tensors' addresses and the pieces travel to the kernel as tables, so
that one launch serves any number of parameters, and a second those of odd sizes. Importing this module imports
triton.
"""

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, no-untyped-call, operator, index"
from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from math import frexp, gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import ShardLayout
from .reference import row_numel

BLOCK = 4096  # elements that one program copies at most
_COLUMNS = 7  # of the table of blocks
_WIDEST_BYTES = 16  # that one thread reads or writes at a time
_TABLES = 4096  # address tables kept; a training step repeats its addresses

_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # what moves where nothing is computed


@triton.jit
def _copy(
    addresses,
    blocks,
    packed,
    TENSOR: tl.constexpr,
    IS_PACKING: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    DIVISOR: tl.constexpr,
    IS_POWER_OF_2: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = blocks + tl.program_id(0) * COLUMNS
    tensor = tl.load(row)
    count = tl.multiple_of(tl.load(row + 1).to(tl.int32), WIDTH)
    present = tl.multiple_of(tl.load(row + 2).to(tl.int32), WIDTH)
    in_packed = tl.load(row + 3)
    in_tensor = tl.load(row + 4)
    inner = tl.load(row + 5).to(tl.int32)
    stride = tl.load(row + 6)

    step = tl.arange(0, BLOCK // WIDTH) * WIDTH
    outer = step // inner
    across = outer * stride + (step - outer * inner)
    lane = tl.arange(0, WIDTH)
    at_tensor = tl.multiple_of(in_tensor + across, WIDTH)[:, None] + lane[None, :]
    at_packed = tl.multiple_of(in_packed + step, WIDTH)[:, None] + lane[None, :]
    position = step[:, None] + lane[None, :]
    inside = position < count
    there = position < present

    address = tl.multiple_of(tl.load(addresses + tensor).to(tl.pointer_type(TENSOR)), ALIGNED_BYTES)
    PACKED: tl.constexpr = packed.dtype.element_ty
    if IS_PACKING:
        value = tl.load(address + at_tensor, mask=there, other=0)
        tl.store(packed + at_packed, _divide(_cast(value, PACKED), DIVISOR, IS_POWER_OF_2), mask=inside)
    else:
        value = tl.load(packed + at_packed, mask=there, other=0)
        value = _cast(_divide(value, DIVISOR, IS_POWER_OF_2), TENSOR)
        if ACCUMULATES:
            value = _add(value, tl.load(address + at_tensor, mask=there, other=0))
        tl.store(address + at_tensor, value, mask=there)


@triton.jit
def _cast(value, dtype: tl.constexpr):
    if value.dtype.primitive_bitwidth + dtype.primitive_bitwidth == 64 + 16:
        value = value.to(tl.float32)  # as torch does
    return value.to(dtype)


@triton.jit
def _divide(value, DIVISOR: tl.constexpr, IS_POWER_OF_2: tl.constexpr):
    if DIVISOR == 1.0:
        return value
    if value.dtype == tl.float64:
        return value / DIVISOR
    if IS_POWER_OF_2:  # of the same result
        return (value.to(tl.float32) * (1.0 / DIVISOR)).to(value.dtype)
    return tl.div_rn(value.to(tl.float32), tl.full(value.shape, DIVISOR, tl.float32)).to(value.dtype)


@triton.jit
def _add(value, other):
    if value.dtype == tl.float64:
        return value + other
    return (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)


def copy_in_shards(shards: Sequence[Tensor], row: Tensor) -> None:
    """See :func:`reference.copy_in_shards`."""
    _run([shard.contiguous() for shard in shards], row, _row_blocks(_lengths(shards), len(row)), is_packing=True)


def copy_out_gathered(rows: Tensor, outs: Sequence[Tensor], dims: Sequence[int]) -> None:
    """See :func:`reference.copy_out_gathered`."""
    _run(outs, rows, _bucket_blocks(tuple(_layouts(outs, dims, rows.shape[0])), rows.shape[1]), is_packing=False)


def copy_in_gradients(
    grads: Sequence[Tensor], dims: Sequence[int], world: int, dtype: torch.dtype, divisor: float
) -> Tensor:
    """See :func:`reference.copy_in_gradients`."""
    layouts = tuple(_layouts(grads, dims, world))
    row_length = row_numel([layout.shard_numel for layout in layouts])
    rows = grads[0].new_empty(world, row_length, dtype=dtype)
    grads = [grad.contiguous() for grad in grads]
    _run(grads, rows, _bucket_blocks(layouts, row_length), is_packing=True, divisor=divisor)
    return rows


def copy_out_reduced(row: Tensor, outs: Sequence[Tensor], divisor: float, accumulate: bool) -> None:
    """See :func:`reference.copy_out_reduced`."""
    blocks = _row_blocks(_lengths(outs), len(row))
    _run(outs, row, blocks, is_packing=False, divisor=divisor, accumulates=accumulate)


def _run(
    tensors: Sequence[Tensor],
    packed: Tensor,
    blocks: Blocks,
    *,
    is_packing: bool,
    divisor: float = 1.0,
    accumulates: bool = False,
) -> None:
    """Launch once for each dtype among ``tensors``; and once more for those too odd for wide reads and writes."""
    widest = [_WIDEST_BYTES // min(tensor.itemsize, packed.itemsize) for tensor in tensors]
    kinds = [(tensor.dtype, blocks.granularity(i) >= widest[i]) for i, tensor in enumerate(tensors)]
    for dtype, is_wide in dict.fromkeys(kinds):
        chosen = tuple(kind == (dtype, is_wide) for kind in kinds)
        table, granularity = blocks.table(chosen, packed.device, _stream(packed.device))
        if not len(table):
            continue
        addresses = tuple(
            tensor.data_ptr() if is_chosen else 0 for tensor, is_chosen in zip(tensors, chosen, strict=True)
        )
        width, aligned = _width(granularity, [*addresses, packed.data_ptr()], dtype, packed.dtype)
        is_cast = dtype != packed.dtype or divisor != 1.0 or accumulates
        _copy[(len(table),)](
            _addresses(addresses, packed.device, _stream(packed.device)),
            table,
            packed if is_cast else packed.view(_BITS[dtype.itemsize]),
            TENSOR=_DTYPES[dtype if is_cast else _BITS[dtype.itemsize]],
            IS_PACKING=is_packing,
            ACCUMULATES=accumulates,
            DIVISOR=divisor,
            IS_POWER_OF_2=frexp(divisor)[0] == 0.5,
            WIDTH=width,
            ALIGNED_BYTES=aligned,
            COLUMNS=_COLUMNS,
            BLOCK=BLOCK,
            num_warps=8,
        )


def _width(granularity: int, addresses: Sequence[int], *dtypes: torch.dtype) -> tuple[int, int]:
    """Return how many elements a thread may move at a time, and the bytes that every address is a multiple of."""
    aligned = gcd(_WIDEST_BYTES, *addresses)
    narrowest = min(dtype.itemsize for dtype in dtypes)
    return gcd(granularity, aligned // narrowest), aligned


# ---- tables ----


class Blocks:
    """The pieces of a bucket, cut into blocks; tables of them on devices are made once.

    Args:
        rows: for each block the tensor's index, its length, how many of its elements the tensor has, its place in
            the packed buffer and in the tensor, the length of its runs, and the stride between them in the tensor. A
            block is a part of one run, or several whole runs.
    """

    def __init__(self, rows: Sequence[tuple[int, ...]]) -> None:
        self._rows = rows
        self._made: dict[Hashable, tuple[Tensor, int]] = {}
        self._granularity: dict[int, int] = {}
        for index, *numbers in rows:
            self._granularity[index] = gcd(_WIDEST_BYTES, self._granularity.get(index, 0), *numbers)

    def granularity(self, index: int) -> int:
        """Return how many elements of a tensor may at most be moved at a time, a power of two."""
        return self._granularity.get(index, _WIDEST_BYTES)

    def table(self, chosen: tuple[bool, ...], device: torch.device, stream: int) -> tuple[Tensor, int]:
        """Return the chosen tensors' blocks, int64 ``[blocks, 7]``, and how many elements may be moved at a time.

        They are made anew on each stream, see :func:`_addresses`.
        """
        key = (chosen, device, stream)
        if key not in self._made:
            rows = [row for row in self._rows if chosen[row[0]]]
            table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, _COLUMNS).to(device)
            granularity = gcd(*(self.granularity(i) for i, is_chosen in enumerate(chosen) if is_chosen))
            self._made[key] = (table, granularity)
        return self._made[key]


def _lengths(shards: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(shard.numel() for shard in shards)


def _layouts(tensors: Sequence[Tensor], dims: Sequence[int], world: int) -> Iterator[ShardLayout]:
    for tensor, dim in zip(tensors, dims, strict=True):
        yield ShardLayout(tuple(tensor.shape), dim, world)


@lru_cache(maxsize=1024)
def _row_blocks(lengths: tuple[int, ...], row_length: int) -> Blocks:
    """Return the pieces of shards that lie one after the other."""
    rows, offset = list[tuple[int, ...]](), 0
    for index, length in enumerate(lengths):
        rows += _cut(index, offset, 0, length, length)
        offset += length
    return Blocks([*rows, *_rest(len(lengths), offset, row_length)])


@lru_cache(maxsize=1024)
def _bucket_blocks(layouts: tuple[ShardLayout, ...], row_length: int) -> Blocks:
    """Return the pieces of whole tensors in ``[world, row length]``."""
    rows, world, offset = list[tuple[int, ...]](), layouts[0].world, 0
    for index, layout in enumerate(layouts):
        length, outer = layout.shard_numel, _product(layout.shape[: layout.dim])
        inner = length // max(1, outer)
        for rank in range(world):
            present = length if outer != 1 else max(0, min(layout.numel - rank * length, length))
            place = rank * row_length + offset
            rows += _cut(index, place, rank * inner, present, inner, outer, world * inner)
        offset += length
    for rank in range(world):
        rows += _rest(len(layouts), rank * row_length + offset, (rank + 1) * row_length)
    return Blocks(rows)


def _rest(tensors: int, begin: int, end: int) -> Iterator[tuple[int, ...]]:
    """Cut what no tensor has a part in, at a row's end; it counts as the last one's, which are the oddest."""
    return _cut(tensors - 1, begin, 0, 0, end - begin)


def _cut(
    index: int, in_packed: int, in_tensor: int, present: int, inner: int, outer: int = 1, stride: int = 0
) -> Iterator[tuple[int, ...]]:
    """Cut a piece of ``outer`` runs into blocks; see :class:`Blocks`."""
    runs, longest = max(1, BLOCK // max(1, inner)), min(inner, BLOCK)
    for run in range(0, outer, runs):
        for start in range(0, inner, BLOCK):
            place = run * inner + start
            count = min(longest, inner - start) * min(runs, outer - run)
            there = max(0, min(present - place, count))
            yield index, count, there, in_packed + place, in_tensor + run * stride + start, longest, stride


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


@lru_cache(maxsize=_TABLES)
def _addresses(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Return the addresses on ``device``; made anew on each stream, in whose order the table is filled."""
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
