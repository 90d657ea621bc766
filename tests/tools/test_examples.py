"""The parts of the examples that need no ranks; CI runs the main job itself."""

from __future__ import annotations

import json
import logging
import sys
import time
from types import SimpleNamespace

import bench_compile
import bench_gpu
import bench_passes
import bench_tokens
import data
import inspect_8b
import inspect_graphs
import own_pass
import pytest
import torch
import torch.distributed as dist
import view
import waiting
from torch import nn
from torch._inductor.utils import fresh_cache
from train import warmup_and_cosine
from view import plot_losses

from fsdp_compiled import fully_shard
from fsdp_compiled.inspect import explain
from fsdp_compiled.testing.llama import PRESETS, Config, Llama
from tests.support.training import TINY
from tests.support.until import until
from tests.support.variants import thorough


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls an example's ``main`` with arguments and returns what it prints; it starts a process group itself."""

    def call(example, *args):
        monkeypatch.setattr(sys, "argv", [example.__file__, *map(str, args)])
        torch._dynamo.reset()
        example.main()
        return capsys.readouterr().out

    yield call
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_standard_library_is_the_default_text():
    corpus = data.load(None, seq=64)
    assert "files of" in corpus.description
    tokens, targets = corpus.sample(3, 64, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (3, 64)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert corpus.held_out_windows(5, 64)[0].shape == (5, 64)


def test_a_file_of_the_users_own(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 20)
    corpus = data.load(str(text), seq=32)
    assert len(corpus.train) + len(corpus.held_out) == 256 * 20
    assert len(corpus.held_out) == 256
    text.write_bytes(b"too short")
    with pytest.raises(ValueError, match="expected at least 34 bytes of training text, got"):
        data.load(str(text), seq=32)


def test_held_out_files_are_not_trained_on(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i]) * 100)
    corpus = data.load(str(tmp_path), seq=8)
    assert set(corpus.held_out.tolist()) == {0, 20}
    assert set(corpus.train.tolist()) == set(range(40)) - {0, 20}


def test_the_model_is_causal_and_starts_near_uniform():
    model = Llama(TINY)
    model.init_weights(0)
    tokens = torch.randint(TINY.vocab, (2, TINY.max_seq), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % TINY.vocab
    torch.testing.assert_close(model(changed)[:, :-1], logits[:, :-1])
    assert model(tokens, tokens).item() == pytest.approx(torch.tensor(TINY.vocab).log().item(), rel=0.02)


@pytest.mark.usefixtures("fake_group")
def test_sharding_before_initialisation_gives_the_same_weights():
    alone = Llama(TINY)
    alone.init_weights(5)
    with torch.device("meta"):
        model = Llama(TINY)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.init_weights(5)
    for (name, param), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(param.to_local(), whole.chunk(4)[0]), name
    assert torch.equal(model.cos, alone.cos)


def test_the_8b_preset_has_the_parameters_of_llama_3_8b():
    with torch.device("meta"):
        model = Llama(PRESETS["8b"])
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248


def test_learning_rate_factors():
    assert warmup_and_cosine(0, 100) == pytest.approx(0.1)
    assert warmup_and_cosine(10, 100) == pytest.approx(1.0)
    assert warmup_and_cosine(100, 100) == pytest.approx(0.1)


def test_the_loss_curve_is_a_picture(tmp_path):
    picture = plot_losses([3.0, 2.0], 2.5, tmp_path / "new" / "loss.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_groups_of_heads_divide():
    for config in (*PRESETS.values(), Config()):
        assert config.width % config.heads == 0
        assert config.heads % config.kv_heads == 0


def two_units(layers, width):
    """What compiles sooner than a decoder block does."""
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    fully_shard(model[0])
    return fully_shard(model), (torch.ones(2, width),)


def test_inspect_graphs_saves_a_capture_and_compares_schedules(run, monkeypatch, tmp_path):
    monkeypatch.setattr(inspect_graphs, "build", two_units)
    out = run(inspect_graphs, "--width", 32, "--bucket", "unit", "--out", tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(inspect_graphs.FILES)
    assert all(path.stat().st_size for path in (tmp_path / "new").iterdir())
    titles, collectives, exposed, peak = out.splitlines()[-4:]
    assert titles.split() == ["bucket", "unit", "bucket", "auto"]
    assert collectives.split() == ["collectives", "4", "2"]  # backward reads no weight of the first layer
    assert exposed.startswith("exposed") and peak.startswith("peak")


@pytest.mark.usefixtures("fake_group")
def test_the_inspected_llama_has_a_unit_for_each_block():
    model, (tokens, targets) = inspect_graphs.build()
    assert [unit.name for unit in explain(model).units] == ["Llama", "blocks.0", "blocks.1"]
    assert model(tokens, targets).shape == ()


@pytest.mark.parametrize("width", ["0", "-32", "48", "wide"])
def test_inspect_graphs_wants_whole_heads(run, width):
    with pytest.raises(SystemExit):
        run(inspect_graphs, "--width", width)


def test_own_pass_leaves_nothing_between_a_launch_and_its_wait(run):
    lines = run(own_pass, "--layers", 1).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        *("forward", "scheduled", "serialized"),
        *("backward", "scheduled", "serialized"),
        "one training step done",
    ]
    for scheduled, serialized in (lines[1:3], lines[4:6]):
        before, after = scheduled.split()[1:], serialized.split()[1:]
        assert sorted(set(before)) == sorted(set(after))
        launches = [index for index, sign in enumerate(after) if sign[0] in "GR"]
        assert len(launches) > 1
        for index in launches:
            assert after[index + 1] == after[index].replace("G", "W").replace("R", "V")


@thorough()
def test_bench_passes_times_every_pass_at_every_depth(run, tmp_path):
    run(bench_passes, "--layers", 2, 1, "--json", tmp_path / "figures.json")
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    names = [
        "Expand",
        "Unalias",
        "MakePicklable",
        "Reshard",
        "Normalize",
        "Schedule",
        "Agree",
        "Pin",
        "(checks)",
        "total",
    ]
    assert [(row["name"], row["layers"]) for row in rows] == [(name, layers) for name in names for layers in (1, 2)]
    for row in rows:
        assert row["seconds"] > 0 and row["nodes"] > 100
    for shallow, deep in zip(rows[::2], rows[1::2], strict=True):
        assert shallow["growth"] == 1.0
        assert deep["nodes"] > shallow["nodes"]


def test_bench_gpu_runs_without_one(run, tmp_path):
    where = ["--device", "cpu", "--preset", "tiny", "--layers", 1, "--seq", 16, "--batch", 1]
    run(
        bench_gpu,
        *where,
        "--steps",
        1,
        "--world",
        4,
        "--sizes",
        1,
        "--only",
        "FSDP2",
        "eager",
        "full graph",
        "--json",
        tmp_path / "a",
    )
    figures = json.loads((tmp_path / "a").read_text())
    assert [row["copy"] for row in figures["copies"]] == [
        *("pack shards", "unpack parameters", "pack gradients", "unpack gradients")
    ]
    assert all(row["ours_gb_s"] > 0 and row["torch_gb_s"] > 0 for row in figures["copies"])
    contenders = [(4, "FSDP2"), (4, "eager"), (4, "full graph")]
    assert [(row["world"], row["contender"]) for row in figures["steps"]] == contenders
    assert all(row["ms"] > 0 and row["wired_ms"] > 0 for row in figures["steps"])


@pytest.fixture
def compiles_at_once(monkeypatch, tmp_path):
    """Replaces the interpreter by a script that pretends to compile; returns where it writes its arguments."""
    log, script = tmp_path / "log", tmp_path / "python"
    code = "a = async_compile.cpp([], r'''void a''')\nb = async_compile.cpp([], r'''void b''')\n"
    lines = [
        *("#!/bin/sh", "set -eu", '[ -z "$(ls "$TMPDIR")" ]', '[ "$OMP_NUM_THREADS" = 1 ]'),
        f'echo "$@" >> {log}',
        'mkdir -p "$TORCHINDUCTOR_CACHE_DIR"',
        f'printf "%s" "{code}" > "$TORCHINDUCTOR_CACHE_DIR/code.py"',
        "wc -l < " + f"{log}; echo 0.5",
    ]
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return log


def test_bench_compile_lets_contenders_take_turns(run, compiles_at_once, tmp_path):
    contenders = ["unsharded", "full graph"]
    where = ["--cases", "1x32", "2x32", "--contenders", *contenders, "--rounds", 3]
    out = run(bench_compile, *where, "--json", tmp_path / "figures.json")
    calls = compiles_at_once.read_text().splitlines()
    assert len(calls) == 2 * 3 * 2
    for call, name in zip(calls, contenders * 6, strict=True):
        assert f"--contenders {name} --world 2" in call
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [(row["layers"], row["contender"]) for row in rows] == [(n, name) for n in (1, 2) for name in contenders]
    assert [row["seconds"] for row in rows] == [3, 4, 9, 10]  # medians of 1, 3, 5 and so on
    assert [row["of_unsharded"] for row in rows] == [1, 4 / 3, 1, 10 / 9]
    assert all(row["kernels"] == 1 and row["cpu_seconds"] == 0.5 for row in rows)
    assert out.splitlines()[-1].split() == ["2", "x", "32", "full", "graph", "10.0", "1.11", "0.5", "1"]


class TwoUnits(nn.Module):
    """What compiles sooner than a decoder block does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x.sum()


def test_bench_compile_measures_and_counts_kernels(run, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_compile, "build", lambda case, seq: (TwoUnits(), (torch.ones(2, 8),)))
    with fresh_cache(dir=str(tmp_path), delete=False):
        out = run(bench_compile, "--here", "--contenders", "unsharded")
    seconds, cpu_seconds = map(float, out.split())
    assert seconds > 0 and cpu_seconds > 0
    assert bench_compile.count_kernels(tmp_path) > 0


@pytest.mark.parametrize("case", ["0x64", "16", "16x", "deep"])
def test_bench_compile_wants_sizes(run, case):
    with pytest.raises(SystemExit):
        run(bench_compile, "--cases", case)


def test_inspect_8b_compares_schedules_without_weights_or_code(run, monkeypatch, tmp_path):
    monkeypatch.setitem(inspect_8b.PRESETS, "8b", TINY)
    out = run(inspect_8b, "--layers", 1, "--world", 8, "--seq", 16, "--out", tmp_path / "new")
    headlines = [line for line in out.splitlines() if line.startswith("bucket '")]
    assert [line.split(":")[0] for line in headlines] == ["bucket 'auto'", "bucket 'unit'"]
    assert all("by estimate" in line and "To try" in line for line in headlines)
    assert "forward: scheduled 12 all-gathers" in out and "code" not in out
    assert "Side by side" in (tmp_path / "new" / "llama_8b.html").read_text()


def test_bench_tokens_compares_policies_at_each_size(run, monkeypatch, tmp_path):
    monkeypatch.setitem(inspect_8b.PRESETS, "8b", TINY)
    kept = tmp_path / "sizes.json"
    arguments = ("--layers", 1, "--world", 16, "--cluster", "A100", "--card", 9.375, "--tokens", 8, 16)
    out = run(bench_tokens, *arguments, "--json", kept)
    assert "9.375 GB/s per network card" in out
    sizes = json.loads(kept.read_text())["sizes"]
    assert [size["tokens"] for size in sizes] == [8, 16]
    assert all(us > 0 for size in sizes for us in size["step_us"].values())
    assert {"default", "tokens=16", "bucket per unit"} <= sizes[0]["step_us"].keys()


@pytest.fixture
def clock(monkeypatch):
    """Stands still for what shows a run, until a test moves it."""
    now = SimpleNamespace(s=0.0)
    for module in (view, waiting):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def test_no_silence_where_there_is_no_terminal(monkeypatch, capsys, clock):
    monkeypatch.setattr(view, "QUIET_S", 0.05)
    with view.Progress("a run", visible=True) as progress:
        progress.begin("compiling")
        logging.getLogger("fsdp_compiled").info("tracing")
        spoken = capsys.readouterr().out
        clock.s = 9.0
        said = []
        assert until(lambda: said.append(capsys.readouterr().out) or "\n" in said[-1])
        progress.begin("training", 20)
        for _ in range(4):
            progress.advance("loss 1.0")
    assert spoken == "a run\ncompiling\n  tracing\n"
    assert said[-1] == "compiling: tracing  (9 s)\n"
    assert capsys.readouterr().out.splitlines() == ["training", *(f"training {n}/20: loss 1.0" for n in (2, 4))]
    assert progress not in logging.getLogger("fsdp_compiled").handlers


def test_imports_are_not_silent(monkeypatch, capsys, clock):
    monkeypatch.setattr(waiting, "QUIET_S", 0.02)
    with waiting.importing("torch", "__main__"):
        clock.s, said = 9.0, []
        assert until(lambda: said.append(capsys.readouterr().out) or "importing torch  (9 s)\n" in "".join(said))
    capsys.readouterr()
    with waiting.importing("torch", "train"):
        time.sleep(0.1)
    assert capsys.readouterr().out == ""


def test_other_ranks_show_nothing(capsys):
    with view.Progress("a run", visible=False) as progress:
        progress.begin("training", 1)
        progress.advance()
        progress.say("done")
    assert capsys.readouterr().out == ""
