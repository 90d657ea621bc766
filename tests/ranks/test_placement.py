"""Where parameters live: smaller groups, replicas, meshes of their own, other parallelism, other units, the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compiled import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    fully_shard,
    step_on_shards,
    stream_parameters,
    unsharded,
)
from fsdp_compiled.hooks.state import states_below
from fsdp_compiled.param.placement import ShardedState
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.sharding.dtensor import process_group
from fsdp_compiled.testing import MLPStack
from tests.support.graphs import record
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    WITH_REGIONS,
    assert_close,
    assert_trains_like_one_process,
    batches,
    call_of,
    each_mode,
    each_with_regions,
    eager_and_full,
    full,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
)


@row("reshard")
@each_with_regions
@on_ranks(4)
def test_reshard_to_a_smaller_group(mode):
    alone, model = MLP(hidden=9), MLP(hidden=9)  # uneven over 4 and over 2
    call = shard(model, mode, reshard_after_forward=2)
    assert_trains_like_one_process(model, call, alone)
    if mode in ("eager", "regional"):
        loss = square_loss(call, my_part(batches(1, 8, 10)[0]))
        param = model.blocks[0][0]._fsdp_params["weight"]
        assert param.state is ShardedState.SHARDED_POST_FORWARD
        assert isinstance(model.blocks[0][0].weight, DTensor)
        loss.backward()
        assert param.state is ShardedState.SHARDED


@on_ranks(4)
def test_a_smaller_group_keeps_what_forward_read_and_the_next_forward_reads_what_was_written_since():
    alone, model = MLP(hidden=9), MLP(hidden=9)
    shard(model, "eager", reshard_after_forward=2)
    model.set_reshard_after_backward(False)
    (data,), sharded = batches(1, 8, 10), list(model.parameters())
    losses = square_loss(alone, data), square_loss(model, my_part(data))
    losses[0].backward()
    with torch.no_grad():
        for param in (*alone.parameters(), *sharded):
            param.mul_(1.5)
    losses[1].backward()
    assert_close(
        *({name: full(param.grad) for name, param in enumerate(each)} for each in (sharded, alone.parameters()))
    )
    torch.testing.assert_close(model(data), alone(data))


@row("reshard", mode="full")
@on_ranks(4)
def test_backward_gathers_over_the_smaller_group():
    model = MLP(hidden=9)
    shard(model, "eager", reshard_after_forward=2)
    call, recorder = record(model)
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    worlds = {
        kind: {
            nodes.bucket_of(n).spec.group.world
            for n in recorder.only(kind, after=True).nodes
            if nodes.is_launch(n) and nodes.stage_of(n) == "all_gather"
        }
        for kind in ("forward", "backward")
    }
    assert worlds == {"forward": {4}, "backward": {2}}
    params = [param for state in states_below([model]) for param in state.params]
    (group,) = {param.spec.post_forward for param in params}
    assert group.world == 2 and process_group(group.name).rank() == dist.get_rank() % 2
    assert group == params[0].placement.mesh_info.another_group(2)
    model.set_reshard_after_forward(True)
    assert model.scale is not None and model._fsdp_params["scale"].spec.post_forward.world == 1


@row("meshes")
@each_with_regions
@on_ranks(2)
def test_replicas_only(mode):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    alone, model = MLP(), MLP()
    call = shard(model, mode, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="replicate"))
    assert model.scale.placements == (Replicate(),)
    assert_trains_like_one_process(model, call, alone)


class Gain(nn.Module):
    """Backward computes from the gain what it could write over it."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(8, 8), nn.Parameter(torch.full(shape, -2.0))

    def forward(self, x):
        return self.linear(x).tanh() * self.gain.exp().exp()


class Gains(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Gain(*shape) for _ in range(2))
        self.last = Gain(*shape)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@on_ranks(2)
def test_backward_does_not_write_over_replicas_that_forward_keeps():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    alone, model = Gains(8), Gains(8)
    where = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(replicate="replicate")}
    call = shard(model, "full", inductor=True, reshard_after_forward=False, **where)
    assert_trains_like_one_process(model, call, alone, batches(3, 4, 8))


@each_mode
@pytest.mark.parametrize("hybrid", [False, True])
@on_ranks(4)
def test_scalars(mode, hybrid):
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone, model = Gains(), Gains()
    call = shard(model, mode, mesh=both if hybrid else None)
    assert model.last.gain.shape == () and set(model.last.gain.placements) == {Replicate()}
    assert_trains_like_one_process(model, call, alone, batches(3, 8, 8))


@eager_and_full
@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_scalars_accumulated_clipped_stepped_on_shards_and_streamed(mode, offload):
    alone, model = Gains(), Gains()
    call = shard(model, mode, offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy())
    optimizers = torch.optim.AdamW(alone.parameters()), step_on_shards(torch.optim.AdamW(model.parameters()))
    for step in range(3):
        for micro, batch in enumerate(batches(2, 4, 8, seed=step)):
            model.set_requires_gradient_sync(micro == 1)
            square_loss(alone, batch).backward()
            square_loss(call, my_part(batch)).backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (alone, model)]
        torch.testing.assert_close(norms[1].full_tensor(), norms[0])
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_close(full_params(model), full_params(alone))
    assert_close(full_params(copy.deepcopy(model)), full_params(alone))
    assert_close(dict(stream_parameters(model)), full_params(alone))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with torch.no_grad(), unsharded(model):
        torch.testing.assert_close(model(batch), alone(batch))


@row("shard_placement_fn", "reshard")
@eager_and_full
@pytest.mark.parametrize("reshard", [True, 2])
@on_ranks(4)
def test_a_mesh_of_its_own_for_some_parameters(mode, reshard):
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0)

    def choose(param):
        if param.dim() == 1:
            return None
        return ShardPlacementResult(Shard(1 if param.shape[1] % 2 == 0 else 0), hybrid)

    alone, model = MLP(), MLP()
    call = shard(model, mode, shard_placement_fn=choose, reshard_after_forward=reshard)
    assert model.blocks[0][0].weight.placements == (Replicate(), Shard(1))
    assert model.blocks[0][0].bias.placements == (Shard(0),)
    kept = {param: (owner.spec.post_forward.world > 1) for param, owner in model.blocks[0][0]._fsdp_params.items()}
    assert kept == {"weight": False, "bias": reshard is not True}  # the weight is sharded over no more than two
    assert_trains_like_one_process(model, call, alone)


class Tied(nn.Module):
    """An embedding and a head that share their weight and lie in different units, and the root reads it too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(10, 10)
        self.blocks = nn.ModuleList([nn.Linear(10, 10, bias=False), nn.Linear(10, 10), nn.Linear(10, 10, bias=False)])
        self.blocks[2].weight = self.blocks[0].weight
        self.again = self.blocks[0].weight

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x @ self.again


@row("tied and shared")
@each_with_regions
@on_ranks(2)
def test_parameters_tied_across_units(mode):
    alone, model = Tied(), Tied()
    call = shard(model, mode)
    assert model.blocks[0].weight is model.blocks[2].weight is model.again
    assert len(list(model.parameters())) == len(list(alone.parameters()))
    assert model.state_dict().keys() == alone.state_dict().keys()
    assert_trains_like_one_process(model, call, alone)
    model.set_requires_gradient_sync(False)
    first, second = batches(2, 8, 10)
    square_loss(call, my_part(first)).backward()
    model.set_requires_gradient_sync(True)
    square_loss(call, my_part(second)).backward()
    for micro in (first, second):
        square_loss(alone, micro).backward()
    assert_close(full_grads(model), full_grads(alone))


class Parallel(nn.Module):
    """Two blocks for tensor parallelism, and a norm that stays plain or replicated."""

    def __init__(self, mesh=None) -> None:
        super().__init__()
        self.mesh = mesh  # if parameters are DTensors on a full mesh, and so must activations be
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 10)) for _ in range(2))

    def forward(self, x):
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Shard(0), Replicate()], run_check=False)
        for block in self.blocks:
            x = x + block(x)
        return x if self.mesh is None else x.redistribute(placements=[Shard(0), Replicate()]).to_local()


def _rows(batch, mesh):
    """This rank's rows; ranks of one tensor-parallel group have the same."""
    return batch.chunk(mesh.size())[mesh.get_local_rank()]


def _step(call, data, mesh):
    loss = square_loss(call, _rows(data, mesh))
    loss.backward()
    return loss


@row("tensor parallel")
@pytest.mark.parametrize(
    ("mode", "hybrid"), [(mode, False) for mode in WITH_REGIONS] + [("eager", True), ("full", True)]
)
@on_ranks(4)
def test_on_top_of_tensor_parallelism(mode, hybrid):
    if hybrid:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        data_parallel = mesh["replicate", "shard"]
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        data_parallel = mesh["dp"]
    alone, model = Parallel(), Parallel()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    whole = {name: param.full_tensor().clone() for name, param in model.named_parameters()}
    call = shard(model, mode, mesh=data_parallel)
    weight = model.blocks[0][0].weight
    assert weight.to_local().shape == (6 if hybrid else 3, 10)
    assert weight.device_mesh.mesh_dim_names == mesh.mesh_dim_names
    assert_close(full_params(model), whole)
    for data in batches(2, 8, 10):
        square_loss(alone, data).backward()
        _step(call, data, mesh[mesh.mesh_dim_names[0]])
        assert_close(full_grads(model), full_grads(alone))
        for each in (alone, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    assert_close(full_params(model), full_params(alone))


class Scale(nn.Module):
    """A weight that is the same on every tensor-parallel rank, for rows of which each has its own."""

    def __init__(self, mesh) -> None:
        super().__init__()
        self.mesh, self.weight = mesh, nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Replicate()]))

    def forward(self, x):
        return (DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False) * self.weight).to_local()


class Scales(nn.Module):
    def __init__(self, mesh) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scale(mesh), Scale(mesh)])

    def forward(self, x):
        return self.blocks[0](x) + self.blocks[1](x)


@row("tensor parallel", "mixed precision")
@each_with_regions
@on_ranks(4)
def test_tensor_parallel_ranks_sum_gradients_in_the_dtype_of_the_reduction(mode):
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    model = Scales(mesh["tp"])
    call = shard(model, mode, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    rows = torch.full((1, 8), 1 / 512)  # added to 1 one after the other, bf16 loses them
    rows[0, dist.get_rank() :: 4] = 1
    call(rows).float().sum().backward()
    summed = torch.tensor(1 + 3 / 512)
    in_graph = mode in ("full", "regions")  # where autograd rounds it to the dtype of the parameter
    for grad in full_grads(model).values():
        assert grad.eq(summed.bfloat16() if in_graph else summed).all(), grad


@row("meshes")
@eager_and_full
@on_ranks(4)
def test_named_dimensions_of_a_full_mesh(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    alone, model = Parallel(), Parallel(mesh)
    plans = {"0": Shard(0), "2": Shard(1)}
    for block in model.blocks:
        for name, layer in block.named_children():
            for key, param in list(layer.named_parameters()):
                here = Replicate() if name == "2" and key == "bias" else plans[name]
                setattr(layer, key, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate(), here])))

    call = shard(model, mode, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))
    assert model.blocks[0][0].weight.device_mesh == mesh
    for data in batches(2, 8, 10):
        square_loss(alone, data).backward()
        _step(call, data, mesh["data"])
        assert_close(full_grads(model), full_grads(alone))
        for each in (alone, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()


class _Same(nn.Module):
    """Tensor parallelism by parameters on a full mesh, whose ranks all have the same rows."""

    def __init__(self, mesh=None) -> None:
        super().__init__()
        self.mesh = mesh
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU()) for _ in range(2)
        )

    def forward(self, x):
        same = None if self.mesh is None else [Replicate()] * self.mesh.ndim
        x = x if same is None else DTensor.from_local(x, self.mesh, same, run_check=False)
        for block in self.blocks:
            x = block(x)
        return x if same is None else x.redistribute(placements=same).to_local()


@row("meshes")
@each_with_regions
@on_ranks(4)
def test_gradients_that_are_the_same_on_all_ranks_of_a_full_mesh(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    alone, model = _Same(), _Same(mesh)
    for block in model.blocks:
        for layer, dim in ((block[0], 0), (block[2], 1)):
            for key, param in list(layer.named_parameters()):
                here = Replicate() if (dim, key) == (1, "bias") else Shard(dim)
                setattr(layer, key, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate(), here])))
    call = shard(model, mode, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))
    for data in batches(2, 8, 10):
        square_loss(alone, data).backward()
        square_loss(call, data).backward()
        assert_close(full_grads(model), full_grads(alone))
        for each in (alone, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()


@row("CPU offload")
@each_mode
@on_ranks(2)
def test_shards_on_the_cpu(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_trains_like_one_process(model, call, alone)
    assert {param.device.type for param in model.parameters()} == {"cpu"}


@row("CPU offload", mode="eager")
@on_ranks(2)
def test_pinning_needs_an_accelerator():
    if torch.accelerator.is_available():
        return
    with pytest.raises(RuntimeError, match="accelerator|CUDA|NVIDIA|pin"):
        fully_shard(MLP(), offload_policy=CPUOffloadPolicy())


@pytest.mark.usefixtures("fake_group")
def test_shards_that_get_other_memory_are_pinned_again(monkeypatch):
    pinned = set()

    def pin_memory(tensor):
        copy = tensor.clone()
        pinned.add(copy.untyped_storage().data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.untyped_storage().data_ptr() in pinned)

    def is_pinned():
        return [param.to_local().is_pinned() for param in model.parameters()]

    with torch.device("meta"):
        model = MLP()
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.ones_(param)
    model(torch.ones(2, 10))
    model.reshard()
    assert all(is_pinned())
    assert all(param.to_local().eq(1).all() for param in model.parameters())
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
    model(torch.ones(2, 10))
    model.reshard()
    assert all(is_pinned())
    assert all(param.to_local().eq(2).all() for param in model.parameters())


@eager_and_full
@on_ranks(4)
def test_sequence_parallelism(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(MLPStack(4, with_seq_parallel=True))
    alone, model = models
    model.parallelize(mesh["tp"], mesh["dp"], False)
    call = call_of(model, mode)
    data = batches(1, 4, 6, 4)[0]
    alone(data).square().mean().backward()
    mine = _rows(data, mesh["dp"])
    call(mine).to_local().square().sum().div(mine.numel()).backward()
    assert_close(full_grads(model), full_grads(alone), rtol=1e-4)
