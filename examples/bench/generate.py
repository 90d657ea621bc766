"""Time Hugging Face's ``generate`` of a sharded model, with its parameters kept unsharded and without.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/bench/generate.py

Contenders run in turn on a Llama of 28 million parameters made from its config; every rank generates greedily from
prompts of its own, each token by a forward with a cache. Times are medians. ``--json FILE`` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_compiled

VOCAB = 4096


def build(shard: Callable[[nn.Module], nn.Module] | None) -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, eos_token_id=None, pad_token_id=0, **size, **heads)).eval()
    for each in (*model.model.layers, model) if shard else ():
        shard(each)
    return model


def seconds_of(model: nn.Module, around: AbstractContextManager[None], prompt: torch.Tensor, tokens: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    with around:
        model.generate(prompt, max_new_tokens=tokens, do_sample=False)
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    ours = build(fsdp_compiled.fully_shard)
    contenders = {
        "unsharded": (build(None), nullcontext),
        "unsharded()": (ours, lambda: fsdp_compiled.unsharded(ours)),
        "sharded": (ours, nullcontext),
        "FSDP2": (build(fsdp2), nullcontext),
    }
    prompt = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.runs + 1):
        for name, (model, around) in contenders.items():
            seconds[name].append(seconds_of(model, around(), prompt, args.tokens))
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    if dist.get_rank() == 0:
        for name, median in medians.items():
            print(f"{name:12} {median:8.3f} s {median / medians['unsharded']:6.2f} of unsharded")
        if args.json:
            setup = {"ranks": dist.get_world_size(), "torch": torch.__version__, "tokens": args.tokens}
            args.json.write_text(json.dumps({**setup, "seconds": medians}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
