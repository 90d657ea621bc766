"""transformers.Trainer with FSDP version 2, unmodified, with the switch."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from fsdp_compiled import FSDPModule, as_torch_fsdp
from tests.ecosystem.training import (
    BACKEND,
    accelerate_on_cpu,
    alone,
    assert_equal_losses,
    assert_mode,
    each_mode,
    watch,
)
from tests.support import huggingface
from tests.support.ranks import on_ranks
from tests.support.training import assert_close, full_params

STEPS = 4


class Tokens(torch.utils.data.Dataset):
    """The rows of the batches, in the order in which a distributed loader gives each rank its part of a batch."""

    def __init__(self):
        self.rows = huggingface.token_batches(STEPS).flatten(0, 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class InOrder(Trainer):
    """Trains on the rows in order, so that one process can do the same."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def _arguments(mode, folder, **kwargs):
    compiled = {"torch_compile": True, "torch_compile_backend": BACKEND} if mode == "full" else {}
    options = {
        "output_dir": str(folder),
        "use_cpu": True,
        "fsdp": True,
        "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }
    return TrainingArguments(**options | compiled | kwargs)


def _trainer(mode, folder, model=None, **kwargs):
    model = huggingface.build("llama") if model is None else model
    return InOrder(model=model, args=_arguments(mode, folder, **kwargs), train_dataset=Tokens())


def _losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@each_mode
@on_ranks(2)
def test_trains_like_one_process(mode, tmp_path):
    with accelerate_on_cpu(), watch() as seen, as_torch_fsdp():
        trainer = _trainer(mode, tmp_path)
        trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    assert isinstance(model, FSDPModule)
    assert_equal_losses(_losses(trainer), alone(steps=STEPS, clip=1.0), rtol=1e-4)  # the log rounds
    assert_mode(seen, mode, len(list(model.parameters())))


@each_mode
@on_ranks(2)
def test_accumulates(mode, tmp_path):
    """Two micro-batches of half the size give the parameters of whole batches."""
    found = []
    for split in ({}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}):
        with accelerate_on_cpu(), watch(), as_torch_fsdp():
            trainer = _trainer(mode, tmp_path, **split)
            trainer.train()
        found.append(full_params(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)))
    assert_close(found[1], found[0], rtol=1e-4)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@each_mode
@on_ranks(2)
def test_saves_resumes_and_exports(mode, kind, tmp_path):
    config = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": kind}
    options = {"fsdp_config": config, "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2}
    with accelerate_on_cpu(), as_torch_fsdp():
        first = _trainer(mode, tmp_path, **options)
        first.train()
        want = full_params(first.accelerator.unwrap_model(first.model, keep_torch_compile=False))
        again = _trainer(mode, tmp_path, **options)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert _losses(again) == _losses(first)
        got = full_params(again.accelerator.unwrap_model(again.model, keep_torch_compile=False))
        assert_close(got, want, rtol=1e-6)
        if kind == "FULL_STATE_DICT":
            again.save_model(str(tmp_path / "export"))
            again.accelerator.wait_for_everyone()
            files = load_file(tmp_path / "export" / "model.safetensors")
            assert_close(files, {name: want[name] for name in files}, rtol=1e-6)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
            assert not any(isinstance(param, DTensor) for param in loaded.parameters())
            assert_close(dict(loaded.named_parameters()), want, rtol=1e-6)
