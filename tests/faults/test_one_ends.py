"""A rank's process ends, by an error or killed: the others end too, soon and with a reason."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.faults import raising
from tests.faults.processes import die, ends, note_fault
from tests.faults.raising import RaisingModel
from tests.faults.steps import Model, trainer

_WITHIN_S = 5.0
MODES = ("eager", "full")
FILES = dcp.filesystem.FileSystemWriter


def _named_or_of_the_backend(end, died):
    named = f"RankFailureError: the process of rank {died} has ended; " in end.error
    return named or "onnection closed by peer" in end.error or "onnection reset" in end.error


# ---- by an error ----


def raise_in(rank: int, folder: Path, place: str, mode: str) -> None:
    training = trainer(mode, RaisingModel())
    training.step(0)
    if rank == 1:
        raising.do[place] = lambda: (note_fault(folder), raising.raising(ValueError("row 7 is empty"))())
    training.step(1)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_that_ends_a_rank(tmp_path, place, mode):
    survivor, failed = ends(raise_in, tmp_path, place=place, mode=mode)
    assert failed.code == 1 and failed.error == "ValueError: row 7 is empty"
    assert survivor.error.startswith("RankFailureError: rank 1 raised ValueError: row 7 is empty; this rank waited")
    assert survivor.seconds < _WITHIN_S


# ---- killed ----


def be_killed(rank: int, folder: Path, place: str, mode: str, steps: int, dying: int = 1) -> None:
    training = trainer(mode, RaisingModel())
    for number in range(steps):
        training.step(number)

    def fall() -> None:
        note_fault(folder)
        die()

    if rank != dying:
        training.step(steps)
    elif place == "backward":
        raising.do["backward"] = fall
        training.step(steps)
    else:
        training.call(training.batch(steps))
        fall()


@pytest.mark.parametrize("place", ["between", "backward"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [0, 1], ids=["first step", "later"])
def test_a_killed_rank(tmp_path, place, mode, steps):
    survivor, killed = ends(be_killed, tmp_path, place=place, mode=mode, steps=steps)
    assert killed.code == -signal.SIGKILL
    assert survivor.code == 1 and _named_or_of_the_backend(survivor, 1), survivor
    assert survivor.seconds < _WITHIN_S


@pytest.mark.parametrize("steps", [0, 1], ids=["first step", "later"])
def test_the_rank_that_hosts_the_store_is_killed(tmp_path, steps):
    killed, survivor = ends(be_killed, tmp_path, tcp=True, place="between", mode="eager", steps=steps, dying=0)
    assert killed.code == -signal.SIGKILL
    assert survivor.code == 1 and survivor.error
    assert survivor.seconds < _WITHIN_S


def save_and_be_killed(rank: int, folder: Path) -> None:
    training = trainer("eager")
    training.step(0)
    dcp.save(training.model.state_dict(), checkpoint_id=folder / "first")
    if rank == 0:
        torch.save(0, folder / "saved")
    training.step(1)
    if rank == 1:

        def write_data(*_: object) -> None:
            note_fault(folder)
            die()

        FILES.write_data = write_data
    dcp.save(training.model.state_dict(), checkpoint_id=folder / "second")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # no process group is needed to load
def test_a_rank_that_is_killed_as_it_saves(tmp_path):
    survivor, killed = ends(save_and_be_killed, tmp_path)
    assert killed.code == -signal.SIGKILL
    assert survivor.code == 1 and survivor.error
    assert survivor.seconds < _WITHIN_S
    loaded = Model().state_dict()
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "first", no_dist=True)
    assert all(tensor.isfinite().all() and not tensor.equal(before[name]) for name, tensor in loaded.items())
    assert not (tmp_path / "second" / ".metadata").exists()  # it cannot be taken for a complete one
