"""Plans against captures of the same model on the ranks that they speak of."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compiled
from fsdp_compiled import MixedPrecisionPolicy, SchedulePolicy, fully_shard
from fsdp_compiled.cli import main
from fsdp_compiled.inspect import capture
from fsdp_compiled.passes.cost import CLUSTERS
from fsdp_compiled.planner import Layout, plan
from fsdp_compiled.planner.plan import BF16, batches, layouts
from fsdp_compiled.planner.trials import trial
from fsdp_compiled.testing.llama import Config, Llama
from tests.support.variants import thorough

CONFIG = Config(vocab=512, width=256, layers=4, heads=4, kv_heads=2, hidden=512, max_seq=128)
RANKS = (1, 8, 16)
CLUSTER = replace(CLUSTERS["H100"], kernel_us=0.01)  # or such small kernels would all take the least time


def build(batch):
    tokens = torch.zeros(batch, CONFIG.max_seq, dtype=torch.int64)
    return Llama(CONFIG), (tokens, tokens)


def build_small(batch):
    tokens = torch.zeros(batch, 16, dtype=torch.int64)
    return Llama(replace(CONFIG, layers=1, width=32, max_seq=16)), (tokens, tokens)


def build_short(batch):
    tokens = torch.zeros(batch, 16, dtype=torch.int64)
    return Llama(replace(CONFIG, layers=16, max_seq=16)), (tokens, tokens)


class WithoutLoss(Llama):
    def forward(self, tokens):
        return super().forward(tokens)


class Blocks(nn.Module):
    """Blocks of which the model reads an attribute, with a large buffer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.register_buffer("mask", torch.ones(512, 512))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x) / block.in_features**0.5)
        return (x * self.mask[0, 0]).sum()


def build_blocks(batch):
    return Blocks(), (torch.zeros(batch, 64),)


def build_without_loss(batch):
    return WithoutLoss(CONFIG), (torch.zeros(batch, CONFIG.max_seq, dtype=torch.int64),)


def build_frozen(batch):
    model, inputs = build_blocks(batch)
    return model.requires_grad_(False), inputs


def build_sharded(batch):
    model = nn.Linear(8, 8)
    return fully_shard(model), (torch.zeros(batch, 8),)


@pytest.fixture(scope="module")
def planned():
    return plan(build, cluster=CLUSTER, ranks=RANKS, tokens_per_step=16 * 4 * CONFIG.max_seq)


def option(planned, ranks, shards, batch, reshards=True, checkpointing="none"):
    (found,) = (
        each
        for each in planned.options[ranks]
        if (each.layout.shards, each.batch, each.reshard_after_forward) == (shards, batch, reshards)
        and each.checkpointing == checkpointing
    )
    return found


def captured(ranks, shards, batch, reshards=True, optimizer="adamw", cluster=CLUSTER):
    """Capture the model on these ranks."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    names, sizes = ("replicate", "shard"), (ranks // shards, shards)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    mesh = mesh if shards < ranks else mesh["shard"]
    model, inputs = build(batch)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given = {} if reshards else {"reshard_after_forward": False}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, **given)
    fully_shard(model, mesh=mesh, mp_policy=policy, **given)
    fsdp_compiled.compile(model, regions="auto")
    try:
        schedule = SchedulePolicy(cluster=cluster)
        return capture(model, *inputs, schedule=schedule, code=False, optimizer=optimizer)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "shards", "reshards"), [(8, 8, True), (16, 16, True), (16, 8, True), (8, 8, False)]
)
@thorough(when=lambda ranks, shards: ranks == shards == 16)
def test_an_option_costs_what_a_capture_on_its_ranks_says(planned, ranks, shards, reshards):
    found, there = option(planned, ranks, shards, 2, reshards), captured(ranks, shards, 2, reshards)
    once = found.accumulation
    parts = there.step_parts_us
    assert found.parts_us["optimizer"] == pytest.approx(parts["optimizer"])
    compute = parts["matrix products"] + parts["attention"] + parts["fused kernels"]
    assert found.parts_us["compute"] == pytest.approx(once * compute)
    assert found.step_us == pytest.approx(once * (there.step_us - there.optimizer_us) + there.optimizer_us, rel=0.02)
    assert found.parts_us["waits for collectives"] > 0
    gradients = there.memory.reduced_bytes if once > 1 else 0
    held = sum(found.parts_bytes.values()) - gradients
    # On 16 ranks all gradients share one bucket; on the 8 that were captured they do not.
    assert held == pytest.approx(there.peak_bytes, rel=0.05 if shards == 8 else 0.1)


def test_the_host_takes_what_a_capture_says(monkeypatch):
    monkeypatch.setitem(globals(), "CONFIG", replace(CONFIG, layers=2))
    slow = replace(CLUSTER, launch_us=50.0, parameter_us=100.0)
    tokens = 8 * 2 * CONFIG.max_seq
    found = option(plan(build, cluster=slow, ranks=(8,), tokens_per_step=tokens), 8, 8, 2)
    parts = captured(8, 8, 2, cluster=slow).step_parts_us
    assert found.parts_us["host"] == pytest.approx(parts["host"], rel=0.02) and parts["host"] > 0


def tried(build, optimizer):
    dist.init_process_group("fake", rank=0, world_size=8)
    try:
        return trial(build, "none", CLUSTER, BF16, optimizer)
    finally:
        dist.destroy_process_group()


def test_muon_takes_what_a_capture_on_its_ranks_says():
    found = tried(build, "muon")
    there = captured(16, 8, 2, optimizer="muon")
    assert found.optimizer_us(Layout(8, 2), "muon") == pytest.approx(there.optimizer_us)
    state = found.memory(Layout(8, 2), True, 2, False)["optimizer state"]
    assert state == pytest.approx(there.memory.parts["optimizer state"], rel=0.01)
    assert state < 2 * there.memory.parts["parameters"]  # AdamW's


def test_a_larger_batch_costs_what_a_capture_of_it_says(planned):
    found, there = option(planned, 8, 8, 4), captured(8, 8, 4)
    step_us = found.accumulation * (there.step_us - there.optimizer_us) + there.optimizer_us
    assert found.step_us == pytest.approx(step_us, rel=0.05)
    assert sum(found.parts_bytes.values()) - there.memory.reduced_bytes == pytest.approx(there.peak_bytes, rel=0.05)


def test_the_optimizer_finds_one_sum_of_gradients():
    found = tried(build_short, "adamw")
    size = 4 * found.traced.capture.parameters
    once, often = (found.memory(Layout(1), True, 1, accumulates) for accumulates in (False, True))
    assert once["optimizer state"] == 3 * size == 3 * once["gradients"]  # in the optimizer's step
    assert often["optimizer state"] == 2 * size and sum(often.values()) < 5.5 * size  # before it


def test_checkpointing_takes_time_and_saves_memory(planned):
    none, some, blocks = (option(planned, 8, 8, 8, True, kind) for kind in ("none", "selective", "blocks"))
    assert none.parts_us["compute"] < min(some.parts_us["compute"], blocks.parts_us["compute"])
    saved = [each.parts_bytes["saved activations"] for each in (none, some, blocks)]
    assert saved == sorted(saved, reverse=True) and saved[2] < saved[0]
    assert none.flops == blocks.flops  # what is computed again is not needed


def test_blocks_of_which_the_model_reads_an_attribute():
    planned = plan(build_blocks, ranks=(8,), tokens_per_step=8)
    assert {each.checkpointing for each in planned.options[8]} == {"none", "selective", "blocks"}


def test_buffers_are_as_large_for_any_batch():
    planned = plan(build_blocks, ranks=(8,), tokens_per_step=8 * 4)
    sizes = {each.batch: each.parts_bytes["batch and buffers"] for each in planned.options[8]}
    assert sizes == {batch: 4 * 512 * 512 + 4 * 64 * batch for batch in (1, 2, 4)}


def test_flops_are_those_of_the_products(planned):
    c, tokens = CONFIG, 8 * CONFIG.max_seq
    matrices = c.layers * (2 * c.width * c.width + 2 * c.width * c.width // 2 + 3 * c.width * c.hidden)
    products = 6 * tokens * (matrices + c.width * c.vocab)
    attention = 3.5 * c.layers * 4 * tokens * c.max_seq * c.width / 2  # causal; backward is 2.5 times forward
    assert option(planned, 8, 8, 8).flops == pytest.approx(products + attention, rel=0.01)


@pytest.mark.parametrize(
    ("asked", "got", "note"), [(1.9, 2, "2 sequences"), (1.4, 1, "1 sequence"), (0.1, 1, "1 seq")]
)
def test_a_step_has_about_as_many_tokens_as_were_asked_for(asked, got, note):
    planned = plan(build_blocks, ranks=(10,), tokens_per_step=int(asked * 10))
    assert min(each.tokens for each in planned.options[10]) == got * 10
    assert f"10 ranks: {note}" in str(planned)


def test_a_mask_holds_no_tokens():
    def build_masked(batch):
        model, (x,) = build_blocks(batch)
        model.register_forward_pre_hook(lambda module, args: args[:1])
        return model, (x, torch.ones(batch, 64, 64, dtype=torch.bool))

    assert plan(build_masked, ranks=(8,), tokens_per_step=8).tokens_per_sequence == 1


def test_what_is_tried():
    assert layouts(8, 8) == [Layout(8)]
    assert layouts(512, 8) == [Layout(512), Layout(8, 64), Layout(64, 8)]
    assert list(batches(6)) == [(1, 6), (2, 3), (4, 2)]


def test_one_rank_communicates_nothing(planned):
    alone = option(planned, 1, 1, 1)
    for part in ("waits for collectives", "copies of buffers"):
        assert alone.parts_us[part] == pytest.approx(0.0, abs=1e-6)
    assert alone.tokens == planned.tokens_per_step
    assert alone.parts_bytes["parameters"] == 4 * planned.parameters
    assert alone.parts_bytes["optimizer state"] >= 2 * 4 * planned.parameters


def test_what_fits_and_what_is_missing(planned):
    least = planned.smallest(8).peak_bytes
    tight = replace(planned, memory_bytes=least)
    assert {each.peak_bytes for each in tight.best(8)} == {least}
    none = replace(planned, memory_bytes=least - 2**30)
    assert none.best(8) == []
    assert none.advice(8).startswith("nothing fits: at least 1.0 GiB too much")
    assert "too much" in str(none)
    with pytest.raises(ValueError, match="ranks: expected one of 1, 8, 16, as planned, got 4"):
        planned.best(4)


def test_more_memory_may_help_most(planned):
    nothing = dict.fromkeys(option(planned, 8, 8, 1).parts_us, 0.0)
    small, large = (
        replace(option(planned, 8, 8, batch), parts_us=nothing | {"compute": us}, parts_bytes={"temporaries": size})
        for batch, us, size in ((1, 4.0, 10 * 2**30), (8, 1.0, 20 * 2**30))
    )
    tight = replace(planned, memory_bytes=15 * 2**30, options={8: (large, small)})
    what = f"6.0 GiB more memory, for batch 8 x {large.accumulation}, no activation checkpointing"
    assert tight.advice(8) == f"75% of the time could be saved at most by {what}"


def test_text_and_page(planned, tmp_path, monkeypatch):
    text = str(planned)
    assert "16 ranks: what would help most: " in text
    assert re.search(r"16 ranks: memory of the first: [a-z ]+ [\d.]+ \w*B, .*, and 5% for the allocator", text)
    assert "fully_shard(block, " in text and "batch" in text
    with monkeypatch.context() as machine:
        machine.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")  # of another locale
        path = planned.save(tmp_path / "plan.html")
    page = path.read_text(encoding="utf-8")
    assert page.count("<svg") == 2 and page.count("<section") == 1 + len(RANKS)
    assert "http" not in page.replace("http-equiv", "")
    with pytest.raises(ValueError, match=r"saved as .html"):
        planned.save(tmp_path / "plan.png")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": (0,)}, r"ranks: expected integers of at least 1, got \[0\]"),
        ({"ranks": ()}, "ranks: expected integers"),
        ({"ranks": 8}, "ranks: expected integers of at least 1, got 8"),
        ({"tokens_per_step": 0}, "tokens_per_step: expected"),
        ({"optimizer": "lion"}, "optimizer: expected one of adamw"),
        ({"optimizer": ["adamw"]}, r"optimizer: expected one of adamw.* got \['adamw'\] of list"),
        ({"cluster": "H1000"}, "cluster: expected H100, "),
        ({"cluster": 8}, "cluster: expected a name, a cluster file or a Cluster, got 8 of int"),
        ({"memory_bytes": "80GiB"}, "memory_bytes: expected a number or None, got '80GiB' of str"),
        ({"cluster": CLUSTERS["CPU"]}, "memory_bytes: expected"),
        (
            {"build": build_without_loss},
            r"build: expected a model whose forward returns a loss.*got a tensor \[2, ",
        ),
        ({"build": lambda batch: nn.Linear(2, 2)}, r"build: expected a tuple \(model, args\)"),
        ({"build": Blocks()}, "build: expected a function of a number of sequences, got Blocks"),
        ({"build": lambda batch: (Blocks(), torch.zeros(batch, 64))}, "build: expected a tuple of inputs .*write"),
        ({"build": lambda batch: (Blocks(), (), [1])}, "build: expected a dict of keyword inputs"),
        ({"build": build_frozen}, "build: expected a loss that requires a gradient, got one without"),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(Exception, match=message):
        plan(given.pop("build", build), **given)
    assert not dist.is_initialized()


@pytest.mark.usefixtures("fake_group")
def test_a_process_group_of_ones_own():
    with pytest.raises(RuntimeError, match="plan: starts a simulated process group"):
        plan(build)


def test_a_model_that_is_sharded_already():
    dist.init_process_group("fake", rank=0, world_size=2)
    model = fully_shard(nn.Linear(8, 8))
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="build: expected a model that is not sharded"):
        plan(lambda batch: (model, (torch.zeros(batch, 8),)))


def test_the_command_line(tmp_path, capsys):
    target, page = f"{__name__}:build_small", tmp_path / "plan.html"
    words = ["plan", target, "--ranks", "8", "--tokens-per-step", "512"]
    assert main([*words, "--save", str(page)]) == 0
    out = capsys.readouterr()
    assert "8 ranks: what would help most" in out.out and "capturing" in out.err
    assert page.exists()
    assert main([*words, "--memory", "1KiB"]) == 1
    assert "nothing fits" in capsys.readouterr().out
    assert main(["plan", f"{__name__}:build_without_loss", "--ranks", "8"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("fsdp-compiled plan: error: build: expected a model")
    dist.init_process_group("fake", rank=0, world_size=2)  # as a module may when it is imported
    try:
        assert main(words) == 2
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().err.startswith("fsdp-compiled plan: error: plan: starts a simulated process group")
