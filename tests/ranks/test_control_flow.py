"""Parameters read in branches and loops of ``torch.cond`` and its kind: which run, or how often, differs by rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop

from tests.support.graphs import record, sequence
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    assert_trains_like_replicas,
    batches,
    each_with_regions,
    my_part,
    shard,
    square_loss,
)
from tests.support.variants import thorough

WIDTH = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return self.down(self.up(x).tanh()) * self.scale


class Branches(Block):
    """Both branches read a parameter of their own, and one that the block reads, too."""

    def forward(self, x):
        def other(x):
            return self.up(x)[:, :WIDTH].sin() * self.scale

        step = super().forward
        return torch.cond(x.sum() > 0, lambda x: step(x), other, (x,)) + self.scale


class Loop(Block):
    """Some ranks go round more often than others."""

    def forward(self, x):
        count = torch.where(x.sum() > 0, 2, 5)
        step = super().forward
        return while_loop(lambda i, x: i < count, lambda i, x: (i + 1, step(x)), (torch.zeros_like(count), x))[1]


class Map(Block):
    def forward(self, x):
        return map(super().forward, x)


class Scan(Block):
    def forward(self, x):
        step = super().forward

        def body(carry, x):
            return carry + x, step(carry + x)

        return scan(body, torch.zeros_like(x[0]), x)[1]


class AssociativeScan(Block):
    def forward(self, x):
        def combine(a, b):
            return (a + b) * self.scale

        return associative_scan(combine, self.up(x)[:, :WIDTH], 0, combine_mode="generic")


class Stack(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = x * self.scale + block(x)
        return x


class StackOfBranches(Stack):
    """Whole blocks run or do not, and the outermost unit's parameter is read there, too."""

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.cond(x.sum() > 0, block, lambda x: x.sin() * self.scale, (x,))
        return x


def _data():
    """On each rank the sums have other signs."""
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(4)
    return batches(2, 8, WIDTH).abs() * signs[:, None]


def _check(make, mode):
    alone, model = make(), make()
    call = shard(model, mode)
    assert_trains_like_replicas(model, call, alone, _data())


@row("control flow")
@pytest.mark.parametrize("block", [Branches, Loop])
@each_with_regions
@thorough(when=lambda mode, block: (mode, block) in {("regional", Branches), ("full", Loop), ("regions", Branches)})
@on_ranks(2)
def test_parameters_read_inside(mode, block):
    _check(lambda: Stack(block), mode)


@pytest.mark.parametrize("block", [Map, Scan, AssociativeScan])
@thorough(when=lambda block: block is not AssociativeScan)
@on_ranks(2)
def test_what_runs_as_often_on_every_rank(block):
    _check(lambda: Stack(block), "full")


@row("control flow")
@each_with_regions
@thorough(when=lambda mode: mode in ("regional", "regions"))
@on_ranks(2)
def test_units_called_inside(mode):
    """Blocks that would be regions are parts of their branch."""
    _check(lambda: StackOfBranches(Block), mode)


@on_ranks(1)
def test_what_a_loop_reads_is_all_gathered_once():
    model = Stack(Scan)
    shard(model, "eager", reshard_after_forward=False)
    call, recorder = record(model, lower=False)
    square_loss(call, my_part(_data()[0]))
    reads_and_loops = ["unshard", *[*["unshard"] * 5, "scan"] * 2]  # the model reads its own parameter first
    assert sequence(recorder.only("forward"), "unshard", "scan") == reads_and_loops
