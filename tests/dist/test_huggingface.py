"""Unmodified Hugging Face models: fully_shard per layer and on the model, nothing else."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")

from fsdp_compiled.passes import ir
from tests import huggingface
from tests.graphs import Recorder
from tests.ranks import on_ranks, same_on_ranks
from tests.training import assert_close, full_grads, full_params, mean_over_ranks, my_part

eager_and_full = pytest.mark.parametrize("mode", ["eager", "full"])


def _assert_trains_like_one_process(name, mode, backend="inductor"):
    alone, model = huggingface.build(name), huggingface.build(name, sharded=True)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend(backend)
    call = torch.compile(model, backend=counter, fullgraph=True) if mode == "full" else model
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
    assert counter.frame_count == (1 if mode == "full" else 0)
    assert not torch._dynamo.utils.counters["graph_break"]
    return model


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "bert"])
@eager_and_full
@on_ranks(2)
def test_trains_like_one_process(name, mode):
    model = _assert_trains_like_one_process(name, mode)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (name in ("gemma", "bert"))


@eager_and_full
@on_ranks(2)
def test_lora_trains_and_reduces_the_adapters_alone(mode):
    pytest.importorskip("peft")
    before = full_params(huggingface.build("lora"))
    recorder = Recorder()
    model = _assert_trains_like_one_process("lora", mode, recorder)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert len(trained) == 2 * 2 * 3 and all(".lora_" in name for name in trained)
    after = full_params(model)
    assert trained == {name for name, value in before.items() if not torch.equal(value, after[name])}
    if mode == "full":
        nodes = recorder.only("backward").nodes
        reduced = [ir.route_of(node).param for node in nodes if ir.is_reduce_grad(node)]
        assert sorted(reduced) == sorted(trained)
        same_on_ranks(reduced)
