"""TRL's SFTTrainer with FSDP version 2, unmodified, with the switch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from fsdp_compiled import FSDPModule, as_torch_fsdp
from tests.ecosystem.training import BACKEND, MODES, accelerate_on_cpu, assert_equal_losses, watch
from tests.support import huggingface
from tests.support.ranks import on_ranks

STEPS = 3


def tokenizer():
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{number}": number for number in range(3, huggingface.VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


def options(mode, folder):
    """The arguments that TRL's trainers share."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "torch_compile": mode == "full",
        "torch_compile_backend": BACKEND if mode == "full" else None,
        "seed": 0,
    }


def _train(mode, folder):
    arguments = SFTConfig(**options(mode, folder), **SHARDED, per_device_train_batch_size=2, max_steps=STEPS)
    rows = [{"input_ids": row.tolist()} for row in huggingface.token_batches(STEPS).flatten(0, 1)]
    trainer = SFTTrainer(
        model=huggingface.build("llama"),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_trains_like_fsdp2(mode, tmp_path):
    losses = {}
    for switch, used in ((nullcontext, "eager"), (as_torch_fsdp, mode)):
        with accelerate_on_cpu(), watch() as seen, switch():
            trainer, losses[switch] = _train(used, tmp_path)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    assert isinstance(model, FSDPModule)
    assert_equal_losses(losses[as_torch_fsdp], losses[nullcontext], rtol=1e-4)  # the log rounds
    if mode == "eager":
        assert seen.graphs == 0 and seen.hooked > 0
    else:
        assert seen.hooked == 0
        assert (seen.graphs, len(seen.breaks)) == _graphs_of_one_process()


def _graphs_of_one_process():
    """Graphs and graph breaks of a model that is not sharded: Dynamo does not trace TRL's fused LM head."""
    from trl.trainer.sft_trainer import add_fused_lm_head

    model = huggingface.build("llama")
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    with watch() as seen:
        tokens = huggingface.token_batches(1)[0]
        output = torch.compile(model, backend=BACKEND)(input_ids=tokens, labels=tokens, fused_lm_head=True)
        output.log_probs.sum().backward()
    return seen.graphs, len(seen.breaks)
