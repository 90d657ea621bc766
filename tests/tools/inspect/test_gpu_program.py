"""The program of a GPU that is not there: what is generated and assembled, and that torch is as before afterwards."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from quantised_all_gather import gather_quantised
from torch import nn

from fsdp_compiled import CPUOffloadPolicy, MixedPrecisionPolicy, cli, fully_shard
from fsdp_compiled.inspect import capture, gpu_program
from fsdp_compiled.passes import CLUSTERS, kinds
from fsdp_compiled.testing.llama import PRESETS, Config, Llama
from fsdp_compiled.testing.models import MLP, DoubleLinear, MLPStack, SkipModel
from fsdp_compiled.testing.nested import DEVICEInitMode, NestedWrappedModule
from fsdp_compiled.testing.transformer import TransformerWithSharedParams
from tests.support.graphs import sequence
from tests.support.training import shard, with_regions
from tests.support.variants import thorough

pytestmark = pytest.mark.usefixtures("fake_group")

pytest.importorskip("triton")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """A block with biases: attention, under a mask if it is given one, and a feed-forward, or one of two experts."""

    def __init__(self, width: int, experts: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        feed = [nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(1 + experts)]
        self.feed, self.router = nn.ModuleList(feed), nn.Linear(width, 2)

    def forward(self, x, mask=None):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)
        shares = self.router(x).softmax(-1).unbind(-1)
        return x + sum(share[..., None] * feed(x) for share, feed in zip(shares, self.feed, strict=False))


class Blocks(nn.Module):
    def __init__(self, width: int = 32, experts: bool = False, masked: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, experts) for _ in range(1))
        self.masked = masked

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril() > 0 if self.masked else None
        for block in self.blocks:
            x = block(x, mask)
        return F.dropout(x, 0.1)


def _capture(model, *args, device="H100", **kwargs):
    shard(model, "eager", **kwargs)
    return capture(model, *args, device=device)


def _waits(code):
    """What wrappers assert of what waits return: by stage and text of the bucket, size and stride by index."""
    waits, items, found = {}, {}, {}
    for line in code.splitlines():
        if match := re.match(r"\s+(\w+) = torch\.ops\.fsdp_compiled\.wait_(\w+)\.default\(\w+, ('.*')\)", line):
            waits[match[1]] = found[match[2], ast.literal_eval(match[3])] = {}
        elif (match := re.match(r"\s+(\w+) = (\w+)\[(\d+)\]$", line)) and match[2] in waits:
            items[match[1]] = waits[match[2]], int(match[3])
        elif (
            match := re.match(r"\s+assert_(?:size_stride|tensor_metadata)\((\w+), (\(.*?\)), (\(.*?\)), ", line)
        ) and match[1] in items:
            of, index = items[match[1]]
            of[index] = tuple(map(ast.literal_eval, match.groups()[1:]))
    return found, set(items), set(re.findall(r"assert_alignment\((\w+), 16, 'torch.ops.fsdp_compiled.wait", code))


def _returned(stage, text):
    """What the recipes return on the CPU, where a stage is the only one of its bucket."""
    kind = kinds.by_operator[f"launch_{stage}"]
    bucket = kind.bucket.decode(text)
    shapes = [each.shard_shape if kind.is_ahead else each.shape for each in bucket.layouts]
    inputs = [torch.zeros(shape, dtype=param.dtype) for shape, param in zip(shapes, bucket.params, strict=True)]
    ops = torch.ops.fsdp_compiled
    return getattr(ops, f"wait_{stage}")(getattr(ops, f"launch_{stage}")(inputs, text), text)


def _check_waits(code):
    """What waits return is as the wrapper asserts."""
    waits, items, aligned = _waits(code)
    assert waits and items == aligned
    for (stage, text), asserted in waits.items():
        results = _returned(stage, text)
        assert asserted == {i: (tuple(each.shape), each.stride()) for i, each in enumerate(results)}
        assert all(each.data_ptr() % 16 == 0 for each in results)


def _check_generated(graph, device):
    """The kernels that Triton has generated and assembled for the GPU, and nothing runs on the CPU."""
    generated = [kernel for kernel in graph.kernels if kernel.is_generated]
    assert generated and all(k.registers > 0 and k.spills == 0 and k.shared_bytes >= 0 for k in generated)
    assert all(kernel.bytes > 0 and kernel.estimate_us >= 7 for kernel in graph.kernels)
    major, minor = gpu_program.GPUS[device].capability
    assert f"cc={major}{minor}," in graph.code
    assert "_cpu(" not in graph.code[graph.code.index("def call(") :]
    _check_waits(graph.code)
    return generated


@pytest.mark.parametrize(
    ("device", "build", "attention"),
    [
        ("H100", lambda: (Blocks(masked=True), (torch.zeros(2, 12, 32),)), "efficient"),
        ("B200", lambda: (Blocks(experts=True), (torch.zeros(2, 12, 32),)), "flash"),
    ],
)
def test_a_program_is_generated_and_assembled(device, build, attention):
    model, inputs = build()
    captured = _capture(model, *inputs, device=device, mp_policy=BF16)
    assert captured.cluster == CLUSTERS[device]
    assert [graph.kind for graph in captured.graphs] == ["forward", "backward"]
    for graph in captured.graphs:
        generated = _check_generated(graph, device)
        names = re.findall(r"^ +(triton_\w+)\.run\(", graph.code, re.MULTILINE)
        assert [kernel.name for kernel in generated] == names
        others = Counter(kernel.name for kernel in graph.kernels if not kernel.is_generated)
        assert (
            others[f"aten._scaled_dot_product_{attention}_attention" + "_backward" * (graph.kind == "backward")] == 1
        )
        products = sequence(graph.module.graph, "mm", "addmm", "bmm")
        assert others["mm"] + others["addmm"] + others["bmm"] == len(products)


def _llama(quantised=False):
    """What the examples train."""
    model = Llama(replace(PRESETS["tiny"], vocab=64, layers=1))
    if quantised:
        gather_quantised(model.blocks, torch.int8)
    for block in model.blocks:
        fully_shard(block, mp_policy=BF16)
    return model, (torch.zeros(2, 16, dtype=torch.int64),) * 2


def _transformer():
    model = TransformerWithSharedParams(dist.group.WORLD, DEVICEInitMode.DEVICE_NEVER, True, deterministic=False)
    for layer in (*model.transformer.encoder.layers, *model.transformer.decoder.layers):
        fully_shard(layer, mp_policy=BF16)
    return model, model.get_input(torch.device("cpu"))


def _nested():
    model = NestedWrappedModule(dist.group.WORLD, False, DEVICEInitMode.DEVICE_NEVER, deterministic=True)
    return model, model.get_input(torch.device("cpu"))


def _convolutions():
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    return nn.Sequential(*layers), (torch.zeros(2, 3, 8, 8),)


MODELS = {
    "llama": _llama,
    "llama with quantised all-gathers": lambda: _llama(quantised=True),
    "transformer": _transformer,
    "nested": _nested,
    "mlp": lambda: (MLP(32, with_buffer=True), (torch.zeros(4, 32),)),
    "mlps": lambda: (MLPStack(16), (torch.zeros(4, 16),)),
    "two linears": lambda: (DoubleLinear(16), (torch.zeros(4, 16),)),
    "skips": lambda: (SkipModel(double_nest=True), (torch.zeros(4, 10),)),
    "convolutions": _convolutions,
}


@thorough()
@pytest.mark.parametrize("device", ["A100", "H100", "B200"])
@pytest.mark.parametrize("name", MODELS)
def test_a_program_of_each_kind_of_block_for_each_generation_of_gpus(name, device):
    model, inputs = MODELS[name]()
    fully_shard(model, mp_policy=BF16)
    captured = capture(model, *inputs, device=device)
    assert [graph.kind for graph in captured.graphs] == ["forward", "backward"]
    for graph in captured.graphs:
        _check_generated(graph, device)


@thorough()
def test_a_sharded_program_has_about_as_many_kernels_as_the_unsharded_one():
    """The order of collectives may keep few from being fused."""
    counts = []
    for is_sharded in (False, True):
        model = Llama(Config(vocab=61, width=32, layers=1, heads=4, kv_heads=2, hidden=48, max_seq=16))
        model.to(torch.float32 if is_sharded else torch.bfloat16)
        others = {param for param in model.parameters() if param is not model.norm.weight}
        policy, ignored = (BF16, None) if is_sharded else (MixedPrecisionPolicy(), others)
        fully_shard(model, mp_policy=policy, ignored_params=ignored)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        counts.append([len(graph.kernels) for graph in capture(model, tokens, tokens, device="H100").graphs])
    assert all(abs(sharded - unsharded) <= 2 for unsharded, sharded in zip(*counts, strict=True))


def _state():
    """What torch and triton say and hold of GPUs."""
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.scheduler import Scheduler
    from triton.runtime import driver

    names = [*gpu_program.replacements(gpu_program.GPUS["H100"]), gpu_program.MISSING]
    values = {name: inspect.getattr_static(*_owner(name), None) for name in names}
    own = "__getitem__" in vars(torch.Tensor), "__invert__" in vars(torch.Tensor)
    hooks = TritonKernel.call_kernel, Scheduler.codegen_extern_call, driver._active
    answers = torch.cuda.is_available(), torch.cuda.device_count(), torch.utils._triton.has_triton()
    return values, own, hooks, answers, config.get_config_copy(), dict(os.environ)


def _owner(name):
    parts = name.split(".")
    length = next(n for n in range(len(parts), 0, -1) if _is_module(".".join(parts[:n])))
    owner = import_module(".".join(parts[:length]))
    for part in parts[length:-1]:
        owner = getattr(owner, part)
    return owner, parts[-1]


def _is_module(name):
    try:
        return bool(import_module(name))
    except ImportError:
        return False


def test_torch_is_as_before():
    model = fully_shard(nn.Linear(8, 8))
    before = _state()
    capture(model, torch.zeros(2, 8), device="H100")
    assert _state() == before
    with (
        pytest.raises(RuntimeError, match="failed inside"),
        gpu_program._Program(gpu_program.GPUS["A100"], CLUSTERS["A100"]).replacing(),
    ):
        assert torch.cuda.get_device_capability() == (8, 0)
        raise RuntimeError("failed inside")
    assert _state() == before


def test_a_program_after_another_is_of_its_own_gpu():
    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    for device, multiprocessors in (("A100", 108), ("B200", 148), ("A100", 108)):
        with torch.no_grad():
            (graph,) = capture(model, torch.zeros(8, 64), device=device).graphs
        assert [kernel.is_generated for kernel in graph.kernels] == [False, True]
        assert f"multi_processor_count={multiprocessors}," in graph.code


def test_the_kernels_of_regions_count_at_every_call():
    model = Llama(Config(vocab=61, width=32, layers=2, heads=4, kv_heads=2, hidden=48, max_seq=16))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    shard(model, "eager", mp_policy=BF16)
    with_regions(model, model.blocks)
    for graph in capture(model, tokens, tokens, device="A100").graphs:
        generated = _check_generated(graph, "A100")
        calls = sum(len(region.calls) for region in graph.regions)
        assert calls == sum("flash" in kernel.name for kernel in graph.kernels) == 2
        assert len({kernel.name for kernel in generated}) < len(generated)


def test_a_tensor_that_a_region_makes_is_on_the_gpu():
    model = Blocks()
    model.blocks.append(Block(32, experts=False))
    shard(model, "eager", mp_policy=BF16)
    with_regions(model, model.blocks)
    for graph in capture(model, torch.randn(2, 16, 32, requires_grad=True), device="H100").graphs:
        assert [len(region.calls) for region in graph.regions] == [2]
        _check_generated(graph, "H100")


def test_errors(monkeypatch):
    model = fully_shard(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="device: expected one of A100, H100, H200, B200, got 'V100'"):
        capture(model, torch.zeros(2, 8), device="V100")
    offloaded = fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(NotImplementedError, match="device: shards of CPUOffloadPolicy; capture it without device"):
        capture(offloaded, torch.zeros(2, 8), device="H100")
    monkeypatch.setattr(gpu_program._triton, "has_triton_package", lambda: False)
    with pytest.raises(ImportError, match="device: expected triton, .* got none; run pip install triton"):
        capture(model, torch.zeros(2, 8), device="H100")


PROGRAM = """\
import torch
from torch import nn
from fsdp_compiled import fully_shard

def build():
    return fully_shard(nn.Sequential(nn.Linear(8, 8), nn.GELU())), (torch.ones(2, 8),)
"""


def test_the_command_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    page = tmp_path / "page.html"
    words = ["inspect", f"{tmp_path / 'program.py'}:build", "--device", "A100", "--code", "--save", str(page)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert ", cluster A100" in out
    assert out.index("\nbackward: collectives 1, ") < out.index(
        "\nkernels of forward: launches 2, of generated kernels 1 "
    )
    table = "launches +bytes +estimate +registers +spills +shared +kernel\n"
    table += r" +1 +\d+ B +7 µs +- +- +- +(add)?mm\n +1 +\d+ B +7 µs +\d+ +0 +0 B +triton_poi_"
    assert re.search(table, out)
    assert out.count("code that Inductor generated\n") == out.count("async_compile.wait(") == 2
    assert page.read_text().count("<h3>Kernels of the GPU's program</h3>") == 2
    monkeypatch.setattr(gpu_program._triton, "has_triton_package", lambda: False)
    assert cli.main(words) == 2
    assert "inspect: error: device: expected triton" in capsys.readouterr().err
