"""An unmodified Hugging Face model: fully_shard per layer and on the model, nothing else."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fsdp_compiled import fully_shard
from tests.parity import row
from tests.ranks import on_ranks
from tests.training import assert_close, full_grads, mean_over_ranks, my_part

pytest.importorskip("transformers")


def _model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def _step(call, optimizer, tokens):
    loss = call(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss


@row("Hugging Face models")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(2)
def test_llama_for_causal_lm(mode):
    alone, model = _model(), _model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend("inductor")
    call = torch.compile(model, backend=counter, fullgraph=True) if mode == "full" else model
    generator = torch.Generator().manual_seed(0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for _ in range(3):
        tokens = torch.randint(67, (4, 16), generator=generator)
        losses = []
        for m, batch, optimizer in zip((alone, call), (tokens, my_part(tokens)), optimizers, strict=True):
            losses.append(_step(m, optimizer, batch))
        torch.testing.assert_close(mean_over_ranks(losses[1]), losses[0].item(), rtol=1e-5, atol=0)
        assert_close(full_grads(model), full_grads(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert counter.frame_count == (1 if mode == "full" else 0)
    assert not torch._dynamo.utils.counters["graph_break"]
