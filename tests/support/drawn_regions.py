"""What hypothesis draws of regions.

Programs: what a block of an unsharded model computes; what it keeps for backward may share memory. Calls: with which
arguments equal blocks of a sharded model are called. Differences: in what blocks differ that look equal, from the
first step on or after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.compiler import nested_compile_region

from fsdp_compiled import fully_shard
from fsdp_compiled.passes import region_options
from tests.support.training import (
    assert_close,
    batches,
    compiled,
    full_grads,
    my_part,
    seeded_generator,
    square_loss,
    with_regions,
)

WIDTH = 8
# from the last value and an earlier one, all of [4, 5, WIDTH], to the next
STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda x, y: x.tanh(),
    "exp": lambda x, y: x.sigmoid().exp(),
    "square": lambda x, y: x * x * 0.1,
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y.sigmoid(),
    "softmax": lambda x, y: x.softmax(-1) * WIDTH,
    "clone": lambda x, y: x.clone(),
    "same dtype": lambda x, y: x.to(torch.float64).contiguous(),
    "flat": lambda x, y: x.reshape(-1, WIDTH).tanh().view(x.shape),
    "transposed": lambda x, y: x.transpose(0, 1).contiguous().transpose(0, 1),
    "rolled": lambda x, y: x.roll(1, -1),
    "padded": lambda x, y: F.pad(x, (1, 0))[..., :WIDTH],
    "joined": lambda x, y: torch.cat([x, y], -1)[..., 3 : 3 + WIDTH],
    "halves": lambda x, y: torch.cat([x.chunk(2, -1)[1].sigmoid(), x.chunk(2, -1)[0]], -1),
    "stacked": lambda x, y: torch.stack([x, y]).select(0, 1) * 1.5,
}
# between two calls of the block: from its result, its argument and a sum to the next argument and sum
AROUND: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "nothing": lambda y, x, total: (y, total),
    "product": lambda y, x, total: (y, total + y * x),
    "tanh": lambda y, x, total: (y.tanh(), total),
    "relu": lambda y, x, total: (y + 1, total + (y * 2).relu()),
}


def programs() -> st.SearchStrategy[tuple[list[tuple[str, int]], str]]:
    """The steps of a block, each with the index of its earlier value, and what lies between its calls."""
    steps = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9))
    return st.tuples(st.lists(steps, min_size=2, max_size=10), st.sampled_from(sorted(AROUND)))


def check_program(steps: list[tuple[str, int]], around: str) -> None:
    """Compile a model that calls the block 4 times; its output and gradients are those of eager."""

    @nested_compile_region
    def block(x: Tensor, weight: Tensor) -> Tensor:
        values = [x]
        for name, index in steps:
            values.append(STEPS[name](values[-1], values[index % len(values)]))
        return values[-1] @ weight

    def model(x: Tensor, weight: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for _ in range(4):
            x, total = AROUND[around](block(x, weight), x, total)
        return x + total

    torch._dynamo.reset()
    found = []
    for call in (model, torch.compile(model, fullgraph=True, options=region_options())):
        generator = seeded_generator(0)
        shapes = ((4, 5, WIDTH), (WIDTH, WIDTH))
        inputs = [torch.randn(s, generator=generator, dtype=torch.float64).mul(0.3).requires_grad_() for s in shapes]
        output = call(*inputs)
        output.square().mean().backward()
        found.append([output.detach(), *(each.grad for each in inputs)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


# ---- calls ----


@dataclass
class Scaled:
    """An argument that torch compares with no other."""

    factor: float = 2.0
    added: Tensor | None = None


class Shift:
    def __init__(self, by: float) -> None:
        self.by = by


SHIFT = Shift(0.5)
# from a block's input, another tensor like it and the block to an argument
ARGUMENTS: dict[str, Callable[[Tensor, Tensor, nn.Module], Any]] = {
    "None": lambda x, other, block: None,
    "1": lambda x, other, block: 1,
    "True": lambda x, other, block: True,
    "1.0": lambda x, other, block: 1.0,
    "0.5": lambda x, other, block: 0.5,
    "text": lambda x, other, block: "sin",
    "x": lambda x, other, block: x,
    "other": lambda x, other, block: other,
    "vector": lambda x, other, block: torch.ones_like(other[0]),
    "buffer": lambda x, other, block: block.buffer,
    "first buffer": lambda x, other, block: block.first[0].buffer,
    "tuple": lambda x, other, block: (other, x),
    "tuple of one": lambda x, other, block: (other,),
    "list": lambda x, other, block: [other, x],
    "dict": lambda x, other, block: {"by": other},
    "other dict": lambda x, other, block: {"to": other},
    "dataclass": lambda x, other, block: Scaled(),
    "other dataclass": lambda x, other, block: Scaled(3.0, other),
    "dataclass in a list": lambda x, other, block: [Scaled(0.5, x)],
    "object": lambda x, other, block: SHIFT,
    "other object": lambda x, other, block: Shift(0.25),
    "function": lambda x, other, block: torch.sin,
    "closure": lambda x, other, block: lambda y: y * other,
    "module": lambda x, other, block: block.first[0].below,
}
Call = tuple[tuple[str, ...], dict[str, str]]  # names of positional arguments, and of those by keyword


def calls() -> st.SearchStrategy[list[Call]]:
    """How each of some equal blocks is called; few kinds of arguments in each, so that calls resemble each other."""

    def some(kinds: list[str]) -> st.SearchStrategy[list[Call]]:
        kind = st.sampled_from(kinds)
        positional = st.lists(kind, max_size=2).map(tuple)
        return st.lists(st.tuples(positional, st.dictionaries(st.sampled_from("ab"), kind)), min_size=2, max_size=5)

    return st.lists(st.sampled_from(list(ARGUMENTS)), min_size=1, max_size=3).flatmap(some)


class Folding(nn.Module):
    """A block that computes with any arguments."""

    def __init__(self, first: list[Folding]) -> None:
        super().__init__()
        self.linear, self.below = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("buffer", torch.rand(WIDTH))
        self.first = (*first, self)  # all blocks before it; no submodules

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.linear(x) * self.buffer
        for index, each in enumerate(args):
            y = _folded(y / (index + 1.5), each)
        for name, each in kwargs.items():
            y = _folded(y + ord(name) % 5, each)
        return x + y.tanh()


def _folded(y: Tensor, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return y + value.sigmoid()
    if isinstance(value, Scaled):
        return _folded(y * value.factor, value.added)
    if isinstance(value, Shift):
        return y + value.by
    if isinstance(value, (tuple, list, dict)):
        for index, each in enumerate(value):
            y = _folded(y * (index + 2), value[each] if isinstance(value, dict) else each)
        return y + isinstance(value, list) + 2 * ("by" in value if isinstance(value, dict) else 0)
    if callable(value):
        return y + value(y)
    return y if value is None else y * (0.3 if isinstance(value, (bool, str)) else value / 3 + isinstance(value, int))


class Calling(nn.Module):
    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.calls, self.blocks = nn.Parameter(torch.rand(WIDTH)), calls, nn.ModuleList()
        for _ in calls:
            self.blocks.append(Folding(list(self.blocks)))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        other = x.cos()
        for block, (args, kwargs) in zip(self.blocks, self.calls, strict=True):
            arguments = [ARGUMENTS[name](x, other, block) for name in args]
            x = block(x, *arguments, **{key: ARGUMENTS[name](x, other, block) for key, name in kwargs.items()})
        return x


def check_calls(calls: Sequence[Call], rank: int = 0) -> None:
    """Compile a sharded model whose blocks are regions and called so; its gradients are those of one process."""
    torch._dynamo.reset()
    alone, model = Calling(calls).double(), Calling(calls).double()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with_regions(model, model.blocks)
    (data,) = batches(1, 8, WIDTH).double()
    square_loss(alone, data).backward()
    square_loss(compiled(model), my_part(data)).backward()
    assert_close(full_grads(model), full_grads(alone))


# ---- differences ----


class Inner(nn.Module):
    """A module inside a block; it computes with attributes of every kind."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.value, self.scaled = nn.Linear(WIDTH, WIDTH, bias=False), None, Scaled(0.9)
        self.register_buffer("buffer", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.factor * getattr(self, "more", 1.0) * (1.0 if self.training else 0.8)
        return _folded(_folded(_folded(y, self.value), self.scaled), self.buffer)


class Sine(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


class Nested(nn.Module):
    """A block that computes with an inner module, and with attributes of its own."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.activation, self.value = Inner(), nn.Tanh(), None
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.inner(x * self.scale)) * self.factor * getattr(self, "more", 1.0)
        return x + _folded(y, self.value)


def _doubled_forward(module: nn.Module) -> None:
    first = type(module).forward
    module.forward = MethodType(lambda self, x: first(self, x * 2), module)


def _set_value(name: str, value: Callable[[], Any], block: Nested) -> None:
    module = block.get_submodule(name)
    del module.value  # of a module's attributes, submodules can become nothing else
    module.value = value()


VALUES: dict[str, Callable[[], Any]] = {
    "1": lambda: 1,
    "True": lambda: True,
    "0.5": lambda: 0.5,
    "text": lambda: "sin",
    "vector": lambda: torch.full([WIDTH], 0.3, dtype=torch.float64),
    "tuple": lambda: (2.0, 0.5),
    "list": lambda: [2.0, 0.5],
    "dict": lambda: {"by": 2.0},
    "other dict": lambda: {"to": 2.0},
    "dataclass": lambda: Scaled(3.0),
    "object": lambda: Shift(0.25),
    "function": lambda: torch.sin,
    "closure": lambda: (lambda by: lambda y: y * by)(0.7),
    "partial": lambda: partial(torch.mul, 0.6),
    "ReLU": nn.ReLU,
    "Sigmoid": nn.Sigmoid,
}
# what may change after a step, too; a hook may not, because torch does not guard hooks
LATER: dict[str, Callable[[Nested], None]] = {
    "activation": lambda block: setattr(block, "activation", nn.ReLU()),
    "activations": lambda block: setattr(block, "activation", nn.Sequential(nn.ReLU(), nn.Sigmoid())),
    "no activation": lambda block: setattr(block, "activation", nn.Identity()),
    "factor": lambda block: setattr(block, "factor", 2.0),
    "factor of inner": lambda block: setattr(block.inner, "factor", 2.0),
    "more": lambda block: setattr(block, "more", 0.5),
    "more of inner": lambda block: setattr(block.inner, "more", 0.5),
    "field of inner": lambda block: setattr(block.inner.scaled, "factor", 3.0),
    "evaluates": lambda block: block.inner.eval(),
    "forward of activation": lambda block: _doubled_forward(block.activation),
    "buffer of inner": lambda block: setattr(block.inner, "buffer", torch.full([WIDTH], 0.2, dtype=torch.float64)),
    "no buffer of inner": lambda block: setattr(block.inner, "buffer", None),
    **{f"value {name}": partial(_set_value, "", value) for name, value in VALUES.items()},
    **{f"value {name} of inner": partial(_set_value, "inner", value) for name, value in VALUES.items()},
}
CHANGES: dict[str, Callable[[Nested], Any]] = LATER | {
    "class of inner": lambda block: setattr(block.inner, "__class__", Sine),
    "forward of inner": lambda block: _doubled_forward(block.inner),
    "forward of linear": lambda block: _doubled_forward(block.inner.linear),
    "frozen": lambda block: block.inner.requires_grad_(False),
    "hook": lambda block: block.activation.register_forward_hook(lambda module, args, y: y * 0.7),
    "hook of inner": lambda block: block.inner.register_forward_hook(lambda module, args, y: y * 0.7),
    "hook of linear": lambda block: block.inner.linear.register_forward_hook(lambda module, args, y: y * 0.7),
    "hook before": lambda block: block.inner.register_forward_pre_hook(lambda module, args: (args[0] * 0.7,)),
}
# what the model does before it calls a block: reads for its input what blocks read, or changes it
BEFORE: dict[str, Callable[[Stacked, Nested, int, Tensor], Tensor | None]] = {
    "nothing": lambda model, block, index, x: None,
    "reads value": lambda model, block, index, x: _folded(x, block.value),
    "reads value of inner": lambda model, block, index, x: _folded(x, block.inner.value),
    "reads field of inner": lambda model, block, index, x: _folded(x, block.inner.scaled),
    "reads type": lambda model, block, index, x: x * (1.1 if isinstance(block.value, (bool, str, list)) else 0.9),
    "reads more": lambda model, block, index, x: x * getattr(block, "more", 0.9) * getattr(block.inner, "more", 0.9),
    "reads activation": lambda model, block, index, x: block.activation(x),
    "reads mode": lambda model, block, index, x: x * (1.1 if block.inner.training else 0.9),
    "changes value": lambda model, block, index, x: setattr(block, "value", 0.5 + index % 2),
    "changes field": lambda model, block, index, x: setattr(model.scaled, "factor", 0.5 + index),
    "changes list": lambda model, block, index, x: model.listed.append(0.9),
    "changes dict": lambda model, block, index, x: model.named.update(by=0.5 + index % 2),
}
SHARED: dict[str, Callable[[Stacked, Nested], Any]] = {
    "nothing": lambda model, block: None,
    "value": lambda model, block: setattr(block, "value", model.scaled),
    "list": lambda model, block: setattr(block.inner, "value", model.listed),
    "dict": lambda model, block: setattr(block, "value", model.named),
    "field": lambda model, block: setattr(block.inner, "scaled", model.scaled),
}
# what blocks share with the model, and what that does before each; changes of each block, and of some after a step
Different = tuple[str, str, list[list[str]], list[tuple[int, str]]]


def differences() -> st.SearchStrategy[Different]:
    """Few kinds of changes in each, so that blocks resemble each other."""

    def some(kinds: list[str]) -> st.SearchStrategy[Different]:
        first = st.lists(st.lists(st.sampled_from(kinds), max_size=2, unique=True), min_size=2, max_size=5)
        later = sorted(set(kinds) & set(LATER)) or ["more of inner"]
        changing = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(later)), max_size=2)
        return st.tuples(st.sampled_from(list(SHARED)), st.sampled_from(list(BEFORE)), first, changing)

    return st.lists(st.sampled_from(list(CHANGES)), min_size=1, max_size=3).flatmap(some)


class Stacked(nn.Module):
    def __init__(self, shared: str, before: str, changes: Sequence[Sequence[str]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.scaled, self.listed, self.named = before, Scaled(), [0.9], {"by": 0.9}
        self.scale, self.blocks = nn.Parameter(torch.rand(WIDTH)), nn.ModuleList(Nested() for _ in changes)
        for block, names in zip(self.double().blocks, changes, strict=True):
            SHARED[shared](self, block)
            for name in names:
                CHANGES[name](block)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        del self.listed[:]
        for index, block in enumerate(self.blocks):
            found = BEFORE[self.before](self, block, index, x)
            x = block(x if found is None else found)
        return x


def check_differences(different: Different, rank: int = 0) -> None:
    """Compile a sharded model whose blocks, as regions, differ so; its gradients are those of one process."""
    torch._dynamo.reset()
    shared, before, changes, later = different
    alone, model = Stacked(shared, before, changes), Stacked(shared, before, changes)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with_regions(model, model.blocks)
    call = compiled(model)
    for data in batches(2, 8, WIDTH).double():
        with warnings.catch_warnings():
            # Torch makes a float that changes symbolic, and 2.13 compiles no region with it.
            warnings.filterwarnings("ignore", ".*are compiled as a part of the graph.*invoke_subgraph op")
            square_loss(alone, data).backward()
            square_loss(call, my_part(data)).backward()
        assert_close(full_grads(model), full_grads(alone))
        for each in (alone, model):
            for index, name in later:
                LATER[name](each.blocks[index % len(changes)])
