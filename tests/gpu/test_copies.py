"""The Triton copies on a GPU against the plain torch ones on the same tensors."""

import pytest
import torch

from fsdp_compiled.collectives import copies, reference
from fsdp_compiled.sharding.layout import packed_layout

WORLD = 4
SHAPES = [((1024, 64), 0), ((64, 1024), 1), ((7, 5), 0), ((8, 16, 3), 1), ((4096,), 0), ((13,), 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def _padded(shape, dim):
    return [*shape[:dim], -(-shape[dim] // WORLD) * WORLD, *shape[dim + 1 :]]


DIMS = [dim for _, dim in SHAPES]
FLAT = [0] * len(SHAPES)  # of shards
NUMEL = packed_layout(tuple(torch.Size(_padded(*each)).numel() // WORLD for each in SHAPES)).numel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_copies_equal_the_reference(source, dtype):
    shards = [_random([torch.Size(_padded(*each)).numel() // WORLD], source) for each in SHAPES]
    got, want = torch.empty(2, NUMEL, device="cuda", dtype=dtype)
    copies.pack(shards, got)
    reference.pack(shards, want.view(1, -1), FLAT)
    torch.testing.assert_close(got, want, rtol=0, atol=0)

    output = _random([WORLD, NUMEL], source)
    gots, wants = ([torch.empty(_padded(*each), device="cuda", dtype=dtype) for each in SHAPES] for _ in range(2))
    copies.unpack(output, gots, DIMS)
    reference.unpack(output, wants, DIMS)
    torch.testing.assert_close(gots, wants, rtol=0, atol=0)

    grads = [_random(shape, source) for shape, _ in SHAPES]
    for divisor in (1.0, 4.0):
        got, want = torch.empty(2, WORLD, NUMEL, device="cuda", dtype=dtype)
        copies.pack(grads, got, DIMS, divisor)
        reference.pack(grads, want, DIMS, divisor)
        torch.testing.assert_close(got, want, rtol=0, atol=0)

    packed = _random([NUMEL], source)
    gots = [_random(shard.shape, dtype) for shard in shards]
    wants = [each.clone() for each in gots]
    copies.unpack(packed, gots, divisor=4.0)
    reference.unpack(packed.view(1, -1), wants, FLAT, 4.0)
    torch.testing.assert_close(gots, wants, rtol=0, atol=0)


def test_a_tensor_of_more_than_2_to_the_31_elements():
    shard = torch.arange(2**31 + 64, device="cuda", dtype=torch.int8)
    packed = torch.empty_like(shard)
    copies.pack([shard], packed)
    assert torch.equal(packed, shard)
