"""TRL's trainers on preferences with FSDP version 2, unmodified, with the switch: a reference model, too."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

import trl
from datasets import Dataset
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fsdp_compiled import FSDPModule, as_torch_fsdp
from tests.ecosystem.test_trl import SHARDED, options, tokenizer
from tests.ecosystem.training import MODES, accelerate_on_cpu, assert_equal_losses
from tests.support import huggingface
from tests.support.ranks import on_ranks

PREFERENCES = ("prompt", "chosen", "rejected")
COLUMNS = {"DPO": PREFERENCES, "KTO": ("prompt", "completion", "label"), "Reward": PREFERENCES[1:]}


def _data(kind):
    generator = torch.Generator().manual_seed(0)

    def value(column, row):
        if column == "label":
            return bool(row % 2)
        return " ".join(f"w{word}" for word in torch.randint(3, huggingface.VOCAB, (5,), generator=generator))

    return Dataset.from_list([{column: value(column, row) for column in COLUMNS[kind]} for row in range(16)])


def _train(kind, mode, saved, folder):
    settings = {**options(mode, folder), **SHARDED, "per_device_train_batch_size": 2, "max_steps": 3}
    words = tokenizer()
    words.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    torch.manual_seed(0)  # of the head that scores
    one = {"num_labels": 1, "pad_token_id": 0} if kind == "Reward" else {}
    made = AutoModelForSequenceClassification if one else AutoModelForCausalLM
    trainer = getattr(trl, f"{kind}Trainer")(
        model=made.from_pretrained(saved, **one),
        args=getattr(trl, f"{kind}Config")(**settings),
        train_dataset=_data(kind),
        processing_class=words,
    )
    trainer.train()
    models = [trainer.model, *([] if one else [trainer.ref_model])]
    units = [trainer.accelerator.unwrap_model(model, keep_torch_compile=False) for model in models]
    return units, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@on_ranks(2)
def _trains_like_fsdp2(kind, mode, saved, folder):
    losses = {}
    for switch, used in ((nullcontext, "eager"), (as_torch_fsdp, mode)):
        with accelerate_on_cpu(), switch():
            units, losses[switch] = _train(kind, used, saved, folder)
    assert all(isinstance(unit, FSDPModule) for unit in units)
    assert len(set(losses[nullcontext])) == 3
    assert_equal_losses(losses[as_torch_fsdp], losses[nullcontext], rtol=1e-4)  # the log rounds


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", COLUMNS)
def test_trains_like_fsdp2(kind, mode, tmp_path):
    torch.manual_seed(0)
    huggingface.MODELS["llama"]().save_pretrained(tmp_path / "saved")
    _trains_like_fsdp2(kind=kind, mode=mode, saved=str(tmp_path / "saved"), folder=str(tmp_path))
