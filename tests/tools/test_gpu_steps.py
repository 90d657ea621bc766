"""The program that holds estimates against steps on a GPU: what it does without one."""

from __future__ import annotations

import gpu_steps
import pytest
import torch.distributed as dist
from published import ROWS, Row, made

from fsdp_compiled.passes.cost import CLUSTERS


def _row(**kwargs):
    sizes = {"gpus": 4, "seq": 64, "batch": 2, "tokens_per_s": 1e6, "width": 128, "layers": 2}
    return Row(**{"source": "", "model": "mpt", "cluster": "H200", "checkpointing": "none"} | sizes | kwargs)


def test_kernels_by_kind():
    kernels = [
        ("nvjet_sm90_tst_192x192", 7, 10, 0.5),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 7, 2, 0.25),
        ("triton_poi_fused_add", 7, 3, 0.125),
        ("Memcpy DtoD", 7, 3, 0.125),
        ("Memcpy DtoD", 18, 4, 0.375),
        ("_copy", 14, 4, 0.125),
    ]
    parts = {"products": 0.5, "attention": 0.25, "others": 0.25, "side streams": 0.5}
    assert gpu_steps.by_kind(kernels) == parts


def test_an_eager_step_also_packs_gradients():
    row = _row()
    found = gpu_steps.estimated(row)
    numel = sum(param.numel() for param in made(row).parameters())
    packing = found["parts_s"]["packing"]
    assert packing == pytest.approx(
        6 * numel / CLUSTERS["H200"].memory_bytes_per_s / CLUSTERS["H200"].memory_efficiency
    )
    assert found["estimated_step_s"] == pytest.approx(sum(found["parts_s"].values()))


def test_a_compiled_step_is_captured():
    try:
        found = gpu_steps.estimated(_row(is_compiled=True))
    finally:
        dist.destroy_process_group()
    assert found["estimated_step_s"] == pytest.approx(sum(found["parts_s"].values()))
    assert found["estimated_peak_gib"] > 0


def test_its_rows_are_published_ones():
    assert all(ROWS[index].cluster.startswith("H100") for index in gpu_steps.CASES)
