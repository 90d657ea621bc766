"""examples/train/train_hf.py: pretraining, a stop between, and LoRA on what came out."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data import Corpus
from view import Progress

pytest.importorskip("transformers")
pytest.importorskip("peft")

import train_hf
from safetensors.torch import load_file

from tests.ecosystem.training import BACKEND, accelerate_on_cpu, each_mode, watch
from tests.support.ranks import on_ranks
from tests.support.training import assert_close, full_params

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def run(mode: str, out: Path, *options: str):
    """Take 4 steps on a made-up text; return the trainer and the held-out loss."""
    text = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    sizes = ["--steps", "4", "--save-every", "2", "--seq", "16", "--batch", "2", "--lr", "0.01"]
    args = train_hf.parse(["--mode", mode, "--out", str(out), *sizes, *options])
    arguments = train_hf.TrainingArguments

    def without_code(*given, torch_compile, **kwargs):
        backend = BACKEND if torch_compile else None
        return arguments(*given, torch_compile=torch_compile, torch_compile_backend=backend, **kwargs)

    small = mock.patch.dict(train_hf.CONFIG, TINY)
    backend = mock.patch.object(train_hf, "TrainingArguments", without_code)
    with accelerate_on_cpu(), small, backend, Progress("", visible=False) as progress:
        return train_hf.run(args, Corpus(text, text, ""), progress)


@each_mode
@on_ranks(2)
def test_trains_adapts_and_resumes(mode, tmp_path):
    trainer, _ = run(mode, tmp_path)
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert_close(exported, full_params(trainer.model), rtol=0)

    lora = ["--lora", str(tmp_path / "model")]
    with watch() as seen:
        adapted, held_out = run(mode, tmp_path / "adapted", *lora)
    assert (seen.graphs, seen.in_graphs > 0, seen.breaks) == ((1, True, []) if mode == "full" else (0, False, []))
    want = full_params(adapted.model)
    trained = {name for name, param in adapted.model.named_parameters() if param.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert all(want[name].abs().max() > 0 for name in trained)  # half of them begin as zeros
    saved = load_file(tmp_path / "adapted" / "model" / "adapter_model.safetensors")
    assert_close(saved, {name.replace(".default", ""): want[name] for name in trained}, rtol=0)

    if dist.get_rank() == 0:
        shutil.rmtree(tmp_path / "adapted" / "checkpoint-4")
    dist.barrier()
    resumed, held_out_again = run(mode, tmp_path / "adapted", *lora, "--resume")
    assert_close(full_params(resumed.model), want, rtol=1e-6)
    assert held_out_again == pytest.approx(held_out, rel=1e-6)
