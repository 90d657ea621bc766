"""Trains for long on this rank, fails now and then, and samples what the process holds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fsdp_compiled import (
    RankMismatchError,
    fully_shard,
    fully_shard_with_compiled_compute,
    step_on_shards,
    stream_parameters,
)
from fsdp_compiled.agreement import tripwire
from tests.support.measures import sample
from tests.support.training import batches, full_params, my_part, square_loss

WIDTH, LAYERS = 48, 3
FAILURES = ("forward", "backward", "output", "gradient")  # where a step raises; each in turn
FAILS_EVERY, ACCUMULATES_EVERY, SAMPLES_EVERY = 10, 4, 10
WARM_UP = FAILS_EVERY * len(FAILURES)

armed: list[str] = []  # "forward" or "backward": where the operator below raises when it runs next


class Stop(Exception):
    """What a step is ended with."""


def _raise_if_armed(where: str) -> None:
    if where in armed:
        armed.remove(where)
        raise Stop(where)


@torch.library.custom_op("fsdp_compiled_soak::forward", mutates_args=())
def may_stop(x: Tensor) -> Tensor:
    """Copy ``x``, or raise: in the middle of a graph too, which does not look inside."""
    _raise_if_armed("forward")
    return x.clone()


@torch.library.custom_op("fsdp_compiled_soak::backward", mutates_args=())
def may_stop_backward(grad: Tensor) -> Tensor:
    _raise_if_armed("backward")
    return grad.clone()


may_stop.register_fake(torch.empty_like)
may_stop_backward.register_fake(torch.empty_like)
may_stop.register_autograd(lambda ctx, grad: may_stop_backward(grad))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(may_stop(self.up(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Trained:
    """A model, how it is called, and its optimizers: Muon for the layers' matrices, AdamW for the others."""

    mode: str
    model: Any = field(default_factory=Model)

    def __post_init__(self) -> None:
        for layer in self.model.layers:
            (fully_shard_with_compiled_compute if self.mode == "regional" else fully_shard)(layer)
        fully_shard(self.model)
        self.call = torch.compile(self.model, fullgraph=True) if self.mode == "full" else self.model
        matrices = {param: None for param in self.model.layers.parameters() if param.ndim == 2}
        others = [param for param in self.model.parameters() if param not in matrices]
        made = torch.optim.AdamW(others, lr=1e-3), torch.optim.Muon([*matrices], lr=1e-3)
        self.optimizers = list(map(step_on_shards, made))

    def step(self, number: int, failure: str = "") -> None:
        """One step, of two batches now and then; after ``failure`` it is dropped."""
        data = batches(2 if number % ACCUMULATES_EVERY == 3 else 1, 8, WIDTH, seed=number)
        for index, batch in enumerate(data):
            is_last = index == len(data) - 1
            self.model.set_requires_gradient_sync(is_last)
            self._backward(my_part(batch), failure if is_last else "")
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()

    def _backward(self, batch: Tensor, failure: str) -> None:
        hooks = []
        if failure in ("forward", "backward"):
            armed.append(failure)
        if failure == "gradient":
            hooks.append(self.model.layers[1].up.weight.register_post_accumulate_grad_hook(_stop))
        try:
            loss = square_loss(self.call, batch)
            if failure == "output":
                loss.register_hook(_stop)
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()

    def failing_step(self, number: int, failure: str) -> None:
        """A step that must raise, and what users do then."""
        try:
            self.step(number, failure)
        except Stop:
            pass
        else:
            raise AssertionError(f"step {number}: expected {failure} to raise")
        finally:
            armed.clear()
        self.model.zero_grad()
        if (
            number % 20 == 17 or number % ACCUMULATES_EVERY == 3
        ):  # else the next forward notices; stored gradients stay
            self.model.reset_iter_state()


def _stop(tensor: Tensor) -> None:
    raise Stop("hook")


def train_for_long(mode: str, steps: int, seconds: float, path: str, rank: int) -> None:
    """Train two equal models, one of which fails now and then, and write samples.

    Raises:
        AssertionError: the one that failed has other parameters.
    """
    clean, failing = Trained(mode), Trained(mode)
    for number in _until(steps, seconds):
        if number % FAILS_EVERY == FAILS_EVERY - 3:
            failing.failing_step(number, FAILURES[number // FAILS_EVERY % len(FAILURES)])
        for each in (clean, failing):
            each.step(number)
        _stream(failing.model, number, rank)
        if number >= WARM_UP and number % SAMPLES_EVERY == 0:
            _write(path, rank, number)
            _assert_equal(clean.model, failing.model, number)


def _stream(model: nn.Module, number: int, rank: int) -> None:
    """Stream all parameters twice; now and then one rank stops the second stream in the middle."""
    got = dict(stream_parameters(model, bucket_bytes=2**14))
    if number % SAMPLES_EVERY == 0:
        for name, want in full_params(model).items():
            assert torch.equal(got[name], want), f"{name}: streamed differently after {number} steps"
    one_stops, stream = number % FAILS_EVERY == 5, stream_parameters(model, bucket_bytes=2**14)
    if one_stops and rank == number // FAILS_EVERY % 2:
        next(stream)
        stream.close()
        return
    try:
        assert len(dict(stream)) == len(got) and not one_stops
    except RankMismatchError:
        if not one_stops:
            raise


def _assert_equal(clean: nn.Module, failing: nn.Module, number: int) -> None:
    expected = full_params(clean)
    for name, got in full_params(failing).items():
        assert torch.equal(got, expected[name]), f"{name}: differs after {number} steps, some of which had failed"


@mock.patch.object(tripwire, "_KEPT_ENTRIES", 64)  # so that it forgets as much as it notes before the first sample
def train_many(mode: str, models: int, seconds: float, path: str, rank: int) -> None:
    """Train one model after another of one class, each dropped before the next, and write samples.

    Raises:
        AssertionError: the models after the first were compiled anew.
    """
    counters.clear()
    for number in _until(models, seconds):
        trained = Trained(mode)
        for step in (1, 2):
            trained.step(step)
        del trained
        if number >= models // 5:
            _write(path, rank, number)
        if number == 1:
            compiled_once = counters["stats"]["unique_graphs"]
    compiled = counters["stats"]["unique_graphs"]
    assert compiled == compiled_once, f"expected {compiled_once} graphs for models of one class, got {compiled}"


def _until(most: int, seconds: float) -> Iterator[int]:
    """Count from 1 while rank 0 has time left; the first ten, which compile, take none of it."""
    end = time.monotonic() + seconds
    for number in range(1, most + 1):
        if number == 10:
            end = time.monotonic() + seconds
        if number % 10 == 0:
            has_time = torch.tensor(time.monotonic() < end)
            dist.broadcast(has_time, 0)
            if not has_time:
                return
        yield number


def _write(path: str, rank: int, step: int) -> None:
    """Sample into a file: samples that this process kept would be objects of their own."""
    with Path(f"{path}.{rank}").open("a") as file:
        print(json.dumps(asdict(sample(step))), file=file)
