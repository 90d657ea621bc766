"""The estimated memory of a step: its parts counted by hand, and its peak against what a profiler sees."""

from __future__ import annotations

import json

import pytest
import torch
from memory import Case, measured_peak
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_compiled
from fsdp_compiled import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp_compiled.inspect import OPTIMIZERS, capture
from fsdp_compiled.passes.cost.matrix_cost import newton_schulz_us
from tests.support.ranks import on_ranks

BOUND = 0.05  # of the measured peak


def _captured(layers=2, width=16, rows=64, **kwargs):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mp_policy=kwargs.pop("mp_policy", MixedPrecisionPolicy()))
    return capture(fully_shard(model), torch.ones(rows, width), code=False, **kwargs)


@pytest.mark.usefixtures("fake_group")
def test_what_a_rank_holds_is_counted_exactly():
    shard = 16 * 16 * 4 // 4
    memory = _captured().memory
    assert memory.parts["parameters"] == 2 * shard
    assert memory.parts["optimizer state"] == 2 * 2 * shard
    assert memory.parts["batch and buffers"] == 64 * 16 * 4
    # The first layer needs its input, which the batch is, and the second the first one's output.
    assert memory.parts["saved activations"] == 64 * 16 * 4
    assert sum(memory.parts.values()) == memory.peak.bytes == max(level.bytes for level in memory.curve)
    assert memory.curve[-1].bytes >= 2 * 4 * shard  # parameters, state and gradients remain


@pytest.mark.usefixtures("fake_group")
def test_what_lies_on_the_host_takes_no_memory_of_the_device():
    layer, offload = nn.Linear(16, 16, bias=False), CPUOffloadPolicy(pin_memory=False)
    memory = capture(fully_shard(layer, offload_policy=offload), torch.ones(64, 16), code=False).memory
    assert memory.reduced_bytes == 0
    assert memory.curve[-1].bytes == memory.curve[0].bytes == 64 * 16 * 4  # the batch


@pytest.mark.usefixtures("fake_group")
def test_gradients_without_sync_stay_unsharded():
    layer = fully_shard(nn.Linear(16, 16, bias=False))
    layer.set_requires_gradient_sync(False)
    memory = capture(layer, torch.ones(64, 16), code=False).memory
    assert memory.curve[-1].bytes == memory.curve[0].bytes + 16 * 16 * 4  # parameters, state, the batch and the sum


class Experts(nn.Module):
    """A parameter that expert parallelism alone shards, and a matrix."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(16, 16, bias=False)
        self.experts = nn.Parameter(distribute_tensor(torch.ones(64, 16), init_device_mesh("cpu", (4,)), [Shard(0)]))

    def forward(self, x):
        return self.matrix(x) @ self.experts.to_local().T


@pytest.mark.usefixtures("fake_group")
def test_a_parameter_that_only_other_parallelism_shards_counts_as_its_part():
    model = Experts()
    fully_shard(model, ignored_params={model.experts})
    parts = capture(model, torch.ones(64, 16), code=False).memory.parts
    assert parts["parameters"] == (16 * 16 + 64 * 16) * 4 // 4


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_differ_by_their_state(kind):
    captured, least = _captured(optimizer=kind), _captured(optimizer="sgd")
    assert "optimizer state" not in {part for part, size in least.memory.parts.items() if size}
    state = 1 if kind == "muon" else OPTIMIZERS[kind].state  # both parameters are matrices of inner units
    assert captured.peak_bytes - least.peak_bytes == state * 2 * 16 * 16 * 4 // 4


@pytest.mark.usefixtures("fake_group")
def test_an_unknown_optimizer_is_an_error():
    expected = "optimizer: expected one of adamw, adam, rmsprop, sgd_momentum, sgd, muon, got 'lion'"
    with pytest.raises(ValueError, match=expected):
        _captured(optimizer="lion")


@pytest.mark.usefixtures("fake_group")
def test_more_layers_take_more_and_no_gradients_take_less():
    assert _captured(layers=4).peak_bytes > _captured().peak_bytes
    with torch.no_grad():
        inference = _captured()
    assert inference.peak_bytes < _captured().peak_bytes
    assert {level.graph for level in inference.memory.curve} == {"step", "inference", "optimizer"}


@pytest.mark.usefixtures("fake_group")
def test_what_is_fused_takes_no_memory():
    class Fused(nn.Module):
        def __init__(self, steps):
            super().__init__()
            self.first, self.last, self.steps = nn.Linear(16, 16), nn.Linear(16, 16), steps

        def forward(self, x):
            x = self.first(x)
            for _ in range(self.steps):
                x = torch.relu(x + 1.0)
            return self.last(x)

    def peak(steps):
        return capture(fully_shard(Fused(steps)), torch.ones(4096, 16), code=False).memory

    one, many = peak(1), peak(6)
    assert many.peak.bytes - one.peak.bytes < 2 * 4096 * 16 * 4  # five results and masks more


@pytest.mark.usefixtures("fake_group")
def test_every_report_shows_it(tmp_path):
    captured = _captured()
    memory = captured.memory
    assert memory.reserved_bytes == int(1.05 * captured.peak_bytes)
    assert "memory of a step, by estimate: peak" in str(captured)
    found = json.loads(captured.save(tmp_path / "capture.json").read_text())
    assert found["peak_bytes"] == captured.peak_bytes
    assert found["memory"]["parts"] == memory.parts
    page = captured.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Memory of a step, by estimate" in page and "Alive at the peak" in page


@pytest.mark.usefixtures("fake_group")
def test_a_capture_is_of_its_own_sizes_whatever_was_captured_before():
    captured = [_captured(rows=rows) for rows in (64, 48, 32, 64)]
    inputs = [
        n.meta["val"] for each in captured for g in each.graphs for n in g.module.graph.find_nodes(op="placeholder")
    ]
    assert all(isinstance(value, torch.Tensor) for value in inputs)  # torch varies what has varied, from the third on
    assert captured[0].peak_bytes == captured[-1].peak_bytes > captured[1].peak_bytes


@on_ranks(2, timeout_s=400)
def test_the_estimate_is_near_what_a_step_takes():
    torch.compiler.reset()  # after other sizes, torch would compile the step for sizes that vary
    model, batch = Case(layers=2, width=64, seq=64, batch=2).model()
    call = fsdp_compiled.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        call(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def held():
        states = (value for state in optimizer.state.values() for value in state.values())
        return [*model.parameters(), *model.buffers(), *batch, *filter(torch.is_tensor, states)]

    measured = measured_peak(step, held)
    torch.testing.assert_close(
        1.0 * capture(model, *batch, code=False).peak_bytes, 1.0 * measured, rtol=BOUND, atol=0
    )


@pytest.mark.usefixtures("fake_group")
def test_muon_is_of_matrices_in_inner_units_and_adamw_of_the_others():
    model = nn.Sequential(nn.Embedding(16, 32), nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)))
    fully_shard(model[1])
    fully_shard(model)
    batch = torch.zeros(8, 16, dtype=torch.int64)
    found = {kind: capture(model, batch, code=False, optimizer=kind) for kind in ("muon", "adamw", "sgd")}
    state = {kind: each.memory.parts.get("optimizer state", 0) for kind, each in found.items()}
    matrices, others = 2 * 32 * 64, 16 * 32 + 64 + 32
    assert state == {"muon": 4 * (matrices + 2 * others) // 4, "adamw": 4 * 2 * (matrices + others) // 4, "sgd": 0}
    products_us = sum(newton_schulz_us([(64, 32), (32, 64)], found["muon"].cluster)) / 2  # an owner has one of them
    assert found["muon"].optimizer_us > products_us > 0
