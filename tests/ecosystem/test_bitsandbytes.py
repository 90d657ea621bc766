"""LoRA on 4-bit weights of bitsandbytes, which are sharded, too: QLoRA."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.tensor import DTensor

pytest.importorskip("accelerate")
pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fsdp_compiled import FSDPModule, as_torch_fsdp, fully_shard
from tests.ecosystem.training import accelerate_on_cpu, assert_equal_losses, losses_of
from tests.support import huggingface
from tests.support.ranks import on_ranks
from tests.support.training import assert_close, full


@pytest.fixture
def saved(tmp_path):
    """A folder with a model that is not quantised."""
    torch.manual_seed(0)
    huggingface.MODELS["llama"]().save_pretrained(tmp_path)
    return str(tmp_path)


def _model(saved, storage):
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(saved, quantization_config=config, device_map="cpu")
    torch.manual_seed(1)
    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, lora).train()


def _optimizer(model):
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


@on_ranks(2)
def _trains_like_one_process(saved, storage, reshards, compiles):
    alone, model = _model(saved, storage), _model(saved, storage)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, reshard_after_forward=reshards)
    fully_shard(model, reshard_after_forward=reshards)
    quantised = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert isinstance(quantised, DTensor) and quantised.dtype == storage
    got = losses_of(torch.compile(model) if compiles else model, _optimizer(model), sharded=True)
    assert_equal_losses(got, losses_of(alone, _optimizer(alone), sharded=False))
    trained = {name: full(param) for name, param in model.named_parameters() if param.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert_close(trained, {name: param for name, param in alone.named_parameters() if name in trained}, rtol=1e-4)


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("storage", [torch.uint8, torch.float32])
def test_trains_like_one_process(saved, storage, reshards):
    _trains_like_one_process(saved=saved, storage=storage, reshards=reshards, compiles=False)


def test_compiled_in_pieces(saved):
    """Dynamo does not trace how its modules remember what weights are."""
    _trains_like_one_process(saved=saved, storage=torch.float32, reshards=True, compiles=True)


@on_ranks(2)
def _trains_by_accelerate_like_fsdp2(saved, ram_efficient):
    losses = []
    for switch in (nullcontext, as_torch_fsdp):
        with accelerate_on_cpu(), switch():
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=ram_efficient
            )
            model = _model(saved, torch.float32)
            model, optimizer = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(model, _optimizer(model))
            assert isinstance(model, FSDPModule) == (switch is as_torch_fsdp)
            losses.append(losses_of(model, optimizer, sharded=True))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("ram_efficient", [False, True])
def test_accelerate_like_fsdp2(saved, ram_efficient):
    _trains_by_accelerate_like_fsdp2(saved=saved, ram_efficient=ram_efficient)
