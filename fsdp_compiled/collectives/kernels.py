"""Packing and unpacking of a bucket by one Triton kernel. It equals :mod:`reference`.

Both copies move **pieces**: what one rank contributes of one tensor, contiguous in the packed buffer and, in the
tensor, ``outer`` runs of ``inner`` elements. The kernel reads the tensors' addresses and the pieces from tables, so
that one launch serves any number of parameters, and a second one those of odd sizes. Importing this module imports
triton.
"""

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, no-untyped-call, operator, index"
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from math import frexp, gcd, prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from ..sharding.layout import ShardLayout, packed_layout, shard_layout
from ..sharding.spec import word

BLOCK = 4096  # elements that one program copies at most
_COLUMNS = 7  # of the table of blocks
_WIDEST_BYTES = 16  # that one thread reads or writes at a time
_TABLES = 4096  # address tables kept; a training step repeats its addresses

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # what moves where nothing is computed


@triton.jit
def _copy(
    addresses,
    blocks,
    packed,
    TENSOR: tl.constexpr,
    IS_PACKING: tl.constexpr,
    DIVISOR: tl.constexpr,
    IS_POWER_OF_2: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = blocks + tl.program_id(0) * COLUMNS
    tensor = tl.load(block)
    count = tl.multiple_of(tl.load(block + 1).to(tl.int32), WIDTH)
    present = tl.multiple_of(tl.load(block + 2).to(tl.int32), WIDTH)
    in_packed = tl.load(block + 3)
    in_tensor = tl.load(block + 4)
    inner = tl.load(block + 5).to(tl.int32)
    stride = tl.load(block + 6)

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


def run_on(kind: str) -> bool:
    """Tell whether Triton has a driver for devices of this type, as PyTorch calls it, on this machine."""
    try:
        return driver.active.get_active_torch_device().type == kind
    except RuntimeError:  # for no device at all
        return False


def pack(tensors: Sequence[Tensor], packed: Tensor, dims: Sequence[int], divisor: float = 1.0) -> None:
    """See :func:`reference.pack`."""
    _run([_in_memory(tensor) for tensor in tensors], packed, dims, divisor, is_packing=True)


def unpack(packed: Tensor, outs: Sequence[Tensor], dims: Sequence[int], divisor: float = 1.0) -> None:
    """See :func:`reference.unpack`."""
    _run(outs, packed, dims, divisor, is_packing=False)


def _in_memory(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous, its elements as they are read; zeros that autograd makes have no memory."""
    return tensor.resolve_neg().contiguous() if tensor.data_ptr() else tensor.clone()


def _run(tensors: Sequence[Tensor], packed: Tensor, dims: Sequence[int], divisor: float, *, is_packing: bool) -> None:
    device = packed.device
    stream = torch.accelerator.current_stream(device.index).stream_id if device.type != "cpu" else 0
    kinds = tuple([(tensor.shape, tensor.dtype, dim) for tensor, dim in zip(tensors, dims, strict=True)])
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    for launch in _launches(kinds, packed.shape[0], packed.dtype, divisor, is_packing, device, stream):
        aligned = gcd(_alignment(addresses, launch.chosen), packed.data_ptr())
        _copy[(len(launch.table),)](
            _addresses(addresses, device, stream),
            launch.table,
            packed if launch.bits is None else packed.view(launch.bits),
            WIDTH=gcd(launch.granularity, aligned // launch.narrowest),
            ALIGNED_BYTES=aligned,
            **launch.constants,
        )


class _Launch(NamedTuple):
    """One launch of the kernel, whatever the addresses are."""

    chosen: tuple[bool, ...]  # of the tensors, those that it copies
    table: Tensor  # of their blocks, int64 ``[blocks, 7]``
    granularity: int  # how many elements may be moved at a time
    narrowest: int  # bytes of an element, in the tensors or packed, whichever has less
    bits: torch.dtype | None  # the dtype as which the packed buffer moves where nothing is computed
    constants: Mapping[str, Any]  # of the kernel


@lru_cache(maxsize=1024)
def _launches(
    kinds: tuple[tuple[torch.Size, torch.dtype, int], ...],
    world: int,
    packed: torch.dtype,
    divisor: float,
    is_packing: bool,
    device: torch.device,
    stream: int,
) -> tuple[_Launch, ...]:
    """Return a launch for each dtype among tensors of these shapes, dtypes and dimensions.

    And one more for those too odd for wide reads and writes. Tables are made anew on each stream, see
    :func:`_addresses`.
    """
    blocks, found = _blocks(tuple(shard_layout(shape, dim, world) for shape, _, dim in kinds)), list[_Launch]()
    granularity = [_WIDEST_BYTES] * len(kinds)  # how many elements of each may be moved at a time, a power of two
    for index, *numbers in blocks:
        granularity[index] = gcd(granularity[index], *numbers)
    widest = [_WIDEST_BYTES // min(dtype.itemsize, packed.itemsize) for _, dtype, _ in kinds]
    variants = [(dtype, granularity[i] >= widest[i]) for i, (_, dtype, _) in enumerate(kinds)]
    for variant in dict.fromkeys(variants):
        dtype, chosen = variant[0], tuple(each == variant for each in variants)
        # Gaps are among them where they are to be filled with zeros.
        listed = [block for block in blocks if chosen[block[0]] and (is_packing or block[2])]
        if not listed:
            continue
        table = torch.tensor(listed, dtype=torch.int64, device="cpu").view(-1, _COLUMNS).to(device)
        bits = _BITS[dtype.itemsize] if dtype == packed and divisor == 1.0 else None
        constants = {
            "TENSOR": getattr(tl, word(bits or dtype)),
            "IS_PACKING": is_packing,
            "DIVISOR": divisor,
            "IS_POWER_OF_2": frexp(divisor)[0] == 0.5,
            "COLUMNS": _COLUMNS,
            "BLOCK": BLOCK,
            "num_warps": 8,
        }
        moved = gcd(*compress(granularity, chosen))
        found.append(_Launch(chosen, table, moved, min(dtype.itemsize, packed.itemsize), bits, constants))
    return tuple(found)


# ---- tables ----


@lru_cache(maxsize=1024)
def _blocks(layouts: tuple[ShardLayout, ...]) -> list[tuple[int, ...]]:
    """Return the pieces of unsharded tensors in ``[world, packed numel]``, cut into blocks.

    Each has the tensor's index, its length, how many of its elements the tensor has, its place in the packed buffer
    and in the tensor, the length of its runs, and the stride between them in the tensor. A block is a part of one
    run, or several complete runs; or a gap, of which the tensor has nothing.
    """
    world, packed = layouts[0].world, packed_layout(tuple(layout.shard_numel for layout in layouts))
    blocks = list[tuple[int, ...]]()
    for index, (layout, gap, offset) in enumerate(zip(layouts, packed.gaps, packed.offsets, strict=True)):
        numel, outer = layout.shard_numel, prod(layout.shape[: layout.dim])
        inner = numel // max(1, outer)
        for rank in range(world):
            present = numel if outer != 1 else max(0, min(layout.numel - rank * numel, numel))
            place = rank * packed.numel + offset
            blocks += _cut(index, place, rank * inner, present, inner, outer, world * inner)
            blocks += _cut(index, place + numel, 0, 0, gap)
    return blocks


def _cut(
    index: int, in_packed: int, in_tensor: int, present: int, inner: int, outer: int = 1, stride: int = 0
) -> Iterator[tuple[int, ...]]:
    """Cut a piece of ``outer`` runs into blocks; see :func:`_blocks`."""
    runs, longest = max(1, BLOCK // max(1, inner)), min(inner, BLOCK)
    for run in range(0, outer, runs):
        for start in range(0, inner, BLOCK):
            place = run * inner + start
            count = min(longest, inner - start) * min(runs, outer - run)
            there = max(0, min(present - place, count))
            yield index, count, there, in_packed + place, in_tensor + run * stride + start, longest, stride


@lru_cache(maxsize=_TABLES)
def _alignment(addresses: tuple[int, ...], chosen: tuple[bool, ...]) -> int:
    """Return the bytes, 16 at most, that every chosen address is a multiple of."""
    return gcd(_WIDEST_BYTES, *compress(addresses, chosen))


@lru_cache(maxsize=_TABLES)
def _addresses(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Return the addresses on ``device``; made anew on each stream, in whose order the table is filled."""
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")
    return table.to(device, non_blocking=True)
