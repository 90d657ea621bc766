"""A tiny model whose path a rank can change, and what must hold when ranks then differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._inductor.compile_fx import compile_fx

from fsdp_compiled import SchedulePolicy, fully_shard, fully_shard_with_compiled_compute
from fsdp_compiled.errors import RankFailureError, RankMismatchError
from fsdp_compiled.passes import CLUSTERS, Link
from tests.support.graphs import without_code
from tests.support.training import with_regions

MODES = ("eager", "regional", "full")
WIDTH = 8
_WITHIN_S = 10.0  # after all have compiled

# Links so different that ranks on one node gather parameters in pieces, and others all at once.
NEAR, FAR = Link(1.0, 0.1, 1e6), Link(20000.0, 1.0, 1e6)
MACHINE = replace(
    CLUSTERS["CPU"],
    flops_32bit=4e9,
    memory_bytes_per_s=4e9,
    kernel_us=0.1,
    piece_us=0.0,
    compute_blocked_fraction=0.0,
    intra=NEAR,
    inter=FAR,
    ranks_per_node=4,
)


class Model(nn.Module):
    """Equal layers that run in ``order``."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.order = list(range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x).tanh()
        return x


@dataclass
class Trainer:
    """A sharded model and one step of it."""

    model: nn.Module
    call: Callable[..., Tensor]
    rows: int = 4

    def batch(self, number: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        return torch.randn(self.rows, WIDTH, generator=generator)

    def step(self, number: int = 0) -> float:
        """Take an SGD step by hand; return the loss on this rank."""
        loss = self.call(self.batch(number)).square().mean()
        loss.backward()
        with torch.no_grad():
            for param in self.model.parameters():
                param -= 0.1 * param.grad
                param.grad = None
        return loss.item()


def trainer(
    mode: str, model: nn.Module | None = None, schedule: SchedulePolicy | None = None, **kwargs: Any
) -> Trainer:
    model = Model() if model is None else model
    of_blocks = {"reshard_after_forward": True, **kwargs}  # or graphs would keep parameters that are so small
    for block in model.blocks:
        if mode == "regional":
            fully_shard_with_compiled_compute(block, compile_kwargs={"backend": "eager"}, **of_blocks)
        else:
            fully_shard(block, **of_blocks)
    fully_shard(model, **kwargs)
    if mode == "regions":
        with_regions(model, model.blocks)
    return Trainer(model, compiled(model, schedule) if mode in ("full", "regions") else model)


def compiled(call: Callable[..., Any], schedule: SchedulePolicy | None = None, **options: Any) -> Callable[..., Any]:
    """Compile to one graph that runs as the passes leave it, without generating code."""

    def run_passes(gm: Any, inputs: Any, **_: Any) -> Any:
        return without_code(gm, schedule or SchedulePolicy())

    def backend(gm: Any, inputs: Any, **_: Any) -> Any:
        patches = {"force_disable_caches": True, **options}
        return compile_fx(gm, inputs, inner_compile=run_passes, config_patches=patches)

    return torch.compile(call, fullgraph=True, backend=backend)


def launched() -> int:
    """How many collectives this process has started on any group."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


class CompileClock:
    """When this process last ended compiling."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        callback_handler.register_end_callback(self._note)

    def _note(self, _: Any) -> None:
        self.at = time.monotonic()


def assert_all_refuse(step: Callable[[], Any], *texts: str) -> None:
    """Every rank raises the same RankMismatchError with these texts, soon after the last has compiled.

    No collective is started, and the process group is as good as before.
    """
    clock, before = CompileClock(), launched()
    with pytest.raises(RankMismatchError) as caught:
        step()
    raised_at = time.monotonic()
    assert launched() == before
    ends = [None] * dist.get_world_size()
    dist.all_gather_object(ends, (clock.at, raised_at, str(caught.value)))
    assert max(end[1] for end in ends) - max(end[0] for end in ends) < _WITHIN_S
    assert len({end[2] for end in ends}) == 1, ends
    for text in texts:
        assert text in str(caught.value)


def assert_all_end(step: Callable[[], Any], *texts: str, within_s: float = _WITHIN_S) -> None:
    """Every rank raises RankMismatchError or, where others of its groups have failed, RankFailureError."""
    clock = CompileClock()
    with pytest.raises((RankMismatchError, RankFailureError)) as caught:
        step()
    assert time.monotonic() - clock.at < within_s
    for text in texts:
        assert text in str(caught.value)
