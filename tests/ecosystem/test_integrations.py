"""fsdp_compiled.integrations: sharding by plan, safetensors into shards, and the mixin for Trainer."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from fsdp_compiled import FSDPModule, fully_shard, unsharded
from fsdp_compiled.integrations.pretrained import load_pretrained, save_pretrained, shard_pretrained
from fsdp_compiled.integrations.transformers import ShardedTrainer
from tests.ecosystem import test_vision_language
from tests.ecosystem.test_trainer import STEPS, InOrder, Tokens, _arguments, _losses
from tests.ecosystem.training import (
    accelerate_on_cpu,
    alone,
    assert_equal_losses,
    assert_mode,
    each_mode,
    watch,
)
from tests.support import huggingface
from tests.support.ranks import on_ranks
from tests.support.training import assert_close, full, full_params

NAMES = ["llama", "qwen3", "gemma", "bert"]


class InOrderSharded(ShardedTrainer, InOrder):
    pass


def _units(model):
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT
def test_units_follow_the_plan_or_the_classes(fake_group):
    llama = shard_pretrained(huggingface.build("llama"))
    assert {"", "model.layers.0", "model.layers.1", "lm_head"} <= set(_units(llama))
    assert not llama.lm_head._get_fsdp_state().unit.config.reshard_after_forward  # "keep_full_weight"
    bert = shard_pretrained(huggingface.build("bert"))  # without a plan; the embeddings are a block of their own
    assert _units(bert) == ["", "bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1"]
    own = shard_pretrained(huggingface.build("llama"), plan={"model.layers.*": "free_full_weight"})
    assert _units(own) == ["", "model.layers.0", "model.layers.1"]
    assert len(_units(shard_pretrained(huggingface.build("lora")))) == len(_units(llama))


def test_plans_that_name_nothing(fake_group):
    with pytest.raises(ValueError, match=r"plan\['model.blocks.\*'\]: expected the name of a module of Llama"):
        shard_pretrained(huggingface.build("llama"), plan={"model.blocks.*": "free_full_weight"})
    with pytest.raises(ValueError, match=r"plan\['lm_head'\]: expected one of .* got 'keep'"):
        shard_pretrained(huggingface.build("llama"), plan={"lm_head": "keep"})
    model = huggingface.build("llama")
    with pytest.raises(ValueError, match="ModuleList: expected a module with a forward"):
        shard_pretrained(model, plan={"model.layers.*": "free_full_weight", "model.layers": "free_full_weight"})
    assert not _units(model)
    with pytest.raises(ValueError, match="Linear: expected a model with an fsdp_plan or _no_split_modules"):
        shard_pretrained(nn.Linear(2, 2))


def _saved(name, folder, **kwargs):
    model = huggingface.build(name)
    model.save_pretrained(folder, **kwargs)  # by the first rank
    torch.distributed.barrier()
    return model


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_a_meta_model_reads_only_its_shards(name, tmp_path):
    """Parameters, tied ones too, and rotary and other buffers are those of the model that was saved."""
    folder = tmp_path
    want = _saved(name, folder, max_shard_size="20KB")
    assert len(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]) > 1
    with torch.device("meta"):
        model = type(want)(want.config)
    shard_pretrained(model)
    read = []

    def opened(*args, **kwargs):
        file = safe_open(*args, **kwargs)
        part = file.get_slice

        class Slice:
            def __init__(self, key):
                self.inner = part(key)

            def get_shape(self):
                return self.inner.get_shape()

            def __getitem__(self, index):
                read.append(self.inner[index])
                return read[-1]

        return mock.Mock(get_slice=Slice)

    with mock.patch("safetensors.safe_open", opened):
        load_pretrained(model, folder)
    assert_close(full_params(model), dict(want.named_parameters()), rtol=0)
    assert_close(dict(model.named_buffers()), dict(want.named_buffers()), rtol=1e-6)
    held = sum(param._local_tensor.numel() for param in model.parameters())
    assert sum(part.numel() for part in read) <= held + sum(buffer.numel() for buffer in model.buffers())
    tokens = huggingface.token_batches(1)[0]
    torch.testing.assert_close(huggingface.loss(model, tokens), huggingface.loss(want, tokens))


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # by which weights are initialised, too
def test_buffers_of_a_model_inside_are_computed_by_its_own_class(tmp_path, fake_group):
    want, _ = test_vision_language.MODELS["paligemma"]()
    want.save_pretrained(tmp_path)  # under the names of older versions, which are refused
    with torch.device("meta"):
        model = shard_pretrained(type(want)(want.config))
    with pytest.raises(KeyError, match=r"save_pretrained\(save_original_format=False\)"):
        load_pretrained(model, tmp_path)
    want.save_pretrained(tmp_path, save_original_format=False)
    load_pretrained(model, tmp_path)
    assert_close(dict(model.named_buffers()), dict(want.named_buffers()), rtol=0)


@on_ranks(2)
def test_files_that_do_not_fit(tmp_path):
    folder = tmp_path / "saved"
    model = shard_pretrained(huggingface.build("llama"))
    before = full_params(model)
    with pytest.raises(FileNotFoundError, match="expected model.safetensors or"):
        load_pretrained(model, folder)
    torch.distributed.barrier()
    _saved("bert", folder)
    with pytest.raises(KeyError, match=r"model.embed_tokens.weight: expected it in .* from_pretrained"):
        load_pretrained(model, folder)
    config = transformers.LlamaConfig(**huggingface.DECODER | {"intermediate_size": 64})
    torch.distributed.barrier()
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    torch.distributed.barrier()
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight: expected shape \(48, 32\).*the file has \(64, 32\)"):
        load_pretrained(model, folder)
    assert_close(full_params(model), before, rtol=0)  # also those that fit


def test_a_meta_model_whose_buffers_cannot_be_computed_stays_on_meta(tmp_path, fake_group):
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Module())
        model[1].register_buffer("angles", torch.ones(3), persistent=False)
        return model

    save_file(make().state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = fully_shard(make())
    with pytest.raises(NotImplementedError, match=r"^1: expected a model with _init_weights, .* \['angles'\]"):
        load_pretrained(model, tmp_path)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_meta_model_that_is_not_sharded_goes_to_the_cpu(tmp_path):
    want = nn.Linear(4, 4)
    save_file(want.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    load_pretrained(model, tmp_path)
    assert_close(dict(model.named_parameters()), dict(want.named_parameters()), rtol=0)


@pytest.mark.parametrize("compiles_a_layer", [False, True])
@on_ranks(2)
def test_a_compiled_model_reads_what_it_has_written(compiles_a_layer, tmp_path):
    model = huggingface.build("llama")
    names, layers = model.state_dict().keys(), model.model.layers
    if compiles_a_layer:
        layers[0] = torch.compile(layers[0])
    want = full_params(shard_pretrained(model))
    save_pretrained(torch.compile(model), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert names == set(file.keys())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    compiled = torch.compile(model)
    assert load_pretrained(compiled, tmp_path) is compiled
    assert_close(full_params(model), want, rtol=0)


@on_ranks(2)
def test_unsharded_parameters_are_those_of_the_files_at_once(tmp_path):
    want, model = _saved("llama", tmp_path), shard_pretrained(huggingface.build("llama"))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    tokens = huggingface.token_batches(1)[0]
    with unsharded(model):
        load_pretrained(model, tmp_path)
        torch.testing.assert_close(huggingface.loss(model, tokens), huggingface.loss(want, tokens).detach())


@each_mode
@on_ranks(2)
def test_the_mixin_trains_like_one_process(mode, tmp_path):
    with accelerate_on_cpu(), watch() as seen:
        model = shard_pretrained(huggingface.build("llama"))
        trainer = InOrderSharded(model=model, args=_plain(mode, tmp_path), train_dataset=Tokens())
        trainer.train()
    assert_equal_losses(_losses(trainer), alone(steps=STEPS, clip=1.0), rtol=1e-4)  # the log rounds
    assert_mode(seen, mode, len(list(model.parameters())))


def _plain(mode, folder, **kwargs):
    return _arguments(mode, folder, **{"fsdp": None, "fsdp_config": None} | kwargs)


@each_mode
@on_ranks(2)
def test_the_mixin_accumulates_saves_resumes_and_exports(mode, tmp_path):
    options = {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2, "max_steps": STEPS}
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}

    def trainer():
        model = shard_pretrained(huggingface.build("llama"))
        return InOrderSharded(model=model, args=_plain(mode, tmp_path, **options), train_dataset=Tokens())

    with accelerate_on_cpu():
        first = trainer()
        with mock.patch.object(
            type(first.model),
            "set_requires_gradient_sync",
            autospec=True,
            side_effect=FSDPModule.set_requires_gradient_sync,
        ) as sync:
            first.train()
        assert sync.call_count >= 2 * STEPS
        again = trainer()
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert _losses(again) == _losses(first)
    want = full_params(first.model)
    assert_close(full_params(again.model), want, rtol=1e-6)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert not any(isinstance(param, DTensor) for param in loaded.parameters())
    assert_close(dict(loaded.named_parameters()), want, rtol=1e-6)


@on_ranks(2)
def test_what_the_mixin_refuses(tmp_path):
    with accelerate_on_cpu():
        with pytest.raises(
            ValueError, match=r"LlamaForCausalLM: expected a model given to fully_shard; use shard_pre"
        ):
            InOrderSharded(model=huggingface.build("llama"), args=_plain("eager", tmp_path), train_dataset=Tokens())
        with pytest.raises(ValueError, match="args: expected neither fsdp nor deepspeed"):
            model = fully_shard(huggingface.build("llama"))
            InOrderSharded(model=model, args=_arguments("eager", tmp_path), train_dataset=Tokens())


def _resumable(folder):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "per_device_train_batch_size": 1}
    model = shard_pretrained(huggingface.build("llama"))
    return InOrderSharded(model=model, args=_plain("eager", folder, **options), train_dataset=Tokens())


def _state(trainer):
    moments = get_optimizer_state_dict(trainer.model, trainer.optimizer.optimizer)["state"]
    return full_params(trainer.model) | {f"{name} exp_avg": full(each["exp_avg"]) for name, each in moments.items()}


@on_ranks(2)
def _write(folder):
    with accelerate_on_cpu():
        trainer = _resumable(folder)
        trainer.train()
        state = _state(trainer)
        if torch.distributed.get_rank() == 0:
            torch.save(state, folder / "state.pt")


@on_ranks(4)
def _read(folder):
    with accelerate_on_cpu():
        trainer, resumed, want = _resumable(folder), [], torch.load(folder / "state.pt")

        class Note(transformers.TrainerCallback):
            def on_train_begin(self, *_, **__):
                resumed.append(_state(trainer))

        trainer.add_callback(Note())
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))  # takes a step more
        assert_close(resumed[0], want, rtol=0)
        trainer.state.best_model_checkpoint = str(folder / "checkpoint-2")
        trainer._load_best_model()
        params = full_params(trainer.model)
        assert_close(params, {name: want[name] for name in params}, rtol=0)


def test_the_mixin_resumes_on_another_number_of_ranks(tmp_path):
    _write(folder=tmp_path)
    _read(folder=tmp_path)
