"""LoRA on quantised weights of torchao, which are sharded, too."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("peft")
pytest.importorskip("torchao")
pytest.importorskip("transformers")

from peft import LoraConfig, get_peft_model
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, PerTensor, quantize_
from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

from fsdp_compiled import fully_shard
from tests.ecosystem.training import MODES, assert_equal_losses, losses_of, watch
from tests.support import huggingface
from tests.support.ranks import on_ranks
from tests.support.training import assert_close, batches, compiled, full, my_part

CONFIGS = {
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(8)),
}


def _model(config):
    torch.manual_seed(0)
    model = huggingface.MODELS["llama"]()
    quantize_(model.model.layers, config)
    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, lora)


def _train(model, call, sharded):
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    return losses_of(call, optimizer, sharded)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_trains_like_one_process(mode, kind):
    alone, model = _model(CONFIGS[kind]), _model(CONFIGS[kind])
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    quantised = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert isinstance(quantised, DTensor) and quantised._local_tensor.qdata.shape == (16, 32)
    with watch() as seen:
        got = _train(model, compiled(model) if mode == "full" else model, sharded=True)
    assert (seen.graphs, seen.hooked > 0) == ((1, False) if mode == "full" else (0, True)) and not seen.breaks
    assert_equal_losses(got, _train(alone, alone, sharded=False))
    trained = {name: full(param) for name, param in model.named_parameters() if param.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert_close(trained, {name: param for name, param in alone.named_parameters() if name in trained}, rtol=1e-4)


@on_ranks(2)
def test_scales_of_whole_tensors_stay_whole():
    alone = _model(Int8WeightOnlyConfig(granularity=PerTensor()))
    model = _model(Int8WeightOnlyConfig(granularity=PerTensor()))
    fully_shard(model)
    assert_equal_losses(_train(model, model, sharded=True), _train(alone, alone, sharded=False))


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_what_cannot_be_sharded_names_the_way(mode):
    """Rows that do not divide by the ranks; left alone, the rest trains."""

    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.Linear(7, 8))
        quantize_(model[0], Int8WeightOnlyConfig())
        return model

    model, alone = build(), build()
    with pytest.raises(NotImplementedError, match=r"0\.weight: Int8Tensor defines no all-gather.*ignored_params="):
        fully_shard(model)
    assert not isinstance(model[1].weight, DTensor)
    fully_shard(model, ignored_params={model[0].weight})
    call = compiled(model) if mode == "full" else model
    (data,) = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))
    alone(data).square().mean().backward()
    call(my_part(data)).square().mean().backward()
    assert_close(
        {"bias": full(model[0].bias.grad), "weight": full(model[1].weight.grad)},
        {"bias": alone[0].bias.grad, "weight": alone[1].weight.grad},
    )


class Adapted(torch.nn.Linear):
    """A frozen weight of torchao's NF4Tensor, which has an all-gather for FSDP2, and an adapter, as in QLoRA."""

    def __init__(self):
        super().__init__(512, 512, bias=False)
        self.weight = torch.nn.Parameter(nf4_tensor.to_nf4(self.weight.detach()), requires_grad=False)
        self.down, self.up = torch.nn.Linear(512, 2, bias=False), torch.nn.Linear(2, 512, bias=False)

    def forward(self, x):
        return nf4_tensor.linear_nf4(x, self.weight) + self.up(self.down(x))


@pytest.mark.parametrize("reshard", [False, True])
@on_ranks(2)
def test_weights_that_only_do_what_fsdp2_asks_of_them(reshard):
    """An NF4Tensor cannot be narrowed, and a clone of one is quantised anew."""

    def train(shard):
        torch.manual_seed(0)
        model = torch.nn.Sequential(Adapted(), Adapted())
        for layer in model:
            shard(layer, reshard_after_forward=reshard)
        shard(model)
        local = model[0].weight._local_tensor
        assert isinstance(local, nf4_tensor.NF4Tensor) and local.quantized_data.numel() == 512 * 512 // 4
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=10.0)
        losses = []
        for data in batches(3, 8, 512):
            loss = model(my_part(data)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, {name: full(param) for name, param in model.named_parameters() if param.requires_grad}

    def torchs(module, **kwargs):
        torch_fully_shard(module, **kwargs).set_force_sum_reduction_for_comms(True)  # gloo cannot scale

    got, want = train(fully_shard), train(torchs)
    assert len(set(got[0])) == 3
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
