"""What each unit does and why, told from the states alone."""

from __future__ import annotations

import expecttest
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_compiled import FSDPMeshInfo, MixedPrecisionPolicy, SchedulePolicy, ShardPlacementResult, fully_shard
from fsdp_compiled.inspect import capture
from fsdp_compiled.inspect.explain import explain
from fsdp_compiled.testing.llama import PRESETS, Llama
from tests.support.training import MLP, llama

pytestmark = pytest.mark.usefixtures("fake_group")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 118


def _sharded(model, **kwargs):
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def _text(explanation):
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= WIDTH
    return text + "\n"


class Reports(expecttest.TestCase):
    def test_equal_layers_share_a_row(self):
        with torch.device("meta"):
            model = Llama(PRESETS["small"])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        text = _text(explain(_sharded(model, mp_policy=BF16, mesh=mesh), SchedulePolicy(bucket="unit")))
        self.assertExpectedInline(
            text,
            """\
Llama: 5 units, 39 parameters of 24.8 MiB, of which each rank holds 12.4 MiB

unit                          params     size  per rank  ranks  all-gathers  in        reduces in  after forward
Llama                              3  770 KiB   385 KiB  2 x 2      385 KiB  bfloat16  float32     kept for backward
blocks.{0,1,2,3} (each of 4)       9    6 MiB     3 MiB  2 x 2        3 MiB  bfloat16  float32     resharded

Llama: outermost unit: kept by default, as backward begins with it; freed where no gradients are recorded
every unit: gradients are reduced over 2 shards, then over 2 replicas
every unit: on the meta device: call to_empty and initialise the parameters before running the model
blocks.{0,1,2,3}: inside another unit: freed by default, so that only units in use take memory
blocks.{0,1,2,3}: in one full graph, keep_unsharded_bytes keeps 9 parameters,
  {attention_norm,attention.wq,…,ffn.down}.weight (3 MiB)

one full graph is scheduled with bucket unit, prefetch auto, in flight auto, keep unsharded auto: one bucket for each
  unit and dtype
""",
        )

    def test_units_that_differ(self):
        model = llama()
        model.blocks[0].ffn.gate.half()
        model.blocks[1].requires_grad_(False)
        fully_shard([model.embed, model.norm], reshard_after_forward=True)
        fully_shard(model.blocks[0], reshard_after_forward=False)
        fully_shard(model.blocks[1])
        model.head.weight.requires_grad_(False)
        fully_shard(model, ignored_params={model.head.weight})
        model.blocks[0].set_requires_gradient_sync(False)
        model.blocks[0].set_reshard_after_backward(False)
        text = _text(explain(model, SchedulePolicy(bucket=2**20, keep_unsharded_bytes=2**10)))
        self.assertExpectedInline(
            text,
            """\
Llama: 4 units, 20 parameters of 65.2 KiB, of which each rank holds 16.4 KiB

unit      params      size  per rank  ranks  all-gathers  in                reduces in        after forward
Llama          0       0 B       0 B      -          0 B  -                 -                 nothing to free
embed          2  7.75 KiB  2.03 KiB      4     8.12 KiB  float32           float32           resharded
blocks.0       9  27.2 KiB  6.81 KiB      4     27.2 KiB  float32, float16  float32, float16  kept for backward
blocks.1       9  30.2 KiB  7.56 KiB      4     30.2 KiB  float32           -                 resharded

Llama: no parameters of its own: other units hold all of them
embed: reshard_after_forward=True
embed: list of 2 modules, all-gathered before the first of them runs
embed: 5% of each all-gather is padding: dimensions do not divide by 4 ranks
embed: in one full graph, keep_unsharded_bytes keeps 1 parameter, norm.weight (128 B)
blocks.0: reshard_after_forward=False
blocks.0: different dtypes, meshes or sharing: 2 all-gathers in an uncompiled forward
blocks.0: set_requires_gradient_sync(False): gradients stay on their rank, unsharded, until sync is on again
blocks.0: set_reshard_after_backward(False): stays unsharded after backward, compiled if it does after forward
blocks.1: inside another unit: freed by default, so that only units in use take memory
blocks.1: no gradient: no parameter requires grad: all-gathered, also to pass gradients on, but never reduced
blocks.1: in one full graph, keep_unsharded_bytes keeps 2 parameters, {attention_norm,ffn_norm}.weight (256 B)
in no unit: 1 parameter, head.weight: unsharded on every rank, gradients not averaged; given as ignored_params, or
  fully_shard was not called on a module above

one full graph is scheduled with bucket 1 MiB, prefetch auto, in flight auto, keep unsharded 1 KiB: buckets may span
  units, up to 1 MiB each
""",
        )


def test_figures_of_a_unit():
    model = _sharded(MLP(width=10, hidden=14), mp_policy=BF16)
    root, block, _ = explain(model).units
    assert (root.name, root.params, root.reshards) == ("MLP", ("scale",), False)
    assert block.name == "blocks.0"
    assert block.params[:2] == ("blocks.0.0.weight", "blocks.0.0.bias")
    assert block.total_bytes == 4 * (14 * 10 + 14 + 14 + 14 + 10 * 14 + 10)
    assert block.rank_bytes == 4 * (4 * 10 + 4 + 4 + 4 + 3 * 14 + 3)  # 14 rows in 4 parts of 4, 10 in 4 of 3
    assert block.all_gather_bytes == 2 * block.rank_bytes
    assert (block.all_gather_dtypes, block.reduce_dtypes) == ((torch.bfloat16,), (torch.float32,))
    assert (block.shard_world, block.replicate_world) == (4, 1)
    assert "14% of each all-gather is padding" in block.notes[0]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_unit_without_elements():
    (unit,) = explain(fully_shard(nn.Linear(8, 0, bias=False))).units
    assert (unit.params, unit.total_bytes) == (("weight",), 0)
    assert not any("padding" in note for note in unit.notes)


def test_what_the_user_asked_for_is_the_reason():
    model = _sharded(llama(), reshard_after_forward=True)
    assert {unit.why for unit in explain(model).units} == {"reshard_after_forward=True"}
    model.set_reshard_after_forward(False)
    assert {(unit.why, unit.after_forward) for unit in explain(model).units} == {
        ("reshard_after_forward=False", "kept for backward")
    }


def test_a_budget_keeps_what_costs_most_per_byte():
    model = _sharded(llama())
    unit = explain(model, SchedulePolicy(keep_unsharded_bytes=2**9)).units[1]
    assert unit.kept == ("blocks.0.attention_norm.weight", "blocks.0.ffn_norm.weight")
    everything = explain(model, SchedulePolicy(keep_unsharded_bytes=2**30))
    assert [len(unit.kept) for unit in everything.units] == [0, 9, 9]  # the root is kept anyway


def test_the_graph_keeps_what_the_explanation_says():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    for layer in model:
        fully_shard(layer)
    policy = SchedulePolicy(keep_unsharded_bytes=4 * 16 * 16)
    captured = capture(fully_shard(model), torch.ones(2, 16), schedule=policy, code=False)
    graphs = {graph.kind: graph for graph in captured.graphs}
    gathers = [found for found in graphs["backward"].collectives if found.kind == "all_gather"]
    again = {name for gather in gathers for name in gather.params}
    kept = {name for unit in explain(model, policy).units for name in unit.kept}
    assert kept == {"0.bias", "1.bias", "2.bias", "2.weight"}
    assert again == {"1.weight"}  # backward reads neither biases nor the first layer's weight


def test_a_model_that_holds_units_and_is_none():
    pair = nn.ModuleDict({"teacher": _sharded(llama()), "student": _sharded(llama())})
    explanation = explain(pair)
    assert [unit.name for unit in explanation.units[::3]] == ["teacher", "student"]
    assert explanation.units[4].name == "student.blocks.0"
    assert explain(pair["student"].blocks[1]).units[0].name == "Block"
    assert explanation.total_bytes == 4 * sum(param.numel() for param in pair.parameters())


def test_a_compiled_and_an_unsharded_model_read_the_same():
    model = _sharded(llama())
    before = explain(model)
    model.unshard()
    assert explain(torch.compile(model)) == before
    assert before.outside == ()


def test_a_unit_without_parameters():
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    explanation = explain(fully_shard(model))
    assert explanation.units[0].why == "no parameters of its own: other units hold all of them"
    assert explanation.units[0].after_forward == "nothing to free"


def test_mistakes():
    with pytest.raises(
        ValueError, match="Llama: expected a sharded model, got one without any unit; call fully_shard"
    ):
        explain(llama())
    with pytest.raises(TypeError, match="model: expected an nn.Module given to fully_shard, got 'model' of str"):
        explain("model")
    with pytest.raises(TypeError, match="schedule: expected a SchedulePolicy or None, got 'unit' of str"):
        explain(_sharded(llama()), "unit")


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_that_stay_reduced_over_the_shards(replicas):
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    model.set_requires_all_reduce(False)
    note = "set_requires_all_reduce(False): gradients stay reduced over the shards only"
    assert (note in " ".join(str(explain(model)).split())) == (replicas > 1)


def test_parameters_on_another_mesh():
    pairs = FSDPMeshInfo(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"], 0)
    placed = {1: ShardPlacementResult(Shard(0), pairs)}
    model = fully_shard(nn.Linear(8, 8), shard_placement_fn=lambda param: placed.get(param.ndim))
    (unit,) = explain(model).units
    assert unit.shard_world == 4
    assert "on another mesh, sharded over 2 ranks: 1 parameter, bias" in unit.notes


def test_scalars_do_not_stand_for_their_unit():
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))  # before those of modules below
    (unit,) = explain(fully_shard(model)).units
    assert (unit.params[0], unit.shard_world, unit.replicate_world) == ("scale", 4, 1)
    assert "scalar, on every rank: 1 parameter, scale" in unit.notes


def test_options_that_change_what_travels():
    from fsdp_compiled import CPUOffloadPolicy

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    offload = CPUOffloadPolicy(pin_memory=False)
    fully_shard(model[0], reshard_after_forward=2, offload_policy=offload)
    policy = MixedPrecisionPolicy(
        torch.bfloat16, param_dtype_override_fn=lambda param: param.dtype if param.ndim == 1 else None
    )
    fully_shard(model[1], offload_policy=offload, mp_policy=policy)
    fully_shard(model, offload_policy=offload)
    model[0].set_gradient_divide_factor(3)
    model[0].set_all_reduce_hook(lambda grad: None)
    model[1].set_keep_unsharded_storage(True)
    text = str(explain(model))
    for note in (
        "0: reshard_after_forward=2",
        "kept from forward sharded over 2 ranks, where backward all-gathers it",
        "shared with other units: all-gathered for each of them",
        "CPUOffloadPolicy: shards and gradients live on the CPU",
        "set_gradient_divide_factor: sums of gradients are divided by 3",
        "set_all_reduce_hook: the user's function sees reduced gradients",
        "set_keep_unsharded_storage: a reshard leaves the memory of uncompiled units allocated",
        "param_dtype_override_fn: not cast to torch.bfloat16: 1 parameter, bias",
    ):
        assert note in " ".join(text.split()), note
