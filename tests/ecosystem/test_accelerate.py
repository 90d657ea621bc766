"""accelerate's FSDP2 plugin, unmodified, with the switch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import TorchDynamoPlugin

from fsdp_compiled import FSDPModule, as_torch_fsdp, fully_shard
from tests.ecosystem.training import (
    BACKEND,
    MODES,
    accelerate_on_cpu,
    alone,
    assert_equal_losses,
    assert_mode,
    each_mode,
    my_batches,
    watch,
)
from tests.support import huggingface
from tests.support.ranks import on_ranks
from tests.support.training import assert_close, full_params, mean_over_ranks


def _accelerator(mode, ram_efficient=False, wrap="transformer_based_wrap", **kwargs):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy=wrap, cpu_ram_efficient_loading=ram_efficient
    )
    dynamo = TorchDynamoPlugin(backend=BACKEND) if mode == "full" else None
    return Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_plugin=dynamo, **kwargs)


def _prepare(accelerator, name="llama"):
    model = huggingface.build(name)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def _train(accelerator, model, optimizer, batches):
    losses = []
    for tokens in batches:
        with accelerator.accumulate(model):
            loss = huggingface.loss(model, tokens)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


@each_mode
@on_ranks(2)
def test_trains_like_one_process(mode):
    with accelerate_on_cpu(), watch() as seen, as_torch_fsdp():
        accelerator = _accelerator(mode)
        model, optimizer = _prepare(accelerator)
        assert isinstance(accelerator.unwrap_model(model, keep_torch_compile=False), FSDPModule)
        losses = _train(accelerator, model, optimizer, my_batches())
    assert_equal_losses(losses, alone(clip=1.0))
    assert_mode(seen, mode, len(list(model.parameters())))


@each_mode
@on_ranks(2)
def test_accumulates_without_sync(mode):
    """Two micro-batches a step give one process's parameters."""
    want = huggingface.build("llama")
    optimizer = torch.optim.AdamW(want.parameters(), lr=1e-2)
    for tokens in huggingface.token_batches(4).unflatten(0, (2, 2)):
        for part in tokens:
            (huggingface.loss(want, part) / 2).backward()
        torch.nn.utils.clip_grad_norm_(want.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with accelerate_on_cpu(), watch() as seen, as_torch_fsdp():
        accelerator = _accelerator(mode, gradient_accumulation_steps=2)
        model, optimizer = _prepare(accelerator)
        _train(accelerator, model, optimizer, my_batches(2))
        reductions = seen.hooked
        _train(accelerator, model, optimizer, my_batches(4)[2:])
    if mode == "eager":
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        assert reductions < 5 * len(units)  # two all-gathers each of two micro-batches, and one reduction
    assert_close(full_params(accelerator.unwrap_model(model, keep_torch_compile=False)), full_params(want), rtol=1e-4)


@on_ranks(2)
def test_bf16_and_ram_efficient_loading_like_fsdp2():
    losses = []
    for switch in (nullcontext, as_torch_fsdp):
        with accelerate_on_cpu(), switch():
            accelerator = _accelerator("eager", ram_efficient=True, mixed_precision="bf16")
            model, optimizer = _prepare(accelerator)
            assert isinstance(model, FSDPModule) == (switch is as_torch_fsdp)
            losses.append(_train(accelerator, model, optimizer, my_batches()))
    assert losses[0] == losses[1]


@on_ranks(2)
def test_bf16_in_one_graph_like_hooks():
    losses = []
    for mode in MODES:
        with accelerate_on_cpu(), watch() as seen, as_torch_fsdp():
            accelerator = _accelerator(mode, ram_efficient=True, mixed_precision="bf16")
            model, optimizer = _prepare(accelerator)
            losses.append(_train(accelerator, model, optimizer, my_batches()))
        assert_mode(seen, mode, len(list(model.parameters())))
    assert_equal_losses(losses[1], losses[0], rtol=1e-2)


@each_mode
@on_ranks(2)
def test_saves_and_loads_the_state(mode, tmp_path):
    with accelerate_on_cpu(), as_torch_fsdp():
        accelerator = _accelerator(mode)
        model, optimizer = _prepare(accelerator)
        _train(accelerator, model, optimizer, my_batches(1))
        accelerator.save_state(str(tmp_path / "state"))
        want = _train(accelerator, model, optimizer, my_batches())
        accelerator.load_state(str(tmp_path / "state"))
        assert _train(accelerator, model, optimizer, my_batches()) == want
        whole = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            assert whole.keys() == huggingface.build("llama").state_dict().keys()
            assert all(type(value) is torch.Tensor for value in whole.values())


@each_mode
@on_ranks(2)
def test_a_model_that_is_sharded_already(mode):
    """Prepared as it is, without the switch."""
    with accelerate_on_cpu(), watch() as seen:
        accelerator = _accelerator("eager", wrap="no_wrap")
        model = huggingface.build("llama", sharded=True)
        call = torch.compile(model, backend=BACKEND, fullgraph=True) if mode == "full" else model
        call, optimizer = accelerator.prepare(call, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = _train(accelerator, call, optimizer, my_batches())
    assert_equal_losses(losses, alone(clip=1.0))
    assert_mode(seen, mode, len(list(model.parameters())))


class Rows(nn.Module):
    """Parameters of one row, of which the second rank has nothing."""

    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList(torch.randn(1, 8) for _ in range(3))

    def forward(self, x):
        return x * self.rows[0] + self.rows[1] * self.rows[2]


@on_ranks(2)
def test_empty_shards_stay_apart():
    with accelerate_on_cpu():
        model = fully_shard(Rows())
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = _accelerator("eager", wrap="no_wrap").prepare(model, optimizer)
    (found,) = [group["params"] for group in optimizer.param_groups]
    assert all(mine is param for mine, param in zip(found, model.parameters(), strict=True))
