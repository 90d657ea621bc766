"""The public test helpers, as far as one process can show them."""

from __future__ import annotations

import os
import unittest

import pytest
import torch
from torch import nn

import fsdp_compiled
from fsdp_compiled import FSDPModule, fully_shard, testing
from fsdp_compiled.collectives import backend
from fsdp_compiled.testing import (
    MLP,
    AlwaysWrapNestedWrappedModule,
    DEVICEInitMode,
    DoubleLinear,
    DummyDDP,
    DummyProcessGroup,
    FSDPInitMode,
    FSDPTestMultiThread,
    FullyShardMode,
    MixtureOfExperts,
    MLPStack,
    ModuleWithDelay,
    NestedLinear,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    NonUniformReqGradNWM,
    SkipModel,
    TransformerWithSharedParams,
    check_sharded_parity,
    compiled_fsdp_test,
    get_full_params,
    patch_all_reduce,
    patch_reduce_scatter,
    patch_reshard,
    patch_unshard,
    reduce_scatter_with_assert,
    run_subtests,
    seeded,
    subtest_name,
)

ALONE = DummyProcessGroup(rank=0, size=2)
INIT_CLASSES = (
    TransformerWithSharedParams,
    NestedWrappedModule,
    AlwaysWrapNestedWrappedModule,
    NonUniformReqGradNWM,
    MixtureOfExperts,
    NestedWrappedModuleWithDelay,
)
CPU = torch.device("cpu")


def test_every_public_name_exists_and_is_documented():
    for name in testing.__all__:
        assert getattr(testing, name).__doc__, name


def test_shapes_of_the_plain_models():
    x = torch.rand(2, 5)
    assert MLP(5, with_buffer=True, bias=False)(x).shape == x.shape
    stack = MLPStack(5, with_seq_parallel=True)
    assert [mlp.in_proj.out_features for mlp in list(stack)[:3]] == [15, 20, 15]
    assert stack(x).shape == x.shape
    first, second = DoubleLinear(5)(x)
    assert first.shape == second.shape == x.shape
    assert DoubleLinear(5, use_second_linear=False)(x).shape == x.shape
    assert DummyDDP(MLP(5))(x=x).shape == x.shape
    assert NestedLinear(fsdp_wrap=False)(torch.rand(2, 10)).shape == (2, 10)


def test_the_buffer_is_drawn_anew():
    mlp = MLP(5, with_buffer=True)
    before = mlp.buffer.clone()
    mlp.reset_parameters()
    assert not torch.equal(mlp.buffer, before)


@pytest.mark.parametrize("cls", INIT_CLASSES)
def test_unsharded_models_bring_an_input_and_a_loss_and_can_be_made_equal(cls):
    models = [
        cls.init(ALONE, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_NEVER, deterministic=True) for _ in range(2)
    ]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    model = models[0]
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    input = model.get_input(CPU)
    assert all(torch.equal(a, b) for a, b in zip(input, model.get_input(CPU), strict=True))
    loss = model.get_loss(input, model(*input))
    assert loss.shape == ()
    if cls is not MixtureOfExperts:  # which averages gradients over its group
        model.run_backward(loss)
        assert all((param.grad is not None) == param.requires_grad for param in model.parameters())


def test_what_is_special_about_each_model():
    transformer = TransformerWithSharedParams.init(ALONE, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_NEVER)
    assert transformer.output_proj.weight is transformer.embed_tokens.weight
    partly = NonUniformReqGradNWM.init(ALONE, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_NEVER)
    trained = [name for name, param in partly.named_parameters() if param.requires_grad]
    assert trained == ["module.2.1.weight", "module.2.1.bias"]
    experts = [
        MixtureOfExperts.init(group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_NEVER, deterministic=True)
        for group in (ALONE, DummyProcessGroup(1, 2))
    ]
    different = [
        name
        for (name, a), (_, b) in zip(experts[0].named_parameters(), experts[1].named_parameters(), strict=True)
        if not torch.equal(a, b)
    ]
    assert different == ["module.2.weight", "module.2.bias"]
    assert experts[0].num_expert_params == 23 * 12 + 12


def test_a_model_sleeps_after_its_loss(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    model = ModuleWithDelay.init(
        NestedWrappedModule,
        ALONE,
        FSDPInitMode.NO_FSDP,
        DEVICEInitMode.DEVICE_NEVER,
        delay_after_loss_ms=30,
        delay_before_reduction_ms=0,
    )
    input = model.get_input(CPU)
    model.get_loss(input, model(*input))
    assert slept == [0.03]


def test_bad_modes_and_groups_are_refused():
    with pytest.raises(TypeError, match="fsdp_init_mode: expected an FSDPInitMode, got 'recursive'"):
        NestedWrappedModule.init(ALONE, "recursive", DEVICEInitMode.DEVICE_NEVER)
    with pytest.raises(TypeError, match="group: expected a ProcessGroup .* got DummyProcessGroup; use NO_FSDP"):
        NestedWrappedModule.init(ALONE, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_NEVER)


def test_a_dummy_group_answers():
    work = ALONE.allreduce(torch.ones(1))
    assert (ALONE.rank(), ALONE.size(), work.wait(), work.get_future().wait()) == (0, 2, True, 1)


def test_units_of_the_sharded_models(fake_group):
    group = torch.distributed.group.WORLD
    units = {}
    for cls in INIT_CLASSES:
        model = cls.init(group, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE, {"reshard_after_forward": True})
        units[cls] = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert units[NestedWrappedModule] == ["module.1", "module.1.0", "module.2"]
    assert units[NonUniformReqGradNWM] == ["module.1", "module.1.0", "module.2"]
    assert units[MixtureOfExperts] == ["module.1", "module.2"]
    assert len(units[AlwaysWrapNestedWrappedModule]) == 8
    assert len(units[TransformerWithSharedParams]) == 5
    assert [n for n, m in SkipModel(double_nest=True).named_modules() if isinstance(m, FSDPModule)] == [
        "nested_linear",
        "nested_linear.nested_linear",
    ]


def test_seeded_leaves_the_generator_as_it_was():
    before = torch.get_rng_state()
    with seeded(3):
        first = torch.rand(2)
    with seeded(3):
        assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_subtests_run_every_combination_and_name_the_one_that_fails():
    seen = []
    run_subtests(unittest.TestCase(), {"a": [1, 2], "b": [True, False]}, lambda x, a, b: seen.append((x, a, b)), "x")
    assert seen == [("x", 1, True), ("x", 1, False), ("x", 2, True), ("x", 2, False)]
    with pytest.raises(ZeroDivisionError) as raised:
        run_subtests(unittest.TestCase(), {"a": [1, 0]}, lambda a: 1 / a)
    assert raised.value.__notes__ == ["subtest: {'a': 0}"]


def test_subtest_names():
    assert subtest_name({"True": "on", "3": "three"}, True, None, 3) == "on_none_three"


def _sharded(model: nn.Module) -> nn.Module:
    fully_shard(model[0])
    return fully_shard(model)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("fake", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _pair():
    models = []
    for _ in range(2):
        with seeded(0):
            models.append(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))
    return models[0], _sharded(models[1])


def test_parity_names_what_differs(one_rank):
    alone, model = _pair()
    check_sharded_parity(None, alone, model)
    alone(torch.ones(2, 4)).sum().backward()
    with pytest.raises(AssertionError, match=r"0.weight.grad: expected a gradient, got None"):
        check_sharded_parity(None, alone, model)
    model(torch.ones(2, 4)).sum().backward()
    check_sharded_parity(None, alone, model)
    check_sharded_parity(None, alone, nn.ModuleDict({"inner": model}), prefixes_to_ignore=("inner.",))
    alone[1].bias.grad += 0.1
    with pytest.raises(AssertionError, match=r"1.bias.grad: Tensor-likes are not close"):
        check_sharded_parity(None, alone, model)
    check_sharded_parity(None, alone, model, rtol=0, atol=0.2)
    with torch.no_grad():
        alone[0].bias += 1
    with pytest.raises(AssertionError, match=r"0.bias: Tensor-likes are not close"):
        check_sharded_parity(None, alone, model)
    with pytest.raises(AssertionError, match=r"0.weight: expected a DTensor, got Parameter"):
        check_sharded_parity(None, alone, _pair()[0])
    with pytest.raises(AssertionError, match=r"expected parameters \['0.weight', .* got \['0.weight', '0.bias'\]"):
        check_sharded_parity(None, alone, alone[:1])


def test_full_params_are_copies(one_rank):
    alone, model = _pair()
    full = get_full_params(model)
    assert [type(p) for p in full] == [torch.Tensor] * 4
    for got, want in zip(full, alone.parameters(), strict=True):
        assert torch.equal(got, want)
    full[0].zero_()
    assert get_full_params(model)[0].abs().sum() > 0
    assert get_full_params(model, recurse=False) == []


def test_a_patch_is_undone_after_an_error_and_nests(fake_group):
    before, packed, group = backend.all_reduce, torch.ones(3), torch.distributed.group.WORLD
    seen = []

    def count(label):
        return lambda *args: (seen.append(label), before(*args))[1]

    with pytest.raises(ZeroDivisionError), patch_all_reduce(count("outer")) as original:
        assert original is before
        with patch_all_reduce(count("inner")):
            backend.all_reduce(packed, group, torch.distributed.ReduceOp.SUM).wait()
        backend.all_reduce(packed, group, torch.distributed.ReduceOp.SUM).wait()
        raise ZeroDivisionError
    assert seen == ["inner", "outer"]
    assert backend.all_reduce is before


def test_reduce_scatter_with_assert_sees_the_output(fake_group):
    group, seen = torch.distributed.group.WORLD, []

    def reduce_scatter(*args):
        return reduce_scatter_with_assert(None, original, lambda output: seen.append(output.shape), *args)

    with patch_reduce_scatter(reduce_scatter) as original:
        backend.reduce_scatter(torch.empty(2), torch.ones(8), group, torch.distributed.ReduceOp.SUM)
    assert seen == [(2,)]


def test_modes_shard_as_they_say(fake_group):
    original, seen = fully_shard, []

    def how(module):
        return ("call" if module._compiled_call_impl else "") + ("forward" if "forward" in vars(module) else "")

    @compiled_fsdp_test()
    def test():
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 3))
        assert fully_shard(model[0]) is model[0]
        fsdp_compiled.fully_shard([model[1], model[2]])
        fully_shard(model)
        seen.append([how(module) for module in (model[0], model[1], model)])

    test()
    assert seen == [["", "", ""], ["forward", "", ""], ["", "", "call"]]
    assert fully_shard is original
    assert fsdp_compiled.fully_shard is original

    @compiled_fsdp_test(nn.Sequential, modes=[FullyShardMode.COMPILED_COMPUTE])
    def test_chosen():
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 6))))
        seen.append([how(model[0]), how(model)])

    test_chosen()
    assert seen[-1] == ["", "forward"]


def test_a_failure_names_its_mode():
    modes = []

    @compiled_fsdp_test()
    def test():
        modes.append(1)
        assert len(modes) < 2

    with pytest.raises(AssertionError) as raised:
        test()
    assert "mode: COMPILED_COMPUTE" in raised.value.__notes__
    with pytest.raises(TypeError, match=r"write @compiled_fsdp_test\(\)"):
        compiled_fsdp_test(lambda: None)


class OnThreads(FSDPTestMultiThread):
    """Run by pytest as it is; the tests below run the others by hand."""

    def perThreadSetUp(self):
        self.prepared = self.rank

    def test_ranks_talk(self):
        assert self.prepared == self.rank == self.process_group.rank()
        total = torch.tensor([self.rank + 1.0])
        torch.distributed.all_reduce(total)
        self.assertEqual(total, torch.tensor([3.0]))
        with pytest.raises(AssertionError, match="rank said"):
            self.assertEqual([total], [torch.tensor([4.0])], "rank said")
        with pytest.raises(AssertionError):
            self.assertEqual("a", "b")

    def test_comparisons_that_torchs_test_cases_know(self):
        one, two = torch.tensor([1.0]), torch.tensor([2.0])
        large = torch.tensor([0.1, 1e300], dtype=torch.float64)
        for first, second in (
            (one, True),
            (2, two),
            (torch.tensor([1.0, 2.0]), [1, 2]),
            (large, [0.1, 1e300]),
            (one, one.numpy()),
            (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
            ({"name": "a", "values": (one, None)}, {"name": "a", "values": [one.clone(), None]}),
            ([one, 1.0], [one, 1.0 + 1e-9]),
        ):
            self.assertEqual(first, second)
        self.assertEqual(one, one.double(), exact_dtype=False)
        self.assertEqual([one, 1.0], [one + 0.05, 1.05], rtol=0, atol=0.1)
        self.assertEqual(1.0, 1.05, rtol=0, atol=0.1)
        for first, second in (
            (one, two),
            ({"a": one}, {"b": one}),
            ([one], [one, one]),
            (one, 1.5),
            (large * float("inf"), [float("inf"), 1e300]),
            (one, one.double()),
            (one, {"a": one}),
            (one, None),
            ({"name": "a", "value": one}, {"name": "b", "value": one}),
        ):
            self.assertNotEqual(first, second)
        with pytest.raises(AssertionError, match="so it is"):
            self.assertNotEqual([one], [one.clone()], "so it is")

    def test_a_text_in_the_test(self):
        self.assertExpectedInline(str(torch.tensor([1.0])), """tensor([1.])""")
        if not os.environ.get("EXPECTTEST_ACCEPT"):
            with pytest.raises(AssertionError):
                self.assertExpectedInline(str(torch.tensor([1.0])), """tensor([2.])""")

    def test_training_and_what_each_rank_intercepts(self):
        counts = {"unshard": 0, "reshard": 0}

        def counted(name):
            def call(state):
                counts[name] += self.rank + 1
                {"unshard": unshard, "reshard": reshard}[name](state)

            return call

        alone, model = _pair()
        data = torch.arange(8.0).view(2, 4)
        alone(data).mean().backward()
        with patch_unshard(counted("unshard")) as unshard, patch_reshard(counted("reshard")) as reshard:
            model(data[self.rank]).mean().backward()
        check_sharded_parity(self, alone, model)
        assert counts["unshard"] == 4 * (self.rank + 1)  # forward and backward of two units
        assert counts["reshard"] >= 3 * (self.rank + 1)

    def test_compiling_is_refused(self):
        with pytest.raises(RuntimeError, match="COMPILED_COMPUTE compiles, which ranks that are threads cannot"):
            compiled_fsdp_test()(lambda: None)()

    @unittest.skip("says the test")
    def test_marked_as_skipped(self):
        raise AssertionError

    @unittest.expectedFailure
    def test_marked_as_failing(self):
        raise AssertionError


class Failing(FSDPTestMultiThread):
    __test__ = False
    test_timeout_s = 2.0

    def test_one_rank_fails_while_the_other_waits(self):
        if self.rank == 1:
            raise ValueError("rank 1 says so")
        torch.distributed.barrier()

    def test_one_rank_hangs(self):
        if self.rank == 1:
            torch.distributed.barrier()

    def test_skipped_on_the_ranks(self):
        self.skipTest("not here")


def _result(name: str) -> unittest.TestResult:
    result = unittest.TestResult()
    Failing(name).run(result)
    return result


def test_what_unittest_reports_of_threads():
    ((_, text),) = _result("test_one_rank_fails_while_the_other_waits").failures
    assert "--- rank 1 ---" in text
    assert "rank 1 says so" in text
    assert "--- rank 0 ---" not in text
    ((_, text),) = _result("test_one_rank_hangs").failures
    assert "--- rank 1 ---\nhung for 2.0 s" in text
    ((_, reason),) = _result("test_skipped_on_the_ranks").skipped
    assert reason == "not here"
    assert not torch.distributed.is_initialized()
