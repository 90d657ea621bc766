"""The public test helpers on ranks, and a test of ours written with them."""

from __future__ import annotations

import os
import time
import unittest
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_compiled import FSDPModule, fully_shard
from fsdp_compiled.collectives import backend
from fsdp_compiled.hooks.backward import PostBackward
from fsdp_compiled.hooks.state import FSDPState
from fsdp_compiled.testing import (
    MLP,
    AlwaysWrapNestedWrappedModule,
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    MixtureOfExperts,
    MLPStack,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    NonUniformReqGradNWM,
    RankProcesses,
    SkipModel,
    TransformerWithSharedParams,
    check_sharded_parity,
    compiled_fsdp_test,
    get_full_params,
    patch_all_gather,
    patch_all_reduce,
    patch_foreach_all_gather,
    patch_foreach_reduce,
    patch_post_backward,
    patch_reduce_scatter,
    patch_register_post_backward_hook_backward,
    patch_reshard,
    patch_unshard,
    reduce_scatter_with_assert,
    seeded,
)
from fsdp_compiled.testing.processes import Setting
from tests.support.ranks import pool

CPU = torch.device("cpu")
PATCHES = {
    "all_gather": patch_all_gather,
    "reduce_scatter": patch_reduce_scatter,
    "all_reduce": patch_all_reduce,
    "foreach_all_gather": patch_foreach_all_gather,
    "foreach_reduce": patch_foreach_reduce,
    "unshard": patch_unshard,
    "reshard": patch_reshard,
    "post_backward": patch_post_backward,
    "backward": patch_register_post_backward_hook_backward,
}


class RankTest(FSDPTest):
    """On the session's processes."""

    def processes(self):
        return pool()


class Counts(dict):
    """How often each patched function is called inside ``with counts:``."""

    def __enter__(self):
        self._open = []
        for name, patch in PATCHES.items():
            self[name], original = 0, []
            context = patch(self._counted(name, original))
            original.append(context.__enter__())
            self._open.append(context)
        return self

    def __exit__(self, *error):
        for context in reversed(self._open):
            context.__exit__(*error)

    def _counted(self, name, original):
        def call(*args, **kwargs):
            self[name] += 1
            return original[0](*args, **kwargs)

        return call


def _mlps():
    with seeded(0):
        return nn.Sequential(MLP(5), MLP(5, bias=False))


def _my_loss(model, rank):
    return model(torch.arange(10.0).view(2, 5)[rank]).mean()


class TestPatches(RankTest):
    def test_each_intercepts_what_eager_hooks_do(self):
        before = (FSDPState.unshard, vars(PostBackward)["backward"], backend.all_reduce)
        model = _mlps()
        fully_shard(model[1])
        fully_shard(model)
        x = torch.arange(10.0).view(2, 5)[self.rank].requires_grad_()
        with Counts() as counts:
            model(x).mean().backward()
        assert counts.pop("unshard") == 4
        assert counts.pop("reshard") >= 3
        # the root keeps its parameters from forward to backward
        assert counts == {
            "all_gather": 3,
            "foreach_all_gather": 3,
            "reduce_scatter": 2,
            "foreach_reduce": 2,
            "all_reduce": 0,
            "post_backward": 2,
            "backward": 2,
        }
        assert before == (FSDPState.unshard, vars(PostBackward)["backward"], backend.all_reduce)

    def test_all_reduce_of_replicas_and_the_output_of_reduce_scatter(self):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        alone, model = _mlps(), fully_shard(_mlps(), mesh=mesh)
        with Counts() as counts:
            _my_loss(model, self.rank).backward()
        assert (counts["all_reduce"], counts["reduce_scatter"], counts["all_gather"]) == (1, 0, 0)
        (sum(_my_loss(alone, rank) for rank in range(2)) / 2).backward()
        check_sharded_parity(self, alone, model)

        outputs = []
        model = fully_shard(_mlps())

        def reduce_scatter(*args):
            return reduce_scatter_with_assert(self, original, outputs.append, *args)

        with patch_reduce_scatter(reduce_scatter) as original:
            _my_loss(model, self.rank).backward()
        local = torch.cat([param.grad.to_local().flatten() for param in model.parameters()])
        torch.testing.assert_close(outputs[0].sum(), local.sum())

    def test_a_patched_all_gather_that_refuses_fails_the_forward(self):
        def refuse(*args, **kwargs):
            raise ValueError("not today")

        with patch_all_gather(refuse), pytest.raises(ValueError, match="not today"):
            fully_shard(_mlps())(torch.rand(5))


class TestModels(RankTest):
    def test_each_trains_as_one_process_that_averages(self):
        models = [
            NestedWrappedModule,
            AlwaysWrapNestedWrappedModule,
            NonUniformReqGradNWM,
            NestedWrappedModuleWithDelay,
            TransformerWithSharedParams,
            MixtureOfExperts,
        ]
        self.run_subtests({"cls": models}, self._trains)

    def _trains(self, cls):
        group = self.process_group
        alone = cls.init(group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_NEVER, deterministic=True)
        slow = {"delay_before_reduction_ms": 5} if cls is NestedWrappedModuleWithDelay else {}
        slow |= {"delay_before_free_ms": 5} if cls is MixtureOfExperts else {}
        model = cls.init(
            group, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_AFTER, {"mesh": None}, deterministic=True, **slow
        )
        if not isinstance(model, FSDPModule):
            fully_shard(model)
        for each in (alone, model):
            input = each.get_input(CPU)
            each.run_backward(each.get_loss(input, each(*input)))
        if cls is not MixtureOfExperts:  # which averages by itself
            for param in alone.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        check_sharded_parity(self, alone, model, rtol=1e-5, atol=1e-6)

    def test_skip_models_and_stacks(self):
        with seeded(0):
            alone = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(3)))
        with seeded(0):
            model = fully_shard(SkipModel(double_nest=True))
        x = torch.rand(2, 10, generator=torch.Generator().manual_seed(0))
        self.assertEqual(model(x), alone(x))
        self.assertEqual(get_full_params(model), [param.detach() for param in alone.parameters()])

        with seeded(0):
            alone = MLPStack(6, with_seq_parallel=True)
        with seeded(0):
            model = MLPStack(6, with_seq_parallel=True)
        assert model.parallelize(None, init_device_mesh("cpu", (2,)), True, reshard_after_forward=True) is model
        x = torch.rand(2, 6, generator=torch.Generator().manual_seed(0))
        (alone(x[:1]).square().mean() + alone(x[1:]).square().mean()).div(2).backward()
        with Counts() as counts:
            model(x[self.rank : self.rank + 1]).square().mean().backward()
        assert counts["all_gather"] == 8  # each MLP and the norm, in forward and backward
        check_sharded_parity(self, alone, model)


class TestModes(RankTest):
    @compiled_fsdp_test()
    def test_accumulation_in_every_mode(self):
        """Two micro-steps without and with sync, then a plain step, of which patches see nothing in a graph."""
        alone, model = _mlps(), _mlps()
        for mlp in model:
            fully_shard(mlp)
        fully_shard(model)
        for sync in (False, True):
            for rank in range(2):
                (_my_loss(alone, rank) / 2).backward()
            model.set_requires_gradient_sync(sync)
            _my_loss(model, self.rank).backward()
        check_sharded_parity(self, alone, model)
        with Counts() as counts:
            _my_loss(model, self.rank).backward()
        in_graph = model._compiled_call_impl is not None
        seen = {name for name in PATCHES if counts[name]}
        in_graphs = {"reshard", "all_gather", "reduce_scatter"}
        assert seen == (in_graphs if in_graph else PATCHES.keys() - {"all_reduce"}), seen


class Outcomes(FSDPTest):
    """Run by hand below, on processes of its own, since some of them end."""

    __test__ = False

    def perThreadSetUp(self):
        self.prepared = self.rank
        if self._testMethodName == "test_the_setup_fails":
            self.addCleanup(self.fail, "of the cleanup")
            raise ValueError("of the setup")

    def test_one_rank_fails(self):
        assert self.prepared == self.rank
        if self.rank == 1:
            raise ValueError("rank 1 says so")

    def test_one_rank_dies(self):
        if self.rank == 1:
            os._exit(3)
        dist.barrier()

    def test_one_rank_hangs(self):
        if self.rank == 1:
            time.sleep(100)

    def test_skipped_on_the_ranks(self):
        self.skipTest("not here")

    def test_a_cleanup_fails(self):
        self.addCleanup(self.fail, "of the cleanup")

    def test_the_setup_fails(self):
        raise AssertionError("never comes here")


def _result(name, timeout_s=300.0):
    result = unittest.TestResult()
    case = Outcomes(name)
    case.test_timeout_s = timeout_s
    case.run(result)
    return result


@pytest.fixture
def ended_processes():
    yield
    Outcomes.doClassCleanups()
    assert Outcomes._processes is None


def test_what_unittest_reports_of_processes(ended_processes):
    ((_, text),) = _result("test_one_rank_fails").failures
    assert "--- rank 1 ---" in text
    assert "ValueError: rank 1 says so" in text
    assert "--- rank 0 ---" not in text
    ((_, text),) = _result("test_a_cleanup_fails").failures
    assert "AssertionError: of the cleanup" in text
    ((_, text),) = _result("test_the_setup_fails").failures
    assert "ValueError: of the setup" in text
    assert "AssertionError: of the cleanup" in text
    ((_, text),) = _result("test_one_rank_dies").failures
    assert "--- rank 1 ---\nits process died with exit code 3" in text
    ((_, reason),) = _result("test_skipped_on_the_ranks").skipped  # on new processes, which import the test
    assert reason == "not here"
    ((_, text),) = _result("test_one_rank_hangs", timeout_s=5.0).failures
    assert "--- rank 1 ---\nhung" in text
    assert "--- rank 0 ---" not in text


def test_a_job_after_one_that_was_interrupted_or_after_a_death(ended_processes):
    processes = Outcomes("test_one_rank_fails").processes
    interrupted = mock.patch.object(RankProcesses, "_collect", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), interrupted:
        processes().run(2, _leave_the_store)
    with pytest.raises(AssertionError, match="IndexError"):  # and not the outcome of the job before
        processes().run(2, _use_the_store_left_behind)
    running = processes()
    running._processes[1].kill()
    running._processes[1].join()
    with pytest.raises(AssertionError, match="--- rank 1 ---\nits process died of SIGKILL"):
        running.run(2, _leave_the_store, Setting(group_timeout=timedelta(seconds=5)))  # in which rank 0 waits


def test_more_ranks_than_processes():
    with pytest.raises(ValueError, match="world: expected 1 to 4 ranks, got 5; start more processes"):
        pool().run(5, print)


_left_behind = []  # in a rank's process


def _leave_the_store(rank):
    _left_behind.append(dist.group.WORLD.get_group_store())


def _use_the_store_left_behind(rank):
    assert _left_behind.pop().add(f"from {rank}", 1) == 1


def test_what_a_job_leaves_running_can_use_its_store():
    """Else a thread that compares what ranks ran would wait there, and compare nothing of the next jobs."""
    setting = Setting(group_timeout=timedelta(seconds=5))
    pool().run(2, _leave_the_store, setting)
    pool().run(2, _use_the_store_left_behind, setting)


def _computes_on_a_mesh(rank, groups_before):
    for _ in range(groups_before):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("of", "jobs"))["jobs"]
    doubled = distribute_tensor(torch.ones(2), mesh, [Shard(0)]) * 2
    assert doubled.device_mesh.get_group().size() == 2


def test_dtensors_of_a_job_are_on_its_own_mesh():
    """DTensor remembers meshes, also those of the job before, whose process groups are gone."""
    for groups_before in (2, 0):
        pool().run(4, partial(_computes_on_a_mesh, groups_before=groups_before))
