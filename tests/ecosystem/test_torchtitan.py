"""torchtitan's Trainer and debug models on the CPU, with torch.distributed.fsdp.fully_shard and with ours."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from importlib import import_module
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp

pytest.importorskip("torchtitan")
if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    pytest.skip("torchtitan 0.3.0 needs torch 2.13 or later", allow_module_level=True)

from fsdp_compiled import as_torch_fsdp
from tests.ecosystem.training import BACKEND, assert_sharded_by, watch
from tests.support.ranks import close_pool, on_ranks
from tests.support.training import full_params

EXPERTS = {"parallelism.expert_parallel_degree": 2}


@pytest.fixture(autouse=True, scope="module")
def own_processes():
    """End the ranks' processes: torchtitan replaces FakeTensorMode.__init__ and changes settings of Dynamo."""
    yield
    close_pool()


def _import_on_cpu():
    """Import torchtitan with the CPU as its device; where it finds no accelerator it would take CUDA."""
    with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
        import torchtitan.trainer
    return torchtitan.trainer


def _loader_config():
    """Random tokens of this data-parallel rank, of which the first ones have no label."""
    from torchtitan.components.dataloader import BaseDataLoader

    class Loader(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **kwargs):
            self.made, self.rank, self.shape = 0, dp_rank, (local_batch_size, seq_len + 1)

        def __iter__(self):
            while True:
                generator = torch.Generator().manual_seed(self.made * 10 + self.rank)
                tokens = torch.randint(256, self.shape, generator=generator)
                labels = tokens[:, 1:].clone()
                labels[0, : 1 + self.rank] = -100
                self.made += 1
                yield {"input": tokens[:, :-1]}, labels

        def state_dict(self):
            return {"made": self.made}

        def load_state_dict(self, state):
            self.made = state["made"]

    return Loader.Config()


def _config(model, folder=None, steps=3, **options):
    """The configuration of torchtitan's debug model with two layers, attention and data that the CPU can do."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = getattr(import_module(f"torchtitan.models.{model}.config_registry"), f"{model}_debugmodel")()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    options = {
        "dataloader": _loader_config(),
        "tokenizer": mock.Mock(to_dict=dict),
        "training.local_batch_size": 2,
        "training.seq_len": 32,
        "training.steps": steps,
        "training.disable_cuda_graphs": True,
        "training.mixed_precision_param": "float32",
        "parallelism.spmd_backend": "partial_dtensor",
        "lr_scheduler.total_steps": 10,
        "optimizer.implementation": "for-loop",
        "checkpoint.enable": folder is not None,
        "checkpoint.interval": 2,
        "validator.enable": False,
        "debug.seed": 0,
        "debug.enable_structured_logging": False,
        "dump_folder": str(folder or ""),
        **options,
    }
    for name, value in options.items():
        *path, last = name.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


def _train(model, ours, mode="eager", **options):
    """Train; return losses with the norms of gradients, and parameters."""
    trainer_module = _import_on_cpu()
    from torchtitan.components import metrics
    from torchtitan.models.common.attention import ScaledDotProductAttention

    seen = []
    stats = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    monitor = mock.Mock(device_name="cpu", get_peak_stats=mock.Mock(return_value=stats))
    with ExitStack() as stack:
        for owner, name, value in (
            (metrics, "build_device_memory_monitor", lambda: monitor),
            (metrics.MetricsProcessor, "log", lambda self, step, loss, _, norm, **kw: seen.append((loss, norm))),
            (trainer_module.dist_utils, "set_pg_timeouts", lambda **kw: None),
            (ScaledDotProductAttention, "sdpa_backends", [torch.nn.attention.SDPBackend.MATH]),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.dict(os.environ, LOCAL_RANK=str(dist.get_rank())))
        options["compile.enable"] = mode == "blocks"
        options["compile.backend"] = BACKEND
        options["compile.components"] = ["model"]
        with as_torch_fsdp() if ours else nullcontext():
            trainer = _config(model, **options).build()
        gc.enable()  # torchtitan turns collection off, and collects between steps
        (built,) = trainer.model_parts
        assert_sharded_by(ours, built)
        if mode == "full":
            built.compile(backend=BACKEND, fullgraph=True)
        trainer.train()
        trainer.close()
    return seen, full_params(built)


CASES = [(model, mode) for model in ("llama3", "deepseek_v3") for mode in ("eager", "blocks", "full")]


@pytest.mark.parametrize(("model", "mode"), CASES)
@on_ranks(2)
def test_trains_like_torch(model, mode):
    """With torchtitan's chunked loss and selective activation checkpoints; DeepSeek V3's experts lie on 2 ranks."""
    options = EXPERTS if model == "deepseek_v3" else {}
    want, want_params = _train(model, False, **options)
    with watch() as seen:
        got, params = _train(model, True, mode, **options)
    # full: the first loss sets reshard_after_forward of the head, and the second step compiles again
    assert seen.graphs == {"eager": 0, "blocks": 1 if model == "llama3" else 2, "full": 2}[mode], seen
    assert seen.hooked > 0 and not seen.breaks and (seen.in_graphs > 0) == (mode == "full"), seen
    assert len(got) == 3
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    torch.testing.assert_close(params, want_params, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_resumes_what_torch_saved(tmp_path):
    uninterrupted, want = _train("llama3", True, steps=4)
    before, _ = _train("llama3", False, steps=2, folder=tmp_path)
    with watch() as seen:
        after, got = _train("llama3", True, "full", steps=4, folder=tmp_path)
    assert seen.in_graphs > 0, seen
    torch.testing.assert_close(before + after, uninterrupted, rtol=1e-5, atol=0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
