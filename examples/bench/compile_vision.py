"""Time the first three training steps of a compiled Qwen2.5-VL, whose graph breaks, sharded and unsharded.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/bench/compile_vision.py

A tiny model made from its config, with cold caches; ``--json FILE`` keeps the figures. Each rank compiles and trains
the unsharded model by itself. ``pip install transformers`` first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch._dynamo.utils import counters

from fsdp_compiled import fully_shard

IMAGE, PARTS, LENGTH = 120, 4, 30  # the token that stands for a part of an image; parts of an image; tokens of a text


def build(layers: int) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    text = sizes | {"vocab_size": 128, "num_hidden_layers": layers, "num_key_value_heads": 2, "rope_parameters": rope}
    vision = {"depth": layers, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [layers - 1]}
    tokens = {"vision_start_token_id": 121, "vision_end_token_id": 122, "video_token_id": 123}
    text |= {"max_position_embeddings": 64, "use_cache": False}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, **tokens)
    torch.manual_seed(0)
    return transformers.Qwen2_5_VLForConditionalGeneration(config).train()


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 100, (1, LENGTH), generator=generator)
    ids[:, 1], ids[:, 2 : 2 + PARTS], ids[:, 2 + PARTS] = 121, IMAGE, 122
    pixels, grid = torch.randn(16, 3 * 2 * 4 * 4, generator=generator), torch.tensor([[1, 4, 4]])
    image = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).long()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone(), **image}


def train(layers: int, is_sharded: bool) -> tuple[float, int, list[float]]:
    """Return the seconds of three steps, the number of graphs, and the losses."""
    torch.compiler.reset()
    counters.clear()
    model = build(layers)
    if is_sharded:
        for module in [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "VisionBlock"))]:
            fully_shard(module)
        fully_shard(model)
    optimizer, call, losses = torch.optim.SGD(model.parameters(), lr=0.1), torch.compile(model), []
    dist.barrier()
    began = time.perf_counter()
    for step in range(3):
        loss = call(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.barrier()
    return time.perf_counter() - began, counters["stats"]["unique_graphs"], losses


def main() -> None:
    args = parse()
    dist.init_process_group("gloo")
    results: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "seconds": {}}
    losses = {}
    for turn in range(args.rounds):
        for name in ("unsharded", "sharded") if turn % 2 == 0 else ("sharded", "unsharded"):
            seconds, graphs, losses[name] = train(args.layers, name == "sharded")
            results["seconds"].setdefault(name, []).append(round(seconds, 1))
            results[f"graphs, {name}"] = graphs
            if dist.get_rank() == 0:
                print(f"{name}: {seconds:.1f} s, {graphs} graphs", flush=True)
    torch.testing.assert_close(torch.tensor(losses["sharded"]), torch.tensor(losses["unsharded"]), rtol=1e-4, atol=0)
    sharded, unsharded = (statistics.median(results["seconds"][name]) for name in ("sharded", "unsharded"))
    if dist.get_rank() == 0:
        print(f"sharded takes {sharded / unsharded:.2f} of unsharded")
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
