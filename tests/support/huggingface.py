"""Tiny, unmodified Hugging Face models, made from configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fsdp_compiled import fully_shard
from tests.support.training import seeded_generator

VOCAB = 67
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
DECODER = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXTURE = {"experts_implementation": "grouped_mm", "num_experts_per_tok": 2}  # the loop over experts does not compile
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def _qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=8))


def _gemma() -> nn.Module:
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**DECODER, head_dim=8))


def _gemma3() -> nn.Module:
    sliding = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**DECODER, head_dim=8, **sliding))


def _gpt_oss() -> nn.Module:
    sizes = {"head_dim": 8, "num_local_experts": 3, "sliding_window": 8}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**DECODER, **MIXTURE, **sizes))


def _mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**DECODER, **MIXTURE, head_dim=8, num_local_experts=4)
    )


def _qwen3_moe() -> nn.Module:
    sizes = {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**DECODER, **MIXTURE, **sizes))


def _deepseek_v3() -> nn.Module:
    """One dense layer, then two with experts, routed and shared; latent attention."""
    layers = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1}
    latent = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = transformers.DeepseekV3Config(**(DECODER | layers), **MIXTURE, **experts, **latent)
    return transformers.DeepseekV3ForCausalLM(config)


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT))


def clip() -> nn.Module:
    """Two towers and a scalar, ``logit_scale``, on which the contrastive loss depends."""
    torch.manual_seed(0)
    text = transformers.CLIPTextConfig(**SIZES, projection_dim=16, bos_token_id=0, eos_token_id=1)
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=30, patch_size=15, projection_dim=16)
    towers = {"text_config": text.to_dict(), "vision_config": vision.to_dict()}
    return transformers.CLIPModel(transformers.CLIPConfig(**towers, projection_dim=16))


def _llama_with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    # Without init_lora_weights=False the adapters add nothing at first, and half of their gradients are zero.
    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(_llama(), config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma 3": _gemma3,
    "gpt-oss": _gpt_oss,
    "mixtral": _mixtral,
    "qwen3 moe": _qwen3_moe,
    "deepseek v3": _deepseek_v3,
    "bert": _bert,
    "lora": _llama_with_lora,
}


def build(name: str, sharded: bool = False, **kwargs: Any) -> Any:
    """The model with always the same weights; sharded per layer and as a whole, and nothing else.

    Args:
        name: of ``MODELS``.
        kwargs: given to ``fully_shard``.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    if sharded:
        (layers,) = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        for layer in layers:
            fully_shard(layer, **kwargs)
        fully_shard(model, **kwargs)
    return model


def loss(call: Callable[..., Any], tokens: Tensor) -> Tensor:
    """The model's own loss; a masked model is to guess the tokens it sees."""
    return call(input_ids=tokens, labels=tokens).loss


def token_batches(steps: int) -> Tensor:
    """``[steps, 4, 16]``, the same on every rank."""
    return torch.randint(3, VOCAB, (steps, 4, 16), generator=seeded_generator(0))
