"""Train a Llama of Transformers with its Trainer, sharded, as one compiled forward and one compiled backward graph.

    torchrun --nproc-per-node 2 examples/train/train_hf.py --out run
    torchrun --nproc-per-node 2 examples/train/train_hf.py --lora run/model --data notes/ --out adapted

The first makes the model from a config, trains all of its parameters on bytes of the Python standard library's source
files, and writes ``run/model``, which ``AutoModelForCausalLM.from_pretrained`` reads. The second trains LoRA adapters
on that and writes only the adapters. ``--resume`` continues from the last checkpoint, on any number of ranks.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from waiting import importing, is_first_rank

with importing("torch and transformers", __name__):
    import data
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from train import positive, start_ranks
    from view import Progress

    try:
        from peft import LoraConfig, get_peft_model
        from transformers import (
            AutoModelForCausalLM,
            LlamaConfig,
            LlamaForCausalLM,
            PrinterCallback,
            Trainer,
            TrainerCallback,
            TrainingArguments,
        )

        from fsdp_compiled.integrations.transformers import ShardedTrainer, shard_pretrained
    except ImportError as error:
        raise SystemExit(f"{error}; install it with: pip install 'fsdp-compiled[ecosystem]'") from error

CONFIG = {
    "vocab_size": 256,  # bytes
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Evenly spaced windows of a text; the model itself shifts the labels."""

    def __init__(self, text: Tensor, count: int, seq: int) -> None:
        self._text, self._seq = text, seq
        self._starts = torch.linspace(0, len(text) - seq, count).long().tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._text[self._starts[index] :][: self._seq].long()
        return {"input_ids": window, "labels": window}


class MyTrainer(ShardedTrainer, Trainer):
    """Trainer for a model that is sharded already."""


class Shown(TrainerCallback):
    """Tells the progress of a trainer."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._note = progress, ""

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._progress.begin("compiling" if args.torch_compile else "training", args.max_steps)

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
        self._note = f"loss {logs['loss']:.4f}" if "loss" in logs else self._note

    def on_step_end(self, args: TrainingArguments, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == 1 and args.torch_compile:
            self._progress.begin("training", args.max_steps)
        self._progress.advance(self._note)

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._progress.say(f"saved checkpoint-{state.global_step}")


def build(args: argparse.Namespace) -> nn.Module:
    """Make or read the model, the same on every rank, and shard it."""
    torch.manual_seed(args.seed)
    if args.lora is None:
        return shard_pretrained(LlamaForCausalLM(LlamaConfig(**CONFIG, max_position_embeddings=args.seq)))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(args.lora), LoraConfig(target_modules="all-linear"))
    return shard_pretrained(adapted)


def make_trainer(args: argparse.Namespace, corpus: data.Corpus, progress: Progress) -> MyTrainer:
    arguments = TrainingArguments(
        str(args.out),
        torch_compile=args.mode == "full",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 10,
        logging_steps=1,
        save_strategy="steps",
        save_steps=args.save_every,
        seed=args.seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
    )
    per_step = args.batch * args.accumulate * dist.get_world_size()
    trainer = MyTrainer(
        build(args),
        arguments,
        train_dataset=Windows(corpus.train, args.steps * per_step, args.seq),
        eval_dataset=Windows(corpus.held_out, 4 * args.batch * dist.get_world_size(), args.seq),
        callbacks=[Shown(progress)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run(args: argparse.Namespace, corpus: data.Corpus, progress: Progress) -> tuple[MyTrainer, float]:
    """Train, save and evaluate; return the trainer and the held-out loss."""
    progress.begin("building the model")
    trainer = make_trainer(args, corpus, progress)
    params = list(trainer.model.parameters())
    trained = sum(param.numel() for param in params if param.requires_grad)
    progress.say(
        f"{sum(p.numel() for p in params) / 1e6:.2f} M parameters, {trained / 1e6:.2f} M of them to be trained"
    )
    trainer.train(resume_from_checkpoint=args.resume)
    progress.begin("saving the model")
    trainer.save_model(str(args.out / "model"))
    progress.begin("evaluating on held-out text")
    return trainer, trainer.evaluate()["eval_loss"]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["full", "eager"], default="full")
    parser.add_argument("--lora", metavar="MODEL_DIR", type=Path, help="train adapters on this model, nothing else")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    parser.add_argument("--data", metavar="FILE_OR_DIR", help="default: Python's standard library")
    parser.add_argument("--steps", type=positive, default=60)
    parser.add_argument("--save-every", type=positive, default=30)
    parser.add_argument("--seq", type=positive, default=128)
    parser.add_argument("--batch", type=positive, default=4, help="sequences per rank and micro-batch")
    parser.add_argument("--accumulate", type=positive, default=1, help="micro-batches per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("run"))
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    with Progress(f"a Llama of Transformers, {args.mode}", visible=is_first_rank()) as progress:
        progress.begin("joining the other ranks")
        start_ranks()
        progress.begin("reading text")
        corpus = data.load(args.data, args.seq)
        progress.say(corpus.description)
        _, held_out = run(args, corpus, progress)
    if is_first_rank():
        print(f"held-out loss {held_out:.4f} ({held_out / math.log(2):.3f} bits per byte); saved in {args.out}/model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
