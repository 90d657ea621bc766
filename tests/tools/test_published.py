"""The program that holds estimates against published steps, on models whose work is counted by hand."""

from __future__ import annotations

from dataclasses import replace

import as_published
import published
import pytest
import torch
import torch.distributed as dist
from published import STEPS, Row

from fsdp_compiled.passes.cost import CLUSTERS

WIDTH, VOCABULARY, TOKENS = 128, 50368, 2 * 64
WAVES = as_published.waves
FREE = replace(CLUSTERS["H100"], kernel_us=0.0, memory_bytes_per_s=1e30, name="free")


def _row(**kwargs):
    made = {"source": "", "model": "mpt", "cluster": "free", "gpus": 4, "seq": 64, "batch": 2, "tokens_per_s": 1e6}
    return Row(**made | {"checkpointing": "none", "width": WIDTH, "layers": 2} | kwargs)


@pytest.fixture(autouse=True)
def free(monkeypatch):
    monkeypatch.setattr(published, "CLUSTERS", CLUSTERS | {"free": FREE})
    monkeypatch.setattr(as_published, "waves", lambda height, width: 1.0)


@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_products_and_attention_of_an_uncompiled_model(checkpointing, accumulation):
    found = published.estimate(_row(checkpointing=checkpointing, accumulation=accumulation))
    again = checkpointing == "blocks"  # but for the last product of a block, whose result nothing needs
    flops = TOKENS * 2 * ((3 * 12 + 8 * again) * 2 * WIDTH**2 + 3 * WIDTH * VOCABULARY)
    assert found["parts_s"]["products"] == pytest.approx(accumulation * flops / (FREE.efficiency * FREE.flops_16bit))
    attention, (forward, backward) = 2 * 2 * 2 * 64**2 * WIDTH, FREE.attention_efficiency
    seconds = attention * ((1 + again) / forward + 2.5 / backward) / FREE.flops_16bit
    assert found["parts_s"]["attention"] == pytest.approx(accumulation * seconds)
    assert found["step_s"] == accumulation * TOKENS / 1e6
    assert found["error"] == found["estimated_step_s"] / found["step_s"] - 1


@pytest.mark.parametrize(
    ("shape", "waves", "of"), [((1536, 6144), 3, 288), ((6144, 1536), 3, 288), ((2048, 2048), 1, 128)]
)
def test_processors_without_a_tile(shape, waves, of):
    assert WAVES(*shape) == waves * 132 / of


def test_models_have_as_many_parameters_as_published():
    with torch.device("meta"):
        mpt = as_published.Mpt(1536, 24, 2048, recomputes=False)
        llama = published.made_as_published(STEPS[1])
    assert sum(param.numel() for param in mpt.parameters()) == 760_470_528
    assert sum(param.numel() for param in llama.parameters()) == 8_030_261_248


def test_a_compiled_model_is_captured():
    row = _row(cluster="H100", is_compiled=True, memory_gib=1.0)
    try:
        found = published.estimate(row)
    finally:
        dist.destroy_process_group()
    assert found["estimated_step_s"] >= published.estimate(replace(row, is_compiled=False))["parts_s"]["products"] / 2
    assert 0 < found["estimated_memory_gib"] < 1
    assert f"| {WIDTH} x 2 |" in published.line(found).replace("mpt ", "")


def test_every_row_says_what_was_published():
    for row in STEPS:
        assert row.step_s > 0
        assert row.source
        assert row.cluster in CLUSTERS
