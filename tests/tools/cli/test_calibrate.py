"""What ``calibrate`` writes: not how fast this machine is, but that each figure stands where it belongs."""

from __future__ import annotations

import itertools
import json
import os
import time
from contextlib import contextmanager
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from fsdp_compiled import SchedulePolicy
from fsdp_compiled.cli import calibrate as program
from fsdp_compiled.cli import main
from fsdp_compiled.passes import CLUSTERS, cost
from tests.faults.steps import trainer
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.variants import thorough

FEW = {"_SIZES": (2**16, 2**18), "_COPIES": (2**12, 2**16), "_WIDTHS": (16, 32, 64), "_PIECES": 2}
FEW |= {"_LENGTHS": (4, 8), "_COLD": 1, "_LAYERS": 2, "_TURNS": 1, "_TURN_S": 0.01, "_RUN": 2**18, "_HIDDEN": 2**18}


@contextmanager
def few():
    """Let a calibration measure a little of everything."""
    with patch.multiple(program, **FEW):
        yield


def _calibrated(path, ranks_per_node):
    local = dist.get_rank() % ranks_per_node
    with few(), patch.dict(os.environ, LOCAL_RANK=str(local)):
        found = program.calibrate(path)
    same_on_ranks(found)  # also the file's, which the first rank has written
    assert cost.named(str(path)) == found
    return found


def _groups(link):
    return [(group.world, group.in_node) for group in link.measured]


@thorough()
@on_ranks(2)
def test_a_node(tmp_path):
    found = _calibrated(tmp_path / "cluster.json", 2)
    assert found.name == "CPU, calibrated"
    assert found.ranks_per_node == 2
    assert _groups(found.intra) == [(2, 2)]
    assert found.inter == cost.detect(torch.device("cpu")).inter  # not measured
    (group,) = found.intra.measured
    for curve in (group.all_gather, group.reduce_scatter, group.all_reduce):
        assert [size for size, _ in curve] == list(FEW["_SIZES"])
    for curve in (found.products_32bit, found.products_16bit):
        assert [flops for flops, _ in curve] == [2 * width**3 for width in FEW["_WIDTHS"]]
    for forward in (found.attention_32bit, found.attention_16bit):
        assert [flops for flops, _ in forward] == [2 * 8 * length**2 * 64 for length in FEW["_LENGTHS"]]
    for backward in (found.attention_32bit_backward, found.attention_16bit_backward):
        assert [flops for flops, _ in backward] == [2.5 * flops for flops, _ in found.attention_32bit]
    assert found.new_mib_us > 0
    assert [size for size, _ in found.copies] == [2 * size for size in FEW["_COPIES"]]
    machine = json.loads((tmp_path / "cluster.json").read_text())["machine"]
    assert (machine["ranks"], machine["backend"], machine["torch"]) == (2, "gloo", torch.__version__)


@on_ranks(4)
def test_two_nodes(tmp_path):
    found = _calibrated(tmp_path / "cluster.json", 2)
    assert _groups(found.intra) == [(2, 2)]
    assert _groups(found.inter) == [(4, 2), (2, 1)]
    assert found.link("unknown", 4).measured == (found.inter.measured[0],)
    assert 0 <= found.inter.compute_blocked_fraction <= 1
    for mode in ("eager", "full"):
        training = trainer(mode, schedule=SchedulePolicy(cluster=str(tmp_path / "cluster.json")))
        assert training.step() == trainer("eager").step()


@thorough()
@on_ranks(2)
def test_nodes_of_one_rank(tmp_path):
    found = _calibrated(tmp_path / "cluster.json", 1)
    assert (found.ranks_per_node, found.intra) == (1, CLUSTERS["CPU"].intra)
    assert _groups(found.inter) == [(2, 1)]


def test_small_collectives_follow_each_other_with_two_started(monkeypatch):
    """Alone, after a pause, they pass a network with a burst faster than its rate."""
    monkeypatch.delenv("RANK", raising=False)
    seconds, events = itertools.count(), []

    def start(self, size):
        return lambda: events.append(("started", size)) or Mock(wait=lambda: events.append(("waited", size)))

    few_sizes = patch.multiple(program, _SIZES=(2**21, 2**24), _TURNS=1, _TURN_S=0.0)
    kinds = patch.multiple(program._Groups, **dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), start))
    with program._process_group() as device, few_sizes, kinds:
        groups = program._Groups(program._Bench(device), [range(1)], in_node=1)
        monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))  # so that a run takes one second
        found = groups.measured()
    assert found.all_gather == found.reduce_scatter == found.all_reduce == ((2.0**21, 2.0**23), (2.0**24, 2.0**24))
    started, waited = ("started", 2**21), ("waited", 2**21)
    assert events[:8] == [started, started, waited, started, waited, started, waited, waited]
    assert events[-2:] == [("started", 2**24), ("waited", 2**24)]


def test_nodes_with_different_numbers_of_ranks():
    assert program.ranks_per_node([0, 0, 2, 2, 4, 4]) == (2, 3)
    with pytest.raises(RuntimeError, match=r"calibrate: expected as many ranks on each node, got \[1, 2\]"):
        program.ranks_per_node([0, 1, 1])


def test_one_process(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with few():
        assert main(["calibrate", "--out", str(tmp_path / "cluster.json")]) == 0
    found = cost.named(str(tmp_path / "cluster.json"))
    assert found.products_32bit
    assert found.intra == cost.detect(torch.device("cpu")).intra
    assert "inside a node, not measured" in capsys.readouterr().err
    assert not dist.is_initialized()


def test_a_folder_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "--out", "new/cluster.json"])
    assert ended.value.code == 2
    assert "--out: expected a file in a folder that exists, got 'new/cluster.json'" in capsys.readouterr().err


def test_a_mistake_takes_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("FSDP_COMPILED_CLUSTER", "V100")
    command = ["calibrate", "--out", str(tmp_path / "cluster.json")]
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("fsdp-compiled calibrate: error: FSDP_COMPILED_CLUSTER: cluster: ex")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(SystemExit):
        main(command)
    assert "--out: expected a file that can be written, got" in capsys.readouterr().err
