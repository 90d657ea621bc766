"""The program that holds estimates against published steps, on models whose work is counted by hand."""

from __future__ import annotations

from dataclasses import replace

import published
import pytest
import torch.distributed as dist
from published import ROWS, Row

from fsdp_compiled.passes.cost import CLUSTERS

WIDTH, VOCABULARY, TOKENS = 128, 50368, 2 * 64
FREE = replace(CLUSTERS["H100"], kernel_us=0.0, memory_bytes_per_s=1e30, name="free")


def _row(**kwargs):
    made = {"source": "", "model": "mpt", "cluster": "free", "gpus": 4, "seq": 64, "batch": 2, "tokens_per_s": 1e6}
    return Row(**made | {"checkpointing": "none", "width": WIDTH, "layers": 2} | kwargs)


@pytest.fixture(autouse=True)
def free(monkeypatch):
    monkeypatch.setattr(published, "CLUSTERS", CLUSTERS | {"free": FREE})


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
    for row in ROWS:
        assert row.step_s > 0
        assert row.source
        assert row.cluster in CLUSTERS
