"""transformers' own sharding, from_pretrained(distributed_config=...), with the switch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import transformers

try:
    from transformers.distributed import DistributedConfig
except ImportError:
    pytest.skip("transformers has no DistributedConfig", allow_module_level=True)

from fsdp_compiled import FSDPModule, as_torch_fsdp
from tests.ecosystem.training import (
    BACKEND,
    MODES,
    alone,
    assert_equal_losses,
    assert_mode,
    my_batches,
    watch,
)
from tests.support import huggingface
from tests.support.ranks import on_ranks
from tests.support.training import mean_over_ranks


def _load(folder):
    if dist.get_rank() == 0:
        huggingface.build("llama").save_pretrained(folder)
    dist.barrier()
    with as_torch_fsdp():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(fsdp_size=2)
        )


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_trains_like_one_process(mode, tmp_path):
    with watch() as seen:
        model = _load(tmp_path)
        assert isinstance(model, FSDPModule)
        call = torch.compile(model, backend=BACKEND, fullgraph=True) if mode == "full" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for tokens in my_batches():
            loss = huggingface.loss(call, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
    assert_equal_losses(losses, alone())
    assert_mode(seen, mode, len(list(model.parameters())))


@on_ranks(2)
def test_ranks_generate_texts_of_different_lengths(tmp_path):
    model, rank = _load(tmp_path), dist.get_rank()
    tokens = huggingface.token_batches(1)[0, :2, :4]
    made = model.generate(tokens, max_new_tokens=2 + 3 * rank, do_sample=False)
    assert made.shape == (2, 6 + 3 * rank)
    want = huggingface.build("llama").generate(tokens, max_new_tokens=2 + 3 * rank, do_sample=False)
    assert torch.equal(made, want)
