"""Training with Hugging Face libraries on the CPU, and what runs meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch._dynamo.utils import counters

from fsdp_compiled import FSDPModule
from fsdp_compiled.hooks import group
from tests.support import huggingface
from tests.support.training import mean_over_ranks, my_part

MODES = ("eager", "full")
BACKEND = "aot_eager"  # generates no code
each_mode = pytest.mark.parametrize("mode", MODES)


@contextmanager
def accelerate_on_cpu() -> Iterator[None]:
    """Let accelerate take gloo on the CPU for an accelerator: its FSDP plugin is for those only."""
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    def set_device(state):
        state.device = torch.device("cpu")

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    backend = mock.patch.object(
        PartialState, "_prepare_backend", lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    )
    device = mock.patch.object(PartialState, "set_device", set_device)
    with mock.patch.dict(os.environ, environment), backend, device:
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def assert_sharded_by(ours: bool, model: torch.nn.Module) -> None:
    """Assert whose ``fully_shard`` a library has called; let torch's units reduce with gloo, which cannot scale."""
    assert isinstance(model, FSDPModule) == ours
    for unit in model.modules():
        if isinstance(unit, torch.distributed.fsdp.FSDPModule) and not ours:
            unit.set_force_sum_reduction_for_comms(True)


@dataclass
class Seen:
    """What ran: graphs that Dynamo made, where it left them, and the hooks' collectives."""

    graphs: int = 0
    breaks: list[str] = field(default_factory=list)
    hooked: int = 0
    in_graphs: int = 0


@contextmanager
def watch() -> Iterator[Seen]:
    """Count graphs, graph breaks, the collectives of hooks and the all-gathers and reductions inside graphs."""
    seen = Seen()
    torch.compiler.reset()
    counters.clear()
    aot_eager = torch._dynamo.lookup_backend(BACKEND)

    def counted(launch):
        def call(*args, **kwargs):
            seen.hooked += 1
            return launch(*args, **kwargs)

        return call

    def compile_with(graph, inputs, **kwargs):
        unshard = torch.ops.fsdp_compiled.unshard
        seen.in_graphs += sum(node.target in (unshard, unshard.default) for node in graph.graph.nodes)
        return aot_eager(graph, inputs, **kwargs)

    with (
        mock.patch.object(group, "launch_all_gather", counted(group.launch_all_gather)),
        mock.patch.object(group, "launch_reduction", counted(group.launch_reduction)),
        mock.patch.dict("torch._dynamo.backends.registry._COMPILER_FNS", {BACKEND: compile_with}),
    ):
        yield seen
    seen.graphs = counters["stats"]["unique_graphs"]
    seen.breaks = list(counters["graph_break"])


def assert_mode(seen: Seen, mode: str, gathered: int) -> None:
    """Assert that training ran in hooks, or as one graph with so many all-gathers inside and none outside."""
    if mode == "eager":
        assert seen.graphs == 0 and seen.hooked > 0
    else:
        assert seen.graphs == 1 and not seen.breaks, seen
        assert seen.hooked == 0 and seen.in_graphs == gathered, seen


def alone(name: str = "llama", steps: int = 3, lr: float = 1e-2, clip: float | None = None) -> list[float]:
    """Losses of one process with the whole batches."""
    model = huggingface.build(name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)

    def clipped() -> None:
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)

    return losses_of(model, optimizer, False, steps, clipped)


def losses_of(
    call: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    sharded: bool,
    steps: int = 3,
    before_step: Callable[[], object] = lambda: None,
) -> list[float]:
    """Losses of steps on the same tokens: of whole batches or, ``sharded``, means over the ranks' parts."""
    losses = []
    for tokens in huggingface.token_batches(steps):
        loss = huggingface.loss(call, my_part(tokens) if sharded else tokens)
        loss.backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss) if sharded else loss.item())
    return losses


def my_batches(steps: int = 3) -> list[torch.Tensor]:
    """This rank's part of each batch of tokens."""
    return [my_part(tokens) for tokens in huggingface.token_batches(steps)]


def assert_equal_losses(got: list[float], want: list[float], rtol: float = 1e-5) -> None:
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=rtol, atol=0)
