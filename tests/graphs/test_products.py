"""Products of one row stay whole in graphs of ours, so that such a rank starts what others start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_compiled.passes.graph.anchors import AnchoredCompute
from tests.support.drawn_lengths import EVEN, MODELS, POLICIES, Batch, Rank, contracts, fake_ranks, traced, travels
from tests.support.graphs import Recorder, target_name
from tests.support.training import shard
from tests.support.variants import thorough


class Dense(nn.Module):
    """Maps that are so small that Inductor decomposes their products for one row."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        maps = [nn.Linear(width, width, bias=width > 2) for _ in range(2)]
        self.blocks = nn.ModuleList(nn.Sequential(each, nn.ReLU()) for each in maps)
        self.scale = nn.Parameter(torch.rand(width))
        self.out = nn.Linear(width, out)

    def forward(self, x, targets):
        for block in self.blocks:
            x = x * self.scale
            x = x + block(x)
        return (self.out(x) - targets).square().mean()


@pytest.mark.parametrize("world", [2, 64])
@pytest.mark.parametrize("width, out", [(12, 12), (24, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 24)])
@thorough(when=lambda world, width: world == 64 and width != 12)
def test_one_row_starts_what_eight_rows_start(monkeypatch, world, width, out):
    def rows(_, length):
        return torch.randn(length, width), torch.zeros(length, out)

    monkeypatch.setitem(MODELS, f"{width} to {out}", (lambda: Dense(width, out), rows))
    with fake_ranks(world):
        one, eight = (traced(Rank(f"{width} to {out}", world, False, (Batch(1, count),))) for count in (1, 8))
        for (kind, of_one), (_, of_eight) in zip(one, eight, strict=True):
            assert [contracts(of_one, each) for each in POLICIES] == [contracts(of_eight, each) for each in POLICIES]
            times = [AnchoredCompute(graph, travels, 8192).time(EVEN) for graph in (of_one, of_eight)]
            assert times[0] == times[1], kind


def test_products_of_one_row_stay_whole_where_parameters_are_sharded(fake_group):
    def products(call):
        tracer = Recorder(lower=False)
        torch.compile(call, backend=tracer, fullgraph=True)(torch.randn(1, 4), torch.zeros(1, 4)).backward()
        return sum("mm" in target_name(node) for _, graph in tracer.before for node in graph.nodes)

    unsharded, sharded = Dense(4, 4), shard(Dense(4, 4), "eager")
    assert (products(unsharded), products(sharded)) == (3, 9)  # Inductor keeps only those of a row and a matrix
