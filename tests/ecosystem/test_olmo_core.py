"""OLMo-core's train module on the CPU, with torch.distributed.fsdp.fully_shard and with ours."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp

pytest.importorskip("olmo_core")
if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    pytest.skip("tried with torch 2.13 and later", allow_module_level=True)

from fsdp_compiled import as_torch_fsdp
from tests.ecosystem.training import BACKEND, assert_sharded_by, watch
from tests.support.ranks import on_ranks
from tests.support.training import full_params

LENGTH = 16


def _build(model, dp):
    """A train module without a trainer, of a model on the meta device, which it shards and initialises."""
    import olmo_core.distributed.parallel
    from olmo_core.nn.attention import AttentionBackendName
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train.train_module.transformer import TransformerDataParallelConfig, TransformerTrainModule

    olmo_core.distributed.parallel._WORLD_MESH = None  # one for each process
    sizes = {"d_model": 32, "vocab_size": 64, "n_layers": 2, "n_heads": 4, "hidden_size_multiple_of": 16}
    config = TransformerConfig.llama_like(qk_norm=True, attn_backend=AttentionBackendName.torch, **sizes, **model)
    return TransformerTrainModule(
        config.build(init_device="meta"),
        AdamWConfig(lr=1e-2, eps=1e-3),  # with less, updates by gradients near zero depend on their last bits
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        dp_config=TransformerDataParallelConfig(**dp),
        max_grad_norm=0.5,
        device=torch.device("cpu"),
    )


def _train(ours, mode, model, dp):
    """Take three steps of two micro-batches; return losses with the norms of gradients, and parameters."""
    torch.manual_seed(0)
    with as_torch_fsdp() if ours else nullcontext():
        module = _build(model, dp)
    built, seen = module.model, []
    assert_sharded_by(ours, built)
    if mode == "full":
        built.compile(backend=BACKEND, fullgraph=True)
    if mode == "blocks":
        for block in built.blocks.values():
            block.compile(backend=BACKEND)
    module._trainer = mock.Mock(global_step=1, dp_process_group=None)
    module._trainer.record_metric = lambda name, value, *_, **__: seen.append(float(value))
    module.record_metric = lambda name, *_, **__: None
    module.record_ce_loss = lambda value, *_, **__: seen.append(float(value))
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        module.zero_grads()
        module.train_batch({"input_ids": torch.randint(64, (4, LENGTH), generator=generator)})
        module.optim_step()
    return seen, full_params(built)


@pytest.mark.parametrize(
    ("model", "dp"),
    [
        ({}, {"name": "fsdp"}),
        ({}, {"name": "fsdp", "wrapping_strategy": "fine_grained", "prefetch_factor": 1}),
        ({"n_kv_heads": 2}, {"name": "hsdp", "num_replicas": 2}),
    ],
)
@pytest.mark.parametrize("mode", ["eager", "blocks", "full"])
@on_ranks(2)
def test_trains_like_torch(model, dp, mode):
    want, want_params = _train(False, "eager", model, dp)
    with watch() as seen:
        got, params = _train(True, mode, model, dp)
    assert (seen.graphs > 0) == (mode != "eager") and not seen.breaks, seen
    assert (seen.hooked == 0) == (mode == "full") and (seen.in_graphs > 0 or mode != "full"), seen
    assert len(set(got)) == 6
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    torch.testing.assert_close(params, want_params, rtol=1e-5, atol=1e-6)
