"""PEFT's other methods than LoRA, whose adapters are sharded with their layers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft
from torch.distributed.tensor import DTensor

from fsdp_compiled import fully_shard
from tests.ecosystem.training import assert_equal_losses, losses_of, watch
from tests.support import huggingface
from tests.support.ranks import on_ranks
from tests.support.training import assert_close, compiled, full

LAYERS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
QUERIES = {"target_modules": ["q_proj"], "init_weights": False}
CONFIGS = {
    "DoRA": lambda: peft.LoraConfig(r=3, use_dora=True, init_lora_weights=False, **LAYERS),
    "PiSSA": lambda: peft.LoraConfig(r=3, init_lora_weights="pissa", **LAYERS),
    "parameters": lambda: peft.LoraConfig(r=3, target_parameters=["gate_proj.weight"], init_lora_weights=False),
    "trainable tokens": lambda: peft.LoraConfig(
        r=3, trainable_token_indices=[1, 2, 5], init_lora_weights=False, **LAYERS
    ),
    "whole modules": lambda: peft.LoraConfig(
        r=3, modules_to_save=["lm_head", "embed_tokens"], init_lora_weights=False, **LAYERS
    ),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=3, target_r=2, total_step=10, init_lora_weights=False, **LAYERS),
    "LoHa": lambda: peft.LoHaConfig(r=3, init_weights=False, **LAYERS),
    "LoKr": lambda: peft.LoKrConfig(r=3, init_weights=False, **LAYERS),
    "IA3": lambda: peft.IA3Config(feedforward_modules=["down_proj"], init_ia3_weights=False, **LAYERS),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=4, init_weights=False, **LAYERS),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, **QUERIES),
    "VeRA": lambda: peft.VeraConfig(r=4, **QUERIES),
    "HRA": lambda: peft.HRAConfig(r=4, **QUERIES),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=20, **QUERIES),
    "MiSS": lambda: peft.MissConfig(r=4, **QUERIES),
    "RandLora": lambda: peft.RandLoraConfig(r=4, **QUERIES),
    "SHiRA": lambda: peft.ShiraConfig(r=3, **QUERIES),
    "C3A": lambda: peft.C3AConfig(block_size=4, target_modules=["q_proj"]),
    "RoAd": lambda: peft.RoadConfig(group_size=16, **QUERIES),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}
IN_PIECES = {"LoHa", "LoKr", "SHiRA", "parameters"}  # Dynamo does not trace them, sharded or not


def _model(kind):
    torch.manual_seed(0)
    base = huggingface.MODELS["llama"]()
    torch.manual_seed(1)
    model = peft.get_peft_model(base, CONFIGS[kind]()).train()
    return model, base.model.layers


def _train(model, call, sharded):
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    return losses_of(call, optimizer, sharded)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_trains_like_one_process(kind, mode):
    (alone, _), (model, layers) = _model(kind), _model(kind)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    call = model
    if mode == "compiled":
        call = torch.compile(model, backend="aot_eager") if kind in IN_PIECES else compiled(model)
    with watch() as seen:
        got = _train(model, call, sharded=True)
    assert mode == "eager" or (seen.graphs == 1 and not seen.breaks) or kind in IN_PIECES
    assert_equal_losses(got, _train(alone, alone, sharded=False), rtol=1e-4)
    trained = {name: full(param) for name, param in model.named_parameters() if param.requires_grad}
    want = {name: param for name, param in alone.named_parameters() if name in trained}
    assert trained
    assert_close(trained, want, rtol=1e-3)


def test_attention_that_replaces_its_parameters_is_refused_before_anything_is_changed():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.TransformerEncoderLayer(8, 2, 8))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["self_attn"], r=2))
    error = "base_model.model.1.self_attn: expected a module that keeps its parameters, got PEFT's MultiheadAttention"
    with pytest.raises(NotImplementedError, match=error):
        fully_shard(adapted)
    assert not any(isinstance(param, DTensor) for param in adapted.parameters())
    adapted(torch.ones(1, 2, 8)).sum().backward()
