"""examples/train/resume.py and ema.py: a run that stops and resumes on other ranks equals an uninterrupted one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import resume
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data import Corpus
from ema import EMA, local
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from train import build

from fsdp_compiled.testing.llama import PRESETS, Llama
from tests.support.ranks import on_ranks
from tests.support.training import full

SIZES = {"mode": "eager", "preset": "tiny", "seq": 16, "batch": 4, "lr": 1e-2, "seed": 0, "save_every": 2}


def train(steps, folder):
    """Losses of the steps that were taken, on what is this rank's part of a made-up text."""
    text = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    args = argparse.Namespace(**SIZES, steps=steps, out=Path(folder))
    losses = resume.run(args, torch.device("cpu"), Corpus(text, text, ""))
    if dist.get_rank() == 0:
        (Path(folder) / f"losses_{steps}.json").write_text(json.dumps(losses))


@on_ranks(2)
def on_2_ranks(steps, folder):
    train(steps, folder)


@on_ranks(1)
def on_1_rank(steps, folder):
    train(steps, folder)


def losses(folder, steps):
    return {int(step): loss for step, loss in json.loads((folder / f"losses_{steps}.json").read_text()).items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # here it is; ranks are other processes
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, capfd):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for folder in (stopped, whole):
        folder.mkdir()
    on_2_ranks(steps=3, folder=str(stopped))
    assert {path.parent.name for path in stopped.glob("step_*/.metadata")} == {"step_2", "step_3"}
    on_1_rank(steps=5, folder=str(stopped))
    on_1_rank(steps=5, folder=str(whole))
    assert [*losses(stopped, 3), *losses(stopped, 5)] == [1, 2, 3, 4, 5]
    joined = {**losses(stopped, 3), **losses(stopped, 5)}
    assert joined == pytest.approx(losses(whole, 5), rel=1e-5)
    files = [load_file(folder / "model.safetensors") for folder in (stopped, whole)]
    assert files[0].keys() == dict(Llama(PRESETS["tiny"]).named_parameters()).keys()
    saved = {"ema": {name: torch.empty_like(tensor) for name, tensor in files[0].items()}}
    dcp.load(saved, checkpoint_id=stopped / "step_5", no_dist=True)
    for name, tensor in files[0].items():
        assert torch.equal(tensor, saved["ema"][name]), name
        # AdamW makes much of rounding where gradients are tiny; a step changes parameters by the rate of 0.01.
        assert (tensor - files[1][name]).abs().mean() < 1e-4, name


@on_ranks(2)
@torch.no_grad()
def test_the_average_takes_the_parameters_place_and_gives_it_back():
    model = build(argparse.Namespace(**SIZES), torch.device("cpu")).model
    before = {name: full(param.detach()).clone() for name, param in model.named_parameters()}
    ema = EMA(model, decay=0.75)
    torch._foreach_add_(local(model.parameters()), 4.0)
    ema.update()
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    outside = model(tokens)
    with ema.applied():
        for name, param in model.named_parameters():
            torch.testing.assert_close(full(param.detach()), before[name] + 1)
        assert not torch.equal(model(tokens), outside)
    assert torch.equal(model(tokens), outside)
    assert all(isinstance(average, DTensor) for average in ema.average.values())
