"""Complete weights of Hugging Face models: merged adapters, files by streaming, and another process group."""

from __future__ import annotations

import json
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("peft")
pytest.importorskip("transformers")

import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compiled import RankFailureError, fully_shard, stream_parameters
from fsdp_compiled.integrations.transformers import load_pretrained, save_pretrained, shard_pretrained
from fsdp_compiled.weights import complete
from tests.support import huggingface
from tests.support.ranks import on_ranks
from tests.support.training import compiled, my_part

KINDS = {
    "linear": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "use_rslora": True, "lora_alpha": 5},
    "saved modules": {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]},
}


def _with_lora(kind, name="llama", **more):
    torch.manual_seed(0)
    model = huggingface.MODELS[name]()
    return get_peft_model(model, LoraConfig(r=3, init_lora_weights=False, **KINDS[kind], **more))


def _train(model, call):
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    for tokens in huggingface.token_batches(2):
        huggingface.loss(call, my_part(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_adapters_are_merged_as_peft_merges_them(kind, dtype):
    model, alone = _with_lora(kind).to(dtype), _with_lora(kind).to(dtype)
    shard_pretrained(model)
    _train(model, compiled(model) if dtype == torch.float32 else model)
    with torch.no_grad():
        for (name, param), (other, sharded) in zip(alone.named_parameters(), model.named_parameters(), strict=True):
            assert name == other
            param.copy_(sharded.full_tensor())
    merged = alone.merge_and_unload()
    got = dict(stream_parameters(model, merge_adapters=True, bucket_bytes=4000))
    assert got.keys() == merged.state_dict().keys()
    for name, tensor in merged.state_dict().items():
        assert torch.equal(got[name], tensor), name
    bf16 = dict(stream_parameters(model, merge_adapters=True, dtype=torch.bfloat16))
    assert all(torch.equal(bf16[name], tensor.bfloat16()) for name, tensor in got.items())
    as_they_are = dict(stream_parameters(model))
    assert list(as_they_are) == list(dict(model.named_parameters()))


@on_ranks(2)
def test_adapters_of_checkpointed_layers_are_merged():
    model, want = _with_lora("saved modules"), _with_lora("saved modules").merge_and_unload().state_dict()
    layers = model.get_base_model().model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)
    fully_shard(model)
    got = dict(stream_parameters(model, merge_adapters=True))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


@on_ranks(2)
def test_adapters_that_are_off_or_others():
    model = _with_lora("linear")
    base = {
        name.replace(".base_layer", ""): p.detach().clone() for name, p in model.get_base_model().named_parameters()
    }
    shard_pretrained(model)
    with model.disable_adapter():
        for name, tensor in stream_parameters(model, merge_adapters=True):
            assert torch.equal(tensor, base[name])
    for more, what in (
        ({"use_dora": True}, r"layers.0.*weight: expected LoRA of a linear layer.*got adapter 'default' of a Linear"),
        ({"trainable_token_indices": [1, 2]}, "embed_tokens: .*got a TrainableTokensWrapper"),
        ({"target_parameters": ["mlp.gate_proj.weight"]}, "layers.0.mlp.gate_proj: .*got a ParamWrapper"),
    ):
        model = _with_lora("linear", **more)
        shard_pretrained(model)
        with pytest.raises(NotImplementedError, match=f"merge_adapters: model.{what}"):
            stream_parameters(model, merge_adapters=True)


@on_ranks(2)
def test_quantised_weights():
    torchao = pytest.importorskip("torchao.quantization")
    model = huggingface.build("llama")
    torchao.quantize_(model.model.layers, torchao.Int8WeightOnlyConfig())
    model.requires_grad_(False)
    shard_pretrained(model)
    with pytest.raises(
        NotImplementedError, match=r"model.layers.0.*weight: expected a tensor that DTensor can gather"
    ):
        list(stream_parameters(model))


@pytest.mark.parametrize("max_file_bytes", [10**9, 12_000])
@on_ranks(2)
def test_files_that_from_pretrained_reads(tmp_path, max_file_bytes):
    model = huggingface.build("llama", sharded=True)
    _train(model, model)
    save_pretrained(model, tmp_path / "saved", dtype=torch.bfloat16, max_file_bytes=max_file_bytes)
    files = sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors"))
    assert len(files) == (1 if max_file_bytes == 10**9 else 4)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert read.dtype == torch.bfloat16
    want = dict(stream_parameters(model, dtype=torch.bfloat16))
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, want[name]), name
    other = load_pretrained(huggingface.build("llama", sharded=True), tmp_path / "saved")
    for name, tensor in stream_parameters(other):
        assert torch.equal(tensor, want[name].float())


@on_ranks(2)
def test_a_save_replaces_an_older_one_of_another_number_of_files(tmp_path):
    model = huggingface.build("llama", sharded=True)
    for value, max_file_bytes in enumerate((12_000, 24_000, 10**9, 12_000)):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(value)
        save_pretrained(model, tmp_path, max_file_bytes=max_file_bytes)
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        other = load_pretrained(huggingface.build("llama", sharded=True), tmp_path)
        tensors = [*read.parameters(), *(tensor for _, tensor in stream_parameters(other))]
        assert all((tensor == value).all() for tensor in tensors)
        index = tmp_path / "model.safetensors.index.json"
        listed = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
        assert {path.name for path in tmp_path.glob("*.safetensors")} == set(listed)
        dist.barrier()


@pytest.mark.parametrize("max_file_bytes", [10**9, 4000])  # it fails after the stream, and in its middle
@on_ranks(2, timeout_s=20)
def test_all_ranks_raise_at_once_where_the_first_cannot_write(tmp_path, max_file_bytes):
    model, is_writer = huggingface.build("llama", sharded=True), dist.get_rank() == 0
    if is_writer:
        (tmp_path / "taken").touch()
    dist.barrier()
    error, text = FileExistsError, "File exists"
    if not is_writer:
        error, text = RankFailureError, "rank 0, which writes the files, raised FileExistsError: .* File exists"
    begun = time.monotonic()
    with pytest.raises(error, match=text), mock.patch.object(complete, "BUCKET_BYTES", {True: 4000}):
        save_pretrained(model, tmp_path / "taken", max_file_bytes=max_file_bytes)
    assert time.monotonic() - begun < 10
    _train(model, model)
    save_pretrained(model, tmp_path / "free")
    assert (tmp_path / "free" / "model.safetensors").is_file()


@on_ranks(2)
def test_the_configuration_tells_what_was_written(tmp_path):
    model = huggingface.build("llama")
    model.config.dtype = torch.bfloat16  # as from_pretrained leaves it, before the model is trained in another dtype
    shard_pretrained(model)
    for dtype, want in ((None, torch.float32), (torch.float16, torch.float16)):
        folder = tmp_path / str(want)
        save_pretrained(torch.compile(model), folder, dtype=dtype)
        read = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert type(read) is transformers.LlamaForCausalLM and read.config.architectures == ["LlamaForCausalLM"]
        assert read.dtype == want
        for name, tensor in stream_parameters(model, dtype=dtype):
            assert torch.equal(read.state_dict()[name], tensor), name
    assert model.config.dtype == torch.bfloat16 and model.config.architectures is None


@on_ranks(2)
def test_a_tied_model_with_adapters_is_saved_merged(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**huggingface.DECODER, tie_word_embeddings=True)
    lora = LoraConfig(r=3, init_lora_weights=False, target_modules=["q_proj"])
    model = get_peft_model(transformers.LlamaForCausalLM(config), lora)
    fully_shard(model)
    tokens = huggingface.token_batches(1)[0]
    save_pretrained(model, tmp_path, merge_adapters=True)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(huggingface.loss(read, tokens), huggingface.loss(model, tokens))


@pytest.mark.parametrize(
    "kind, names",
    [
        ({"target_modules": ["lm_head"]}, "model.embed_tokens.weight, lm_head.base_layer.weight"),
        ({"modules_to_save": ["embed_tokens"]}, "model.embed_tokens.original_module.weight, lm_head.weight"),
    ],
)
@on_ranks(2)
def test_adapters_of_one_of_two_tied_layers(kind, names):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**huggingface.DECODER, tie_word_embeddings=True)
    lora = LoraConfig(r=3, init_lora_weights=False, **{"target_modules": ["q_proj"]} | kind)
    model = get_peft_model(transformers.LlamaForCausalLM(config), lora)
    fully_shard(model)
    with pytest.raises(NotImplementedError, match=f"merge_adapters: {names}: expected the same adapters for all"):
        stream_parameters(model, merge_adapters=True)
    if "modules_to_save" not in kind:
        with model.disable_adapter():
            assert "model.embed_tokens.weight" in dict(stream_parameters(model, merge_adapters=True))


@on_ranks(2)
def test_an_adapted_layer_that_is_used_under_two_names():
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4)})
    model["second"] = model["first"]
    model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_modules=["first"]))
    model.base_model.model["second"] = model.base_model.model["first"]
    fully_shard(model)
    assert list(dict(stream_parameters(model, merge_adapters=True))) == ["first.weight", "first.bias"]


@pytest.mark.parametrize(
    "more, name",
    [
        ({"inference_mode": True}, "default"),
        ({"use_dora": True}, "default"),
        ({"bias": "all", "modules_to_save": ["lm_head"]}, "0"),
        ({"target_modules": ["embed_tokens", "q_proj"], "inference_mode": True}, "0"),
    ],
)
@on_ranks(2)
def test_adapters_that_peft_has_saved(more, name, tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        lora = LoraConfig(**{"r": 3, "init_lora_weights": False, "target_modules": ["q_proj", "down_proj"]} | more)
        return get_peft_model(huggingface.MODELS["llama"](), lora, adapter_name=name)

    saved, model, by_peft = build(0), build(1), build(1)
    folder = tmp_path / f"of rank {dist.get_rank()}"
    saved.save_pretrained(folder, save_embedding_layers=False)
    folder = folder if name == "default" else folder / name
    before = {each: param.detach().clone() for each, param in model.named_parameters()}
    set_peft_model_state_dict(by_peft, load_peft_weights(folder), adapter_name=name)
    want = dict(by_peft.named_parameters())
    assert any(not torch.equal(param, before[each]) for each, param in want.items())
    shard_pretrained(model)
    load_pretrained(model, folder)
    for each, param in stream_parameters(model):
        assert torch.equal(param, want[each]), each


@on_ranks(2)
def test_adapters_that_are_not_saved_as_they_are(tmp_path):
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(huggingface.build("llama"), prompt)
    folder = tmp_path / f"of rank {dist.get_rank()}"
    model.save_pretrained(folder)
    shard_pretrained(model)
    with pytest.raises(NotImplementedError, match="default: expected an adapter whose parameters PEFT saves as they"):
        load_pretrained(model, folder)


@on_ranks(3)
def test_an_engine_in_another_process_group():
    """Ranks 0 and 1 train; rank 2 is the engine, to which rank 0 sends each tensor."""
    trainers, link = dist.new_group([0, 1]), dist.new_group([0, 2])
    engine = huggingface.build("llama")
    if dist.get_rank() == 2:
        for param in engine.parameters():
            dist.broadcast(param.data, 0, group=link)
        want = torch.empty(())
        dist.broadcast(want, 0, group=link)
        torch.testing.assert_close(huggingface.loss(engine, huggingface.token_batches(1)[0]).detach(), want)
        return
    model = huggingface.build("llama")
    mesh = DeviceMesh.from_group(trainers, "cpu")
    shard_pretrained(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    huggingface.loss(model, huggingface.token_batches(2)[dist.get_rank()]).backward()
    optimizer.step()
    for _, tensor in stream_parameters(model, ranks=[0], bucket_bytes=4000):
        dist.broadcast(tensor, 0, group=link)
    with torch.no_grad():
        loss = huggingface.loss(model, huggingface.token_batches(1)[0])
    if dist.get_rank() == 0:
        dist.broadcast(loss.detach(), 0, group=link)
