"""Unmodified Hugging Face models: fully_shard per layer and on the model, nothing else."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Shard

pytest.importorskip("transformers")

from fsdp_compiled import MixedPrecisionPolicy, fully_shard
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.regions.block import RegionModule
from fsdp_compiled.regions.choose import set_regions
from tests.support import huggingface
from tests.support.parity import row
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.training import (
    assert_close,
    batches,
    compiled,
    full_grads,
    full_params,
    mean_over_ranks,
    my_part,
    train,
    train_replicas,
    units_inside,
    with_regions,
)
from tests.support.variants import thorough

WITH_INDUCTOR = ("llama",)  # the others with --inductor
IN_ONE_GRAPH = ("llama", "bert", "qwen3 moe", "gpt-oss")  # in every run of the suite; the others with regions
each_mode = pytest.mark.parametrize("mode", ["eager", "full", "regions"])


def _assert_trains_like_one_process(name, mode):
    alone, model = huggingface.build(name), huggingface.build(name, sharded=True)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    torch._dynamo.utils.counters.clear()
    if mode == "regions":
        alone.config.use_cache = model.config.use_cache = False  # see the test of sliding windows
        with_regions(model, units_inside(model))
    call = model if mode == "eager" else compiled(model, inductor=mode == "full" and name in WITH_INDUCTOR)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for tokens in huggingface.token_batches(3):
        losses = [huggingface.loss(alone, tokens), huggingface.loss(call, my_part(tokens))]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(mean_over_ranks(losses[1]), losses[0].item(), rtol=1e-5, atol=0)
        assert_close(full_grads(model), full_grads(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(full_params(model), full_params(alone))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (0 if mode == "eager" else 1)
    assert not torch._dynamo.utils.counters["graph_break"]
    return model


@row("Hugging Face models")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "bert"])
@each_mode
@thorough(when=lambda name, mode: mode != "eager" and (name in IN_ONE_GRAPH) != (mode == "full"))
@on_ranks(2)
def test_trains_like_one_process(name, mode):
    model = _assert_trains_like_one_process(name, mode)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (name in ("gemma", "bert"))


@row("Hugging Face models")
@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe", "deepseek v3", "gpt-oss"])
@each_mode
@thorough(when=lambda name, mode: mode != "eager" and (name in IN_ONE_GRAPH) != (mode == "full"))
@on_ranks(2)
def test_a_mixture_of_experts_trains_like_one_process(name, mode):
    model = _assert_trains_like_one_process(name, mode)
    stacks = {module.gate_up_proj for module in model.modules() if type(module).__name__.endswith("Experts")}
    assert len(stacks) == 2 and all(stack.ndim == 3 and stack.placements == (Shard(0),) for stack in stacks)
    if mode == "regions":
        assert all(isinstance(unit, RegionModule) for unit in units_inside(model))


@row("Hugging Face models", "mixed precision")
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
@each_mode
@thorough(when=lambda name, mode: mode != "eager" and name == "gpt-oss")
@on_ranks(2)
def test_a_mixture_of_experts_in_bf16_has_the_gradients_of_replicas(name, mode):
    """In bf16 a graph has torch's own grouped products, in fp32 an operator of Transformers."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    alone, model = huggingface.build(name), huggingface.build(name, sharded=True, mp_policy=policy)
    for param in alone.parameters():
        param.data = param.data.bfloat16()
    model.config.use_cache = False  # see the test of sliding windows
    if mode == "regions":
        with_regions(model, units_inside(model))
    call = model if mode == "eager" else compiled(model)
    (tokens,) = huggingface.token_batches(1)
    losses = [huggingface.loss(each, my_part(tokens)) for each in (alone, call)]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=0)
    for loss in losses:
        loss.backward()
    for (name, want), got in zip(alone.named_parameters(), full_grads(model).values(), strict=True):
        grad = want.grad.float()
        dist.all_reduce(grad)
        assert (got - grad / 2).norm() < 0.03 * grad.norm() / 2, name


@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_clip_whose_scale_is_a_scalar_trains_like_replicas(mode):
    alone, model = huggingface.clip(), huggingface.clip()
    for layer in (*model.text_model.encoder.layers, *model.vision_model.encoder.layers):
        fully_shard(layer)
    fully_shard(model)

    def loss_of(call, pixels):
        tokens = (pixels[:, 0, 0, :16] * 10).long().clamp(2, huggingface.VOCAB - 1)
        return call(input_ids=tokens, pixel_values=pixels, return_loss=True).loss

    call = model if mode == "eager" else compiled(model)
    want = train_replicas(alone, alone, batches(3, 8, 3, 30, 30), loss_of, lr=0.05)
    got = train(model, call, batches(3, 8, 3, 30, 30), loss_of, lr=0.05)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert_close(full_params(model), full_params(alone))


@row("Hugging Face models", mode="regions")
@pytest.mark.parametrize("name", ["gemma 3", "gpt-oss"])
@thorough()
@on_ranks(2)
def test_a_sliding_window_trains_in_regions_without_a_cache(name):
    """With one, which its config asks for, blocks keep views of what they compute; torch refuses such regions."""
    alone, model = (huggingface.build(name, sharded) for sharded in (False, True))
    (tokens,) = huggingface.token_batches(1)
    for use_cache in (True, False):
        torch._dynamo.reset()
        model.config.use_cache = alone.config.use_cache = use_cache
        set_regions(model, units_inside(model))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = huggingface.loss(compiled(model), my_part(tokens))
        texts = [str(each.message) for each in caught if "regions:" in str(each.message)]
        assert len(texts) == use_cache and all("in training set config.use_cache = False" in text for text in texts)
        assert all(isinstance(unit, RegionModule) is not use_cache for unit in units_inside(model))
        for each in (loss, huggingface.loss(alone, tokens)):
            each.backward()
        assert_close(full_grads(model), full_grads(alone))
        for each in (model, alone):
            each.zero_grad()


@row("Hugging Face models", "frozen and LoRA")
@each_mode
@thorough(when=lambda mode: mode == "regions")
@on_ranks(2)
def test_lora_trains_and_reduces_the_adapters_alone(mode):
    pytest.importorskip("peft")
    before = full_params(huggingface.build("lora"))
    model = _assert_trains_like_one_process("lora", mode)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert len(trained) == 2 * 2 * 3 and all(".lora_" in name for name in trained)
    after = full_params(model)
    assert trained == {name for name, value in before.items() if not torch.equal(value, after[name])}
    if mode == "full":
        reduced = _reduced_in_backward(model)
        assert sorted(reduced) == sorted(trained)
        same_on_ranks(reduced)


def _reduced_in_backward(model):
    """Names of the parameters whose gradients the backward graph reduces."""
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    call = torch.compile(model, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    huggingface.loss(call, my_part(huggingface.token_batches(1)[0])).backward()
    _, backward = graphs
    return [nodes.spec_of(node).param.name for node in backward.nodes if nodes.operator_of(node) == "reduce_grad"]
