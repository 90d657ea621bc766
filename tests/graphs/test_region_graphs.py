"""Regions in one process: which blocks become one, and what the graphs around them hold."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.comptime import comptime
from torch._functorch import config
from torch.func import functional_call

import fsdp_compiled
from fsdp_compiled import FSDPModule, SchedulePolicy, fully_shard
from fsdp_compiled.inspect import capture
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.regions import block as of_regions
from fsdp_compiled.regions.block import RegionModule
from tests.support.graphs import record, regions_of, sequence

pytestmark = pytest.mark.usefixtures("fake_group")

X = torch.ones(2, 8)


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))


class Model(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for width in widths)

    def forward(self, x):
        for each in self.blocks:
            x = x + each(x)
        return x


def sharded(*widths: int) -> Model:
    model = Model(*widths)
    for each in model.blocks:
        fully_shard(each, reshard_after_forward=True)
    return fully_shard(model)


def regions(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, RegionModule)]


# ---- which blocks ----


def test_auto_takes_what_occurs_four_times_with_equal_shapes():
    model = sharded(6, 6, 4, 6, 4, 6, 4)
    fsdp_compiled.compile(model, regions="auto")
    assert regions(model) == ["blocks.0", "blocks.1", "blocks.3", "blocks.5"]


def test_auto_takes_the_outer_ones_of_nested_units():
    model = Model(6, 6, 6, 6)
    for each in model.blocks:
        fully_shard(each[0])
        fully_shard(each)
    fully_shard(model)
    fsdp_compiled.compile(model, regions="auto")
    assert regions(model) == [f"blocks.{index}" for index in range(4)]


def test_the_last_call_decides():
    model = sharded(6, 6, 4)
    fsdp_compiled.compile(model, regions=[model.blocks[0], model.blocks[2]])
    assert regions(model) == ["blocks.0", "blocks.2"]
    fsdp_compiled.compile(model, regions=model.blocks[1:2])
    assert regions(model) == ["blocks.1"]
    fsdp_compiled.compile(model)
    assert regions(model) == []
    assert isinstance(model.blocks[0], FSDPModule) and type(model.blocks[0]).forward is nn.Sequential.forward


@pytest.mark.parametrize(
    ("choose", "error", "message"),
    [
        (lambda model: "all", TypeError, "regions: expected 'auto', 'off' or a list of modules, got 'all'"),
        (lambda model: 4, TypeError, "regions: expected 'auto', 'off' or a list of modules, got 4"),
        (lambda model: [model], ValueError, "below the outermost one, got FSDPModel"),
        (lambda model: [model.blocks[0][0]], ValueError, "regions: expected modules .* got ShardedLinear"),
        (lambda model: [block()], ValueError, "regions: expected modules .* got Sequential; call fully_shard on it"),
        (
            lambda model: [model.nested, model.nested[0]],
            ValueError,
            r"regions: nested.0 lies inside nested; give one",
        ),
        (lambda model: [model.own], ValueError, "regions: own has a forward of its own"),
    ],
)
def test_wrong_regions(choose, error, message):
    model = Model(6)
    model.nested, model.own = nn.Sequential(block()), block()
    model.own.forward = model.own.forward
    for unit in (model.blocks[0], model.nested[0], model.nested, model.own, model):
        fully_shard(unit)
    fsdp_compiled.compile(model, regions=[model.nested])
    with pytest.raises(error, match=message):
        fsdp_compiled.compile(model, regions=choose(model))
    with pytest.raises(
        NotImplementedError, match="regions: expected no pass in .*_pre_fusion_custom_pass.* got <built"
    ):
        fsdp_compiled.compile(model, regions=[model.nested[0]], options={"_pre_fusion_custom_pass": print})
    assert regions(model) == ["nested"]


# ---- the graphs ----


def test_equal_blocks_are_one_region_and_their_all_gathers_stay_outside():
    model = sharded(6, 6, 6, 6)
    fsdp_compiled.compile(model, regions=list(model.blocks))
    call, recorder = record(model)
    call(X).sum().backward()
    for kind in ("forward", "backward"):
        graph = recorder.only(kind, after=True)
        found = regions_of(graph)
        # the first block's input needs no gradient: it is another region, or inlined, as by torch 2.13
        assert sorted(Counter(map(id, found)).values()) in ([3], [1, 3])
        assert sequence(graph, "launch_all_gather") and not any(nodes.has_ours(region) for region in found)


def test_no_recompilation():
    model = sharded(6, 6, 6, 6)
    fsdp_compiled.compile(model, regions=list(model.blocks))
    call, recorder = record(model)
    for _ in range(3):
        call(X).sum().backward()
        for each in model.parameters():
            each.grad = None
    assert recorder.dynamo_graphs == 1


def test_equal_blocks_are_traced_once():
    if "max_reuse_entries" not in inspect.signature(torch.compiler.nested_compile_region).parameters:
        pytest.skip("this torch traces every call")
    model = sharded(6, 6, 6, 6)
    fsdp_compiled.compile(model, regions=list(model.blocks))
    traced = []
    for each in model.blocks:
        each[1] = Heard(traced)
    torch.compile(model, fullgraph=True, backend="eager")(X.clone().requires_grad_())
    assert len(traced) == 1


def test_schemas_are_derived_once_for_all_equal_blocks():
    derived = []
    for depth in (4, 8):
        model = sharded(*[6] * depth)
        fsdp_compiled.compile(model, regions=list(model.blocks))
        torch._dynamo.reset()
        with mock.patch.object(of_regions, "_derive", wraps=of_regions._derive) as derive:
            call, _ = record(model)
            call(X.clone().requires_grad_()).sum().backward()
        derived.append(derive.call_count)
    assert 0 < derived[0] == derived[1]
    assert torch.ops.higher_order.invoke_subgraph.gen_schema is of_regions._remembered


def test_a_collective_follows_the_last_of_the_regions_before_it():
    """Of regions in a chain the last one says all; what Inductor does with dependencies is quadratic in them."""
    model = sharded(*[6] * 8)
    fsdp_compiled.compile(model, regions=list(model.blocks))
    torch._dynamo.reset()
    several_blocks = SchedulePolicy(bucket=1400)
    for graph in capture(model, X.clone().requires_grad_(), schedule=several_blocks, code=False).graphs:
        assert 2 < len(graph.collectives) < 16
        bound = [node.args[0] for node in graph.module.graph.nodes if "control_deps" in str(node.target)]
        assert bound and all(len(others) <= 2 for others in bound)


class Heard(nn.Tanh):
    """Notes when Dynamo traces it."""

    def __init__(self, traced: list[None]) -> None:
        super().__init__()
        self.note = lambda _: traced.append(None)

    def forward(self, x):
        comptime(self.note)
        return super().forward(x)


class Settings(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.factor, self.below = 1.0, nn.Dropout(0.5)

    def forward(self, x):
        return self.below(super().forward(x)) * self.factor


def _set_factor(block):
    block.factor = 3.0


def _freeze(block):
    block.weight.requires_grad = False


@pytest.mark.parametrize("change", [_set_factor, _freeze, lambda block: block.below.eval()])
def test_a_change_in_a_block_whose_trace_was_reused_is_heard(change):
    model = Model()
    model.blocks.extend(fully_shard(Settings()) for _ in range(4))
    fully_shard(model)
    fsdp_compiled.compile(model, regions=list(model.blocks))
    call, recorder = record(model)
    x = X.clone().requires_grad_()
    for _ in range(2):
        call(x)
    assert recorder.dynamo_graphs == 1
    change(model.blocks[2])
    call(x)
    # torch 2.11 traces once more after some changes
    assert recorder.dynamo_graphs == 2 or (torch.__version__ < "2.13" and recorder.dynamo_graphs == 3)


def test_functional_call_in_a_block_whose_trace_is_reused():
    model = sharded(6, 6, 6, 6)
    fsdp_compiled.compile(model, regions=list(model.blocks))
    given = {"blocks.2.0.weight": torch.ones(6, 8)}
    with pytest.raises(RuntimeError, match=r"0.weight: expected the parameter that fully_shard registered"):
        torch.compile(lambda x: functional_call(model, given, (x,)), fullgraph=True, backend="aot_eager")(X)


def test_a_region_takes_as_long_as_its_compute():
    totals = []
    for choice in ("off", "auto"):
        model = sharded(6, 6, 6, 6)
        fsdp_compiled.compile(model, regions=choice)
        torch._dynamo.reset()
        totals.append([graph.compute_us for graph in capture(model, X, code=False).graphs])
    assert all(region > 0 for region in totals[1])
    torch.testing.assert_close(torch.tensor(totals[1]), torch.tensor(totals[0]), rtol=0.35, atol=0)


def test_a_capture_names_each_region_once_and_the_blocks_that_call_it(tmp_path):
    model = sharded(6, 6, 6, 6)
    fsdp_compiled.compile(model, regions=list(model.blocks))
    captured = capture(model, X, code=False)
    for graph in captured.graphs:
        region = max(graph.regions, key=lambda region: len(region.calls))
        assert sorted(region.calls) == ["blocks.1", "blocks.2", "blocks.3"]
        assert region.module.graph in regions_of(graph.module.graph) and 0 < region.estimate_us < graph.compute_us
        assert sum(len(collective.params) for collective in graph.collectives) >= 4 * 4
        assert f"3 calls of {region.name}, " in str(captured)
        spans = [span for span in graph.compute if span.block]
        assert {span.block for span in spans} == {call for each in graph.regions for call in each.calls}
        assert sum(span.end_us - span.start_us for span in spans) == pytest.approx(
            sum(each.estimate_us * len(each.calls) for each in graph.regions)
        )
    page = captured.save(tmp_path / "page.html").read_text()
    assert (
        page.count("<summary>Region ") == sum(len(graph.regions) for graph in captured.graphs)
        and "3 calls: blocks.{1,2,3}" in page
    )


class Scored(Model):
    """The product that ``head`` makes is saved for backward, which computes a result of its size."""

    def __init__(self, then) -> None:
        super().__init__(*[6] * 5)
        self.head, self.then = nn.Linear(8, 64, bias=False), then

    def forward(self, x):
        *blocks, last = self.blocks
        for each in blocks:
            x = x + each(x)
        scores = self.head(x)
        return self.then(last, scores, x).exp().mean()


def _own(last, scores, x):
    return scores


def _read_by_region(last, scores, x):
    return scores * last(scores.view(-1, 8)).view_as(scores)


@pytest.mark.parametrize("then, is_overwritten", [(_own, True), (_read_by_region, False)])
def test_backward_writes_over_saved_products_that_no_region_reads(then, is_overwritten):
    model = Scored(then)
    for each in model.blocks:
        fully_shard(each, reshard_after_forward=True)
    fsdp_compiled.compile(fully_shard(model), regions=list(model.blocks))
    backward = capture(model, X).graphs[1]
    (names,) = re.findall(r"\n +(.*) = args\n", backward.code[backward.code.index("def call(") :])
    (given,) = re.findall(r"\bmm\w*", names)
    assert (f"= {given}; del {given}  # reuse" in backward.code) is is_overwritten


class Wide(Model):
    """Many values of one size lie between a product and the end, and each is read twice."""

    def forward(self, x):
        for each in self.blocks:
            x = x + each(x)
        x = x @ torch.ones(8, 16)
        for _ in range(60):
            x = x + x.sin()
        return x


def test_products_are_followed_once_through_what_reads_them():
    model = Wide(*[6] * 4)
    for each in model.blocks:
        fully_shard(each)
    fsdp_compiled.compile(fully_shard(model), regions=list(model.blocks))
    assert len(capture(model, X, code=False).graphs) == 2


def test_an_uncompiled_call_knows_no_regions():
    model = sharded(6, 6, 6, 6)
    fsdp_compiled.compile(model, regions=list(model.blocks))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_states_of_random_generators_are_no_arguments_of_a_graph():
    model, seen = sharded(6, 6), []

    def backend(gm, inputs):
        seen.append(config.graphsafe_rng_functionalization)
        return gm

    torch.compile(model, backend=backend)(X)
    assert seen == [False] and config.graphsafe_rng_functionalization
    torch._dynamo.reset()
    model.compile(backend=backend)
    model(X)
    assert seen == [False, False] and config.graphsafe_rng_functionalization
