"""The command line: what it prints, what it refuses in one line, and that it works as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_compiled import SchedulePolicy, cli
from fsdp_compiled.cli import commands, doctor
from fsdp_compiled.cli.commands import byte_size
from fsdp_compiled.inspect.report import WRITERS, Capture
from fsdp_compiled.passes.cost import CLUSTERS

ROOT = Path(__file__).parents[3]

PROGRAM = """
import torch
from torch import nn
from fsdp_compiled import fully_shard

def build():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    fully_shard(model[0])
    return fully_shard(model), (torch.ones(2, 8),)

def by_keyword():
    return build()[0], (), {"input": torch.ones(2, 8)}

def compiled():
    return torch.compile(build()[0]), build()[1]

def broken():
    raise ZeroDivisionError("in the user's own code")

def of_config(config): ...
def nothing(): ...
def four(): return 1, 2, 3, 4
def no_module(): return "model", ()
def bare_input(): return build()[0], torch.ones(2, 8)
def bad_keywords(): return *build(), 3
def named_loss(): return *build(), {"loss": 1}
def named_passes(): return *build(), {"passes": 1}
def no_units(): return nn.Linear(8, 8), (torch.ones(2, 8),)

number = 3
"""


class Captured:
    """Stands for a capture; tells what ``capture`` was called with."""

    def __init__(self, model, *args, **kwargs):
        self.model, self.args, self.kwargs = model, args, kwargs
        self.group = dist.get_backend(), dist.get_rank(), dist.get_world_size()

    def __str__(self):
        return "the table"

    def compare(self, path):
        path.read_text()
        return "the comparison"

    def save(self, path, measured=None):
        if path.stem == "full":
            raise OSError(28, "No space left on device")
        path.write_text(f"saved with {measured}")
        return path


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A user's program in the working directory."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "program.py"
    sys.modules.pop("program", None)
    assert not dist.is_initialized()


@pytest.fixture
def captures(monkeypatch):
    """Calls of ``capture``, which returns at once."""
    made = []

    def capture(*args, **kwargs):
        made.append(Captured(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(commands, "capture", capture)
    return made


def _inspect(*words):
    """The exit status, also of argparse's errors."""
    try:
        return cli.main(["inspect", *words])
    except SystemExit as exit:
        return exit.code


# ---- inspect ----


def test_defaults(program, captures, capsys):
    assert _inspect(f"{program}:build") == 0
    (made,) = captures
    assert made.group == ("fake", 0, 8)
    assert made.kwargs == {"loss": None, "schedule": SchedulePolicy(), "device": None}
    assert made.args[0].shape == (2, 8)
    out, err = capsys.readouterr()
    assert out == "the table\n"
    assert err == "process group: fake, rank 0 of 8; nothing is communicated, so results are garbage\n"


def test_every_option(program, captures, capsys):
    words = "--world 4 --rank 3 --bucket 64MiB --prefetch 2 --in-flight-bytes 1GiB --keep-unsharded-bytes 5"
    words += " --tokens 512 --explain"
    status = _inspect(
        f"{program}:build", *words.split(), "--cluster", "H100", "--save", "a.html", "b.json", "--save", "c.png"
    )
    assert status == 0
    (made,) = captures
    assert made.group == ("fake", 3, 4)
    assert made.kwargs["schedule"] == SchedulePolicy(2**26, 2, 2**30, 5, CLUSTERS["H100"], 512)
    out, err = capsys.readouterr()
    assert out.startswith("Sequential: 2 units")
    assert out.endswith("\nthe table\n")
    assert err.endswith("saved a.html\nsaved b.json\nsaved c.png\n")


def test_bytes_that_may_be_auto(program, captures):
    words = "--bucket auto --prefetch auto --in-flight-bytes auto --keep-unsharded-bytes auto"
    assert _inspect(f"{program}:build", *words.split()) == 0
    assert captures[0].kwargs["schedule"] == SchedulePolicy()


def test_estimates_against_a_run(program, captures, capsys):
    Path("trace.json").write_text("{}")
    assert _inspect("program.py:build", "--trace", "trace.json", "--save", "a.html", "b.json") == 0
    assert capsys.readouterr().out.endswith("the table\n\ntrace.json: the comparison\n")
    assert [Path(file).read_text() for file in ("a.html", "b.json")] == [
        "saved with the comparison",
        "saved with None",
    ]


@pytest.mark.parametrize("target", ["program:build", "program.py:compiled", "./program.py:build"])
def test_ways_to_name_the_program(program, captures, target):
    assert _inspect(target) == 0
    assert type(captures[0].model).__name__ == "FSDPSequential"


def test_inputs_by_keyword(program, captures):
    assert _inspect(f"{program}:by_keyword") == 0
    assert captures[0].args == ()
    assert captures[0].kwargs["input"].shape == (2, 8)


def test_a_process_group_of_the_users_own(program, captures, capsys, fake_group):
    try:
        assert _inspect(f"{program}:build", "--world", "2") == 0
        assert captures[0].group == ("fake", 0, 4)
        assert "the one that MODULE started, rank 0 of 4; --world and --rank are ignored" in capsys.readouterr().err
        assert dist.is_initialized()
    finally:
        sys.modules.pop("program", None)


MISTAKES = {
    "program.py": "expected MODULE:BUILD, got 'program.py'; write for example train.py:build",
    "program.py:": "expected MODULE:BUILD, got 'program.py:'",
    "other.py:build": "other.py: found no such file in ",
    "other:build": "other: found no module 'other' in ",
    "program.other:build": "program.other: found no module 'program.other' in ",
    "a-b:build": "expected a dotted module or a path to a .py file before the colon, got 'a-b'",
    "program.py:bild": "program.py: expected a function 'bild', found none; it defines build, by_keyword, compiled",
    "program.py:number": "program.py: expected a function 'number', found none",
    "program.py:of_config": "expected a function that can be called without arguments, got of_config(config)",
    "program.py:nothing": "program.py:nothing: BUILD: expected a tuple (model, args) or (model, args, kwargs) to be",
    "program.py:four": "expected a tuple (model, args) or (model, args, kwargs) to be returned, got (1, 2, 3, 4)",
    "program.py:no_module": "expected an nn.Module as the first result, got 'model' of str",
    "program.py:bare_input": "expected a tuple of inputs as the second result, got Tensor; write (x,)",
    "program.py:bad_keywords": "expected a dict of keyword inputs as the third result, got 3 of int",
    "program.py:named_loss": "the input 'loss' cannot be given by keyword here",
    "program.py:named_passes": "the input 'passes' cannot be given by keyword here",
    "program.py:no_units": "Linear: expected a sharded model, got one without any unit; call fully_shard on",
    "program.py:build --bucket big": "--bucket: expected 'auto' or 'unit' or 'none' or a number of bytes such as",
    "program.py:build --bucket 0": "SchedulePolicy.bucket: expected 'auto' or 'unit' or 'none' or an integer of",
    "program.py:build --prefetch 1.5": "--prefetch: expected 'auto' or a number, got '1.5'",
    "program.py:build --keep-unsharded-bytes big": "expected 'auto' or a number of bytes such as 65536, 64MiB or",
    "program.py:build --cluster V100": "--cluster: cluster: expected H100, H100-500W, H200, A100, B200, CPU or",
    "program.py:build --world 4 --rank 4": "--rank: expected 0 to 3 for --world 4, got 4",
    "program.py:build --world 0": "--world: expected at least 1, got 0",
    "program.py:build --save a.txt": "--save: expected a file that ends in .trace.json or .json or .html or .png",
    "program.py:build --save new/table.json": "--save: expected a file in a folder that exists, got 'new/table.json'",
    "program.py:build --save folder.json": "--save: expected a file in a folder that exists, got 'folder.json'",
    "program.py:build --trace none.json": "--trace: expected a file that can be read, got 'none.json'",
    "program.py:build --trace folder.json": "--trace: expected a file that can be read, got 'folder.json'",
    "program.py:build --save full.json": "No space left on device",
}


@pytest.mark.usefixtures("program", "captures")
@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_takes_one_line(capsys, words):
    Path("folder.json").mkdir()
    assert _inspect(*words.split()) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("fsdp-compiled inspect: error: ")
    assert MISTAKES[words] in line


@pytest.mark.parametrize(
    "mistake",
    [
        "SchedulePolicy.in_flight_bytes: expected at least 9 for this graph, got 1",
        "FSDP_COMPILED_CLUSTER: cluster: expected H100, got 'V100'",
    ],
)
def test_what_no_graph_can_keep(program, monkeypatch, capsys, mistake):
    def capture(*args, **kwargs):
        try:
            raise ValueError(mistake)
        except ValueError as error:
            raise RuntimeError("backend failed") from error

    monkeypatch.setattr(commands, "capture", capture)
    assert _inspect(f"{program}:build", "--in-flight-bytes", "1") == 2
    assert f"error: {mistake}" in capsys.readouterr().err


def test_errors_of_the_users_own_pass_through(program, monkeypatch):
    with pytest.raises(ZeroDivisionError, match="in the user's own code"):
        _inspect(f"{program}:broken")
    Path("needs.py").write_text("import no_such_package\n")
    for target in ("needs.py:build", "needs:build"):
        sys.modules.pop("needs", None)
        with pytest.raises(ModuleNotFoundError, match="no_such_package"):
            _inspect(target)

    def capture(*args, **kwargs):
        raise ValueError("from forward")

    monkeypatch.setattr(commands, "capture", capture)
    with pytest.raises(ValueError, match="from forward"):
        _inspect(f"{program}:build")


def test_byte_sizes():
    sizes = {
        "65536": 65536,
        "64MiB": 2**26,
        "1GiB": 2**30,
        "1.5 KiB": 1536,
        "10mb": 10**7,
        "2kB": 2000,
        "7B": 7,
        "0": 0,
    }
    assert {text: byte_size(text) for text in sizes} == sizes
    for text in ("", "MiB", "-1", "1e6", "12 apples", "1.5", "1.0001KiB", "0x10", "1_000", "64M"):
        with pytest.raises(ValueError, match="expected"):
            byte_size(text)


def test_what_a_capture_is_saved_as_is_documented():
    assert all(f"``{suffix}``" in Capture.save.__doc__ for suffix in WRITERS)


# ---- doctor ----


def test_doctor_prints_findings_and_counts_problems(monkeypatch, capsys):
    long = " ".join(["word"] * 40)
    findings = [doctor.Finding("ok", "torch", "2.13.0"), doctor.Finding("note", "GPU", long)]
    monkeypatch.setattr(doctor, "diagnose", lambda: findings)
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok       torch  2.13.0"
    assert lines[1].startswith("note     GPU    word word")
    assert lines[2].startswith("                word")
    assert lines[-1] == "no problems"
    findings.append(doctor.Finding("problem", "triton", "missing"))
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("problem  triton  missing\n\n1 problem\n")


def test_doctor_where_the_environment_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8(x2)")
    assert doctor.diagnose()

    def diagnose():
        raise ValueError("FSDP_COMPILED_CLUSTER: cluster: expected H100")

    monkeypatch.setattr(doctor, "diagnose", diagnose)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "fsdp-compiled doctor: error: FSDP_COMPILED_CLUSTER: cluster: expected H100\n"


# ---- as a program ----


def _program(*words, cwd=ROOT):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fsdp_compiled", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=300)


@pytest.mark.usefixtures("program")
def test_inspect_as_a_program(tmp_path):
    ran = _program(
        "inspect", "program.py:build", "--world", "4", "--bucket", "unit", "--save", "c.json", cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert "\nforward: collectives 1, " in ran.stdout
    assert "\nbackward: collectives 1, " in ran.stdout
    saved = json.loads((tmp_path / "c.json").read_text())
    assert (saved["world"], [graph["kind"] for graph in saved["graphs"]]) == (4, ["forward", "backward"])


@pytest.mark.parametrize("command", [(), ("inspect",), ("doctor",)])
def test_help_fits_a_terminal(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {' '.join(['fsdp-compiled', *command])} ")
    assert max(map(len, text.splitlines())) <= 118


def test_no_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert capsys.readouterr().err.startswith("fsdp-compiled: error: the following arguments are required: COMMAND")


def test_the_installed_script_is_the_same():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"fsdp-compiled": "fsdp_compiled.cli:main"}
