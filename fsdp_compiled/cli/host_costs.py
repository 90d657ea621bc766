"""Measures what the host takes for a kernel and for a parameter, by compiling two small models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..api import compile, fully_shard
from ..inspect.capture import capture
from ..optim import step_on_shards
from ..passes.cost import Cluster
from ..policy import SchedulePolicy

WIDTH = 16  # of matrices whose products take no time
_LAYERS = 96  # so that what a step takes whatever its parameters counts little
Seconds = Callable[[Callable[[], object]], float]


class _Layers(nn.Module):
    """Products with something between them that is not fused into them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.sum()


def with_host_costs(cluster: Cluster, device: torch.device, seconds_of: Seconds) -> Cluster:
    """Return the cluster with what the host takes; all ranks of the default group must call it.

    A kernel's time is that of a forward, less what its work is taken to last if ranks compute on the host. A
    parameter's is what a training step takes beyond everything else that it is estimated to take.

    Args:
        seconds_of: measures a call's time, alike on all ranks.
    """
    model, batch = _Layers().to(device), torch.randn(WIDTH, WIDTH, device=device)
    forward = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        kernel_us = 1e6 * seconds_of(lambda: forward(batch)) / (2 * _LAYERS)
    launch_us = max(0.0, kernel_us - cluster.kernel_us) if cluster.on_host else kernel_us
    cluster = replace(cluster, launch_us=launch_us, parameter_us=0.0)

    schedule = SchedulePolicy(cluster=cluster)
    call = compile(fully_shard(model), schedule=schedule, fullgraph=True)
    optimizer = step_on_shards(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step() -> None:
        call(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    found = capture(model, batch, schedule=schedule, code=False)
    kernels = sum(len(graph.kernels) for graph in found.graphs)
    known_us = found.step_us if cluster.on_host else kernels * launch_us
    left_us = 1e6 * seconds_of(step) - known_us
    return replace(cluster, parameter_us=max(0.0, left_us / found.trained))
