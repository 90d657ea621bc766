"""Models that read images: in one full graph, or in pieces where Dynamo breaks their graph unsharded too."""

from __future__ import annotations

from unittest import SkipTest

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

pytest.importorskip("transformers")

import transformers

from fsdp_compiled import fully_shard
from tests.support.ranks import on_ranks
from tests.support.training import assert_close, compiled, full_params, mean_over_ranks

ROWS, LENGTH, IMAGE = 2, 30, 120  # the token that stands for a part of an image
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
WIDTHS = {"projection_dim": 32, "hidden_size": 32}
VISION = SIZES | {"num_hidden_layers": 2, "image_size": 16, "patch_size": 4}


def _llava():
    vision = transformers.CLIPVisionConfig(**VISION, projection_dim=32)
    text = transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config), 16


def _paligemma():
    vision, text = transformers.SiglipVisionConfig(**VISION), transformers.GemmaConfig(**TEXT, head_dim=8)
    config = transformers.PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, **WIDTHS)
    return transformers.PaliGemmaForConditionalGeneration(config), 16


def _gemma3():
    sliding = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    text = transformers.Gemma3TextConfig(**TEXT, **sliding, head_dim=8)
    vision = transformers.SiglipVisionConfig(**VISION)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE
    )
    return transformers.Gemma3ForConditionalGeneration(config), 4


def _qwen():
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        vision_start_token_id=121,
        vision_end_token_id=122,
        video_token_id=123,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config), 4


MODELS = {"llava": _llava, "paligemma": _paligemma, "gemma 3": _gemma3, "qwen 2.5": _qwen}


def _build(name):
    torch.manual_seed(0)
    model, image_tokens = MODELS[name]()
    return model.train(), image_tokens


def _batch(name, step, image_tokens):
    """What all ranks train on: an image in each row."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 100, (ROWS, LENGTH), generator=generator)
    ids[:, 2 : 2 + image_tokens] = IMAGE
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    if name == "qwen 2.5":
        ids[:, 1], ids[:, 2 + image_tokens] = 121, 122
        patches = torch.randn(ROWS, 16, 3 * 2 * 4 * 4, generator=generator)
        grid = torch.tensor([[1, 4, 4]] * ROWS)
        return {**batch, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).long()}
    batch["pixel_values"] = torch.randn(ROWS, 3, 16, 16, generator=generator)
    return batch if name == "llava" else {**batch, "token_type_ids": (ids == IMAGE).long()}


def _train(name, model, call, image_tokens, sharded):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        batch = _batch(name, step, image_tokens)
        if sharded:
            batch = {key: each[dist.get_rank() : dist.get_rank() + 1] for key, each in batch.items()}
        if name == "qwen 2.5":
            batch["pixel_values"] = batch["pixel_values"].flatten(0, 1)
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss) if sharded else loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@on_ranks(2)
def test_trains_like_one_process(mode, name):
    if mode == "compiled" and torch.__version__ < "2.13" and name in ("paligemma", "gemma 3"):
        raise SkipTest("Dynamo of torch 2.11 refuses the model unsharded too")
    (alone, image_tokens), (model, _) = _build(name), _build(name)
    names = {type(each).__name__ for each in model.modules() if "Layer" in type(each).__name__}
    names = {each for each in names if each.endswith(("DecoderLayer", "EncoderLayer"))} | {"Qwen2_5_VLVisionBlock"}
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    assert len(blocks) == 4
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    is_one_graph = name != "qwen 2.5"
    if name == "llava":  # of which Dynamo traces no first call, sharded or not: Transformers installs hooks then
        with torch.no_grad():
            model(**_batch(name, 0, image_tokens))
    counters.clear()
    call = compiled(model, fullgraph=is_one_graph) if mode == "compiled" else model
    losses = _train(name, model, call, image_tokens, sharded=True)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == (0 if mode == "eager" else 1) or (not is_one_graph and graphs > 10)
    want = _train(name, alone, alone, image_tokens, sharded=False)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-4, atol=0)
    assert_close(full_params(model), dict(alone.named_parameters()), rtol=1e-4)
