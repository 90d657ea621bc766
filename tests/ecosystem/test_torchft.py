"""Replica groups by torchft, two ranks each: processes that are killed, and what the others make of it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import data
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from train import PRESETS
from two_hosts import ip, network

pytest.importorskip("torchft")

from torchft.coordination import LighthouseServer

from fsdp_compiled import MixedPrecisionPolicy, fully_shard
from fsdp_compiled.integrations.torchft import ReplicatedOptimizer
from fsdp_compiled.testing.llama import Llama
from tests.ecosystem.training import MODES
from tests.support.ranks import on_ranks
from tests.support.training import full

EXAMPLE = Path(__file__).parents[2] / "examples/train/replica_groups.py"
RANKS, TIMEOUT_S, SEQ, BATCH, LR = 2, 10.0, 16, 2, 1e-2
KILLS = 10
# Ends the process where it stands, the first time that the function is called in the step of that number.
DIES_IN = """
import os, runpy, signal, sys
{imports}
original, calls = {owner}.{name}, []
def dies(*args, **kwargs):
    calls.append(1)
    if len(calls) == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
{owner}.{name} = dies
sys.path.insert(0, os.path.dirname(sys.argv[1])); sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Groups:
    """Processes of replica groups, and the log of what they did."""

    def __init__(self, folder, mode, timeout_s=TIMEOUT_S, pause_s=0.2):
        # Beats every 0.1 s; a second without one, and the quorum does not wait for the group.
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000
        )
        self.folder, self.log = folder, folder / "log"
        self.arguments = f"--mode {mode} --steps {10**6} --seq {SEQ} --batch {BATCH} --optimizer sgd --lr {LR}"
        self.arguments += f" --timeout {timeout_s} --pause {pause_s} --log {self.log} --data {EXAMPLE.parent}"
        self.processes = {}

    def where(self, group):
        """The start of a group's commands, and its environment."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        return [], address | {"TORCHFT_LIGHTHOUSE": self.lighthouse.address()}

    def start(self, group, program=None):
        prefix, environment = self.where(group)
        environment |= {"WORLD_SIZE": str(RANKS), "REPLICA_GROUP_ID": str(group)}
        for rank in range(RANKS):
            with (self.folder / f"group_{group}_rank_{rank}.txt").open("w") as output:
                command = [
                    *prefix,
                    sys.executable,
                    *(["-c", program] if program else []),
                    EXAMPLE,
                    *self.arguments.split(),
                ]
                self.processes[group, rank] = subprocess.Popen(
                    command,
                    env={**os.environ, **environment, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )

    def kill(self, group, ranks=range(RANKS)):
        for rank in ranks:
            self.processes[group, rank].send_signal(signal.SIGKILL)
        killed = time.time()
        for rank in ranks:
            self.processes[group, rank].wait()
        return killed

    def text(self, group, rank):
        return (self.folder / f"group_{group}_rank_{rank}.txt").read_text()

    def entries(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def wait(self, condition, timeout_s=180.0):
        """The first entry for which ``condition`` is true."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if found := next(filter(condition, self.entries()), None):
                return found
            time.sleep(0.05)
        raise AssertionError("\n".join(f"{key}: {self.text(*key)[-1500:]}" for key in self.processes))

    def join(self, group, timeout_s=120.0):
        return [self.processes[group, rank].wait(timeout_s) for rank in range(RANKS)]

    def stop(self):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def close(self):
        self.stop()
        self.lighthouse.shutdown()


class OnTwoHosts(Groups):
    """Each group in a network namespace of its own, with a cable between them; group 0's host has the lighthouse."""

    def __init__(self, folder, names):
        super().__init__(folder, "eager")
        self.lighthouse.shutdown()
        self.names, self.ports = names, iter(range(29600, 29700))
        for name in names:  # ``ip netns exec`` mounts these files over those in /etc
            configuration = Path("/etc/netns") / name
            configuration.mkdir(parents=True)
            (configuration / "hosts").write_text("127.0.0.1 localhost\n10.200.1.1 host0\n10.200.1.2 host1\n")
        prefix, _ = self.where(0)
        options = "--min_replicas 1 --join_timeout_ms 1000 --heartbeat_timeout_ms 1000 --bind 10.200.1.1:29510"
        program = Path(sys.executable).with_name("torchft_lighthouse")
        self.processes["lighthouse", 0] = subprocess.Popen([*prefix, program, *options.split()])

    def where(self, group):
        name = f'hostname host{group} && exec "$@"'
        prefix = ["ip", "netns", "exec", self.names[group], "unshare", "--uts", "sh", "-c", name, "sh"]
        address = {"MASTER_ADDR": f"10.200.1.{group + 1}", "MASTER_PORT": str(next(self.ports))}
        return prefix, address | {"GLOO_SOCKET_IFNAME": "wire", "TORCHFT_LIGHTHOUSE": "http://10.200.1.1:29510"}

    def text(self, group, rank):
        return "" if group == "lighthouse" else super().text(group, rank)

    def close(self):
        self.stop()
        for name in self.names:
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.fixture
def groups(tmp_path):
    made = []

    def make(mode, **kwargs):
        made.append(Groups(tmp_path, mode, **kwargs))
        return made[0]

    yield make
    for each in made:
        each.close()


def _next_step(groups, group, after, together=1):
    return groups.wait(
        lambda e: e["group"] == group and e["took_part"] and e["begin"] > after and e["groups"] >= together
    )


def _assert_as_without_faults(groups):
    """Each loss of each group is that of one process that leaves out the batches that were lost."""
    groups.stop()
    model = Llama(replace(PRESETS["tiny"], max_seq=SEQ))
    model.init_weights(0)
    optimizer = torch.optim.SGD(model.parameters(), LR, 0.9)
    corpus = data.load(EXAMPLE.parent, SEQ)
    logged, alone = {}, {}
    for entry in groups.entries():
        if entry["took_part"]:
            logged.setdefault(entry["step"], {})[entry["group"]] = entry["loss"]
            alone[entry["step"]] = entry["groups"] == 1
    steps = sorted(logged)
    assert steps == list(range(len(steps))) and 0 < sum(alone.values()) < len(steps)
    for step in steps:
        optimizer.zero_grad()
        counted = logged[step] if alone[step] else (0, 1)  # one may have ended after its gradients were averaged
        for group, rank in product(counted, range(RANKS)):
            generator = torch.Generator().manual_seed(step * 1000 + group * 100 + rank)
            loss = model(*corpus.sample(BATCH, SEQ, generator))
            (loss / RANKS / len(counted)).backward()
            if rank == 0 and group in logged[step]:
                assert loss.item() == pytest.approx(logged[step][group], rel=1e-3), (step, group)
        optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_groups_that_are_killed_at_drawn_moments(groups, mode):
    # A collective must wait while another group compiles.
    draw, groups = random.Random(0), groups(mode, timeout_s=TIMEOUT_S if mode == "eager" else 60.0)
    for group in (0, 1):
        groups.start(group)
    _next_step(groups, 0, 0.0, together=2)
    gaps = []
    for _ in range(KILLS):
        group = draw.randrange(2)
        time.sleep(draw.random())
        killed = groups.kill(group)
        gaps.append(_next_step(groups, 1 - group, killed)["end"] - killed)
        groups.start(group)
        _next_step(groups, group, killed, together=2)
    print("seconds without a step:", " ".join(f"{gap:.1f}" for gap in gaps))
    assert max(gaps) < 2 * TIMEOUT_S  # in both modes
    _assert_as_without_faults(groups)


# What a rank calls when it ends, and at which of its calls: in the third step or so.
MOMENTS = {
    "the mean over groups": ("from torchft import Manager", "Manager", "allreduce", 3),
    "backward's reduction": ("from fsdp_compiled.collectives import backend", "backend", "reduce_scatter", 12),
    "the vote": ("from torchft import Manager", "Manager", "should_commit", 3),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_group_that_ends_in_the_middle_of_a_step(groups, moment):
    imports, owner, name, at = MOMENTS[moment]
    groups = groups("eager")
    groups.start(0)
    _next_step(groups, 0, 0.0)
    groups.start(1, DIES_IN.format(imports=imports, owner=owner, name=name, at=at))
    assert groups.join(1) == [-signal.SIGKILL] * RANKS
    ended = time.time()
    assert _next_step(groups, 0, ended)["end"] - ended < 2 * TIMEOUT_S
    groups.start(1)
    _next_step(groups, 1, ended, together=2)
    _assert_as_without_faults(groups)


def test_one_rank_of_a_group_is_lost(groups):
    groups = groups("eager")
    for group in (0, 1):
        groups.start(group)
    _next_step(groups, 0, 0.0, together=2)
    killed = groups.kill(1, [1])
    assert _next_step(groups, 0, killed)["end"] - killed < 2 * TIMEOUT_S
    assert groups.join(1) == [1, -signal.SIGKILL]
    assert "Connection closed by peer" in groups.text(1, 0) or "RankFailureError" in groups.text(1, 0)
    groups.start(1)
    _next_step(groups, 1, killed, together=2)
    _assert_as_without_faults(groups)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_a_cable_is_pulled(tmp_path):
    with network("1gbit") as names:
        groups = OnTwoHosts(tmp_path, names)
        try:
            for group in (0, 1):
                groups.start(group)
            _next_step(groups, 0, 0.0, together=2)
            ip("-n", names[1], "link", "set", "wire", "down")
            pulled = time.time()
            gap_s = _next_step(groups, 0, pulled)["end"] - pulled
            print(f"seconds without a step: {gap_s:.1f}")
            assert gap_s < 2 * TIMEOUT_S
            groups.kill(1)
            ip("-n", names[1], "link", "set", "wire", "up")
            groups.start(1)
            _next_step(groups, 1, pulled, together=2)
            _assert_as_without_faults(groups)
        finally:
            groups.close()


@pytest.mark.parametrize("grad_dtype", [torch.float64, None])  # None: any, and so that of the reduction
@on_ranks(2)
def test_a_group_without_a_gradient_where_another_has_one_of_another_dtype(grad_dtype):
    model = nn.Linear(3, 3, bias=False)
    model.weight.grad_dtype = grad_dtype
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("groups", "shards"))["shards"]
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    manager = mock.Mock(allreduce=lambda packed, reduce_op: dist.all_reduce(packed, reduce_op, async_op=True))
    optimizer = ReplicatedOptimizer(manager, torch.optim.SGD(model.parameters()), model)
    if dist.get_rank() == 0:
        model(torch.ones(2, 3)).sum().backward()
    optimizer.average_gradients()
    torch.testing.assert_close(full(model.weight.grad), torch.ones(3, 3, dtype=torch.float64))
