"""The passes in Inductor's slots: beside the user's own, installed once, removed without a trace."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config, custom_graph_pass

from fsdp_compiled import SchedulePolicy, fully_shard, passes
from fsdp_compiled.passes.inductor import Pipeline, install, installed, uninstall

SLOTS = ("joint_custom_pre_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass")
SLOT = SLOTS[1]
TAKES_SEQUENCES = hasattr(custom_graph_pass, "get_custom_graph_passes")


class UserPass(custom_graph_pass.CustomGraphPass):
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph):
        self.runs += 1

    def uuid(self):
        return "user"


@pytest.fixture(autouse=True)
def _empty_slots():
    with config.patch(dict.fromkeys(SLOTS)):
        yield


@pytest.mark.usefixtures("fake_group")
def test_the_first_fully_shard_installs_and_the_second_adds_nothing():
    assert not any(map(installed, SLOTS))
    fully_shard(nn.Linear(4, 4))
    before = [getattr(config, slot) for slot in SLOTS]
    assert all(isinstance(value, Pipeline) for value in before)
    fully_shard(nn.Linear(4, 4))
    assert [getattr(config, slot) for slot in SLOTS] == before
    passes.uninstall()
    assert [getattr(config, slot) for slot in SLOTS] == [None] * 3


def test_a_users_single_pass_is_kept_and_given_back():
    user = UserPass()
    setattr(config, SLOT, user)
    install(SLOT, Pipeline(()))
    assert installed(SLOT)
    uninstall(SLOT)
    assert getattr(config, SLOT) is user


@pytest.mark.skipif(not TAKES_SEQUENCES, reason="this torch takes one pass per slot")
def test_a_users_list_is_kept_and_given_back():
    for value in ([UserPass()], [UserPass(), UserPass()], []):
        setattr(config, SLOT, list(value))
        install(SLOT, Pipeline(()))
        assert installed(SLOT)
        uninstall(SLOT)
        assert getattr(config, SLOT) == value


@pytest.mark.usefixtures("fake_group")
def test_a_users_pass_still_runs():
    user = UserPass()
    setattr(config, SLOT, user)
    torch._dynamo.reset()
    model = fully_shard(nn.Linear(4, 4))
    caches_off = config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False)
    with caches_off[0], caches_off[1], torch.no_grad():
        torch.compile(model, fullgraph=True)(torch.ones(2, 4))
    assert user.runs == 1


def test_a_users_single_pass_runs_after_ours():
    ran = []
    ours = (lambda graph: ran.append("ours"),)
    pipeline = Pipeline(ours, user=UserPass())
    assert "['user']" in Pipeline((), user=UserPass()).uuid()
    assert not Pipeline((), user=lambda graph: None).uuid()
    assert Pipeline(ours).uuid() is None and pipeline.uuid() is None  # what a function does is in no key
    pipeline(torch.fx.Graph())
    assert ran == []  # no operator of ours in the graph
    assert pipeline.user.runs == 1


def test_the_uuid_covers_passes_and_their_fields():
    default, units = SchedulePolicy(), SchedulePolicy(bucket="unit")
    assert Pipeline(passes.joint(default)).uuid() != Pipeline(passes.post_grad(default)).uuid()
    assert Pipeline(passes.joint(default)).uuid() == Pipeline(passes.joint(SchedulePolicy())).uuid()
    assert Pipeline(passes.post_grad(default)).uuid() != Pipeline(passes.post_grad(units)).uuid()


PASSES = """
def helper(graph): return {0}

class Common:
    def __call__(self, graph): return {0}

class Inherits(Common):
    pass

class Calls:
    def __call__(self, graph): helper(graph)
"""


@pytest.mark.parametrize("name", ["Inherits", "Calls"])
def test_the_uuid_covers_what_a_users_pass_inherits_and_what_its_file_has(tmp_path, monkeypatch, name):
    found = []
    for version in (1, 2):
        (tmp_path / f"version{version}").mkdir()
        path = tmp_path / f"version{version}" / "users_pass.py"
        path.write_text(PASSES.format(version))
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.delitem(sys.modules, "users_pass", raising=False)
        monkeypatch.setattr(f"users_pass.{name}.__repr__", lambda self: "always this")
        found.append(Pipeline((getattr(sys.modules["users_pass"], name)(),)).uuid())
    assert None not in found and found[0] != found[1]


@dataclass(frozen=True)
class WithField:
    value: object

    def __call__(self, graph):
        pass


class WithoutFields(WithField):
    __repr__ = object.__repr__


def test_the_uuid_covers_fields_of_which_only_a_part_is_shown():
    one, other = (Pipeline((WithField(torch.tensor(value)),)).uuid() for value in (2.0001, 2.00012))
    assert None not in (one, other) and one != other


@pytest.mark.parametrize("run", [WithoutFields(1), WithField(lambda: 1)])
def test_a_pass_that_shows_an_address_is_not_cached(run):
    """A later object may have it."""
    assert Pipeline((run,)).uuid() is None


def _returns_what_backward_reads(x, weight):
    hidden = x @ weight
    return hidden.sin().sum(), hidden.detach()


def _saves_what_backward_reads(x, weight):
    return _returns_what_backward_reads(x, weight)[0], None


def test_a_cached_backward_writes_over_nothing_that_forward_returned(tmp_path, monkeypatch):
    """Torch's key does not tell whether it may."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    passes.install()
    x, weight = torch.ones(8, 8), torch.full((8, 8), 0.1, requires_grad=True)
    for function in (_saves_what_backward_reads, _returns_what_backward_reads):
        torch.compiler.reset()
        loss, hidden = torch.compile(function)(x, weight)
        loss.backward()
    torch.testing.assert_close(hidden, x @ weight.detach())


def _uuid_with_a_group_of(*ranks):
    """The uuid, and the name of a process group of these of 16 ranks, the first after the default one."""
    dist.init_process_group("fake", rank=0, world_size=16)
    try:
        name = dist.new_group(list(ranks)).group_name
        return Pipeline(passes.post_grad(SchedulePolicy())).uuid(), name
    finally:
        dist.destroy_process_group()


def test_the_uuid_covers_where_the_ranks_of_a_group_are(monkeypatch):
    """Equal names, worlds and graphs; but one group lies inside a node and the other one does not."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    (inside, name), (between, same_name) = _uuid_with_a_group_of(0, 1), _uuid_with_a_group_of(0, 8)
    assert name == same_name
    assert inside != between
    assert _uuid_with_a_group_of(0, 8) == (between, name)
    assert _uuid_with_a_group_of(0, 1) == (inside, name)


def test_the_uuid_is_the_same_beside_a_further_group_of_all_ranks():
    """As one for checkpoints, which a process that resumes may make earlier than the one before it."""
    dist.init_process_group("fake", rank=0, world_size=16)
    try:
        pipeline = Pipeline(passes.post_grad(SchedulePolicy()))
        before = pipeline.uuid()
        dist.new_group()
        assert pipeline.uuid() == before
        dist.new_group([0, 1, 2, 15])
        assert pipeline.uuid() != before
    finally:
        dist.destroy_process_group()
