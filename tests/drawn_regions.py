"""Blocks that hypothesis draws, each a region of an unsharded model; what they keep for backward may share memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.compiler import nested_compile_region

from fsdp_compiled.passes import region_options

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
        generator = torch.Generator().manual_seed(0)
        shapes = ((4, 5, WIDTH), (WIDTH, WIDTH))
        inputs = [torch.randn(s, generator=generator, dtype=torch.float64).mul(0.3).requires_grad_() for s in shapes]
        output = call(*inputs)
        output.square().mean().backward()
        found.append([output.detach(), *(each.grad for each in inputs)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
