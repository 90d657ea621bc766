"""Which blocks may share a trace: those for which all that the trace has read is alike when they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import fully_shard
from fsdp_compiled.tracing import reads
from tests.support.ranks import on_ranks
from tests.support.training import assert_trains_like_one_process, compiled, with_regions
from tests.support.variants import thorough

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 traces every block")
WIDTH = 10
STATE = {"index": 0}
COUNT = 0


@dataclass
class Gain:
    by: float = 1.0


class Block(nn.Module):
    """Multiplies by what ``read`` makes of it and of its input."""

    def __init__(self, read: Callable[[Block, Any], Any], gain: Gain) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.read, self.gain, self.gains = read, gain, [gain]
        self.number, self.numbers, self.pair, self.named = 1.0, [1.0, 1.0], (1.0, 1.0), {"by": 1.0}
        self.function = torch.sin

    def forward(self, x):
        return x + self.linear(x).tanh() * self.read(self, x)


class Stack(nn.Module):
    """Before each block's call, ``before`` gets the model, the block, its index and its input."""

    def __init__(self, read, before, change=lambda block, index: None, calls: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.gain, self.scale = before, Gain(), nn.Parameter(torch.rand(WIDTH))
        self.calls, self.blocks = calls, nn.ModuleList(Block(read, self.gain) for _ in range(4 // calls))
        for index, block in enumerate(self.blocks):
            change(block, index)

    def forward(self, x):
        x = x * self.scale
        for index, block in enumerate([*self.blocks] * self.calls):
            x = block(self.before(self, block, index, x))
        return x


def check(monkeypatch, traces: int | None, *args: Any) -> None:
    """Train a model and compare with one process; ``traces``: how many of its blocks are traced."""
    torch._dynamo.reset()
    traced, enter = [], reads.enter_region
    monkeypatch.setattr(reads, "enter_region", lambda *args: traced.append(enter(*args)))
    alone, model = Stack(*args), Stack(*args)
    for block in model.blocks:
        fully_shard(block)
    with_regions(fully_shard(model), model.blocks)
    assert_trains_like_one_process(model, compiled(model), alone)
    assert traces is None or len(traced) == traces
    monkeypatch.undo()


def _set(name: str, usual: Callable[[], Any], other: Callable[[], Any]) -> Callable[[Block, bool], None]:
    return lambda block, odd: setattr(block, name, other() if odd else usual())


# what is read of a block, and what sets it
READS: dict[str, tuple[Callable[[Block], Any], Callable[[Block, bool], Any]]] = {
    "number": (lambda block: block.number, _set("number", lambda: 1.0, lambda: 0.5)),
    "is None": (lambda block: 0.5 if block.number is None else 1.0, _set("number", lambda: 1.0, lambda: None)),
    "type": (lambda block: 0.5 if isinstance(block.number, int) else 1.0, _set("number", lambda: 1.0, lambda: 1)),
    "item of a list": (lambda block: block.numbers[1], _set("numbers", lambda: [1.0, 1.0], lambda: [1.0, 0.5])),
    "item of a tuple": (lambda block: block.pair[1], _set("pair", lambda: (1.0, 1.0), lambda: (1.0, 0.5))),
    "item of a dict": (lambda block: block.named["by"], _set("named", lambda: {"by": 1.0}, lambda: {"by": 0.5})),
    "no item": (lambda block: block.named.get("by", 0.5), _set("named", lambda: {"by": 1.0}, lambda: {"to": 1.0})),
    "length": (lambda block: 0.5 * len(block.numbers), _set("numbers", lambda: [1.0, 1.0], lambda: [1.0])),
    "object": (lambda block: block.gain.by, _set("gain", Gain, lambda: Gain(0.5))),
    "object in a list": (lambda block: block.gains[0].by, _set("gains", lambda: [Gain()], lambda: [Gain(0.5)])),
    "function": (
        lambda block: block.function(torch.ones(())),
        _set("function", lambda: torch.sin, lambda: torch.cos),
    ),
    "module": (lambda block: block.inner(torch.ones(())), _set("inner", nn.Tanh, nn.Sigmoid)),
    "attribute of a module": (
        lambda block: getattr(block.inner, "gain", 1.0),
        lambda block, odd: odd and setattr(block.inner, "gain", 0.5),
    ),
    "mode": (lambda block: 0.5 if block.inner.training else 1.0, lambda block, odd: block.inner.train(not odd)),
}
# In a run of the entire suite these are read within a checkpoint, and the others without.
IN_CHECKPOINT = ("number", "is None", "item of a list", "object", "function", "module", "mode")


@pytest.mark.parametrize("name", READS)
@thorough(when=lambda name: name in IN_CHECKPOINT)
@on_ranks(1)
def test_what_is_read_before_the_call_too(monkeypatch, name):
    read, change = READS[name]
    args = (lambda block, x: read(block), lambda model, block, index, x: x * read(block))
    check(monkeypatch, 2, *args, lambda block, index: change(block, index % 2 == 1))
    check(monkeypatch, 1, *args)


@pytest.mark.parametrize("name", READS)
@thorough(when=lambda name: name not in IN_CHECKPOINT)
@on_ranks(1)
def test_what_is_read_within_a_checkpoint(monkeypatch, name):
    read, change = READS[name]

    def checkpointed(block, x):
        return checkpoint(lambda y: y.sin() * read(block), x, use_reentrant=False)

    for before in (lambda model, block, index, x: x, lambda model, block, index, x: x * read(block)):
        check(monkeypatch, None, checkpointed, before, lambda block, index: change(block, index % 2 == 1))


def _list(model, block, index, x):
    block.numbers.append(1.0)
    return x


def _object(model, block, index, x):
    model.gain.by = 1.0 - 0.1 * index
    return x


def _object_in_a_list(model, block, index, x):
    model.blocks[0].gains[0].by = 1.0 - 0.1 * index
    return x


def _block(model, block, index, x):
    block.number = 1.0 - 0.1 * index
    return x


def _dict(model, block, index, x):
    STATE["index"] = index
    return x


def _global(model, block, index, x):
    global COUNT
    COUNT = index
    return x


def _tensor(model, block, index, x):
    x = x * 1.0
    x.index = index
    return x


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[Block, Any], Any]]] = {
    "list": (_list, lambda block, x: 0.1 * len(block.numbers)),
    "object": (_object, lambda block, x: block.gain.by),
    "object in a list": (_object, lambda block, x: block.gains[0].by),
    "object by another way": (_object_in_a_list, lambda block, x: block.gain.by),
    "block": (_block, lambda block, x: block.number),
    "dict": (_dict, lambda block, x: 1.0 - 0.1 * STATE["index"]),
    "global": (_global, lambda block, x: 1.0 - 0.1 * COUNT),
    "tensor": (_tensor, lambda block, x: 1.0 - 0.1 * getattr(x, "index", 9)),
}


@pytest.mark.parametrize("calls", [1, 2], ids=["each once", "each twice"])
@pytest.mark.parametrize("name", CHANGES)
@thorough(when=lambda calls: calls == 2)
@on_ranks(1)
def test_what_changes_while_it_is_traced(monkeypatch, name, calls):
    change, read = CHANGES[name]
    check(monkeypatch, None, read, change, lambda block, index: None, calls)


@pytest.mark.parametrize("change", [_object, _dict])
@on_ranks(1)
def test_changes_that_no_block_reads_cost_no_trace(monkeypatch, change):
    check(monkeypatch, 1, lambda block, x: block.numbers[0], change)
