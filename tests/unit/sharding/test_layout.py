from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compiled.sharding.layout import ShardLayout

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@given(shapes, st.integers(0, 2), st.integers(1, 8))
def test_shards_are_cut_as_torch_chunk_cuts_and_tile_the_tensor(shape, dim, world):
    layout = ShardLayout(shape, dim % len(shape), world)
    whole = torch.arange(layout.numel).view(shape)
    shards = [whole.narrow(layout.dim, layout.offset(r), layout.length(r)) for r in range(world)]
    assert torch.equal(torch.cat(shards, dim=layout.dim), whole)
    for shard, chunk in zip(shards, torch.chunk(whole, world, dim=layout.dim), strict=False):
        assert torch.equal(shard, chunk)
    assert all(layout.length(r) <= layout.chunk for r in range(world))


@given(shapes, st.integers(1, 8))
def test_padded_shards_have_one_shape_on_every_rank(shape, world):
    layout = ShardLayout(shape, 0, world)
    assert layout.shard_shape == (layout.chunk, *shape[1:])
    assert layout.world * layout.shard_numel >= layout.numel
    assert layout.is_even == (layout.world * layout.shard_numel == layout.numel)
