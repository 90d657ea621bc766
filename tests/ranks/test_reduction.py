"""How gradients are reduced: divisors, sums, replicas apart, groups and collectives of the user's own."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import AllGather, ReduceScatter, fully_shard
from fsdp_compiled.collectives import backend
from fsdp_compiled.sharding.layout import packed_layout
from tests.support.collectives import counted
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    batches,
    compiled,
    full_grads,
    my_part,
    shard,
    square_loss,
)

eager_and_full = pytest.mark.parametrize("mode", ["eager", "full"])


def _grads(model, call, data):
    square_loss(call, my_part(data)).backward()
    got = full_grads(model)
    for param in model.parameters():
        param.grad = None
    return got


def _alone(data, scale=1.0):
    alone = MLP()
    (square_loss(alone, data) * scale).backward()
    return full_grads(alone)


@row("gradient division")
@eager_and_full
@on_ranks(2)
def test_divisors_and_sums(mode):
    data = batches(1, 8, 10)[0]
    model = MLP()
    call = shard(model, mode)
    for block in (*model.blocks, model):
        block.set_force_sum_reduction_for_comms(True)
    assert_close(_grads(model, call, data), _alone(data))
    for block in (*model.blocks, model):
        block.set_force_sum_reduction_for_comms(False)
        block.set_gradient_divide_factor(1)  # a sum over two ranks
    assert_close(_grads(model, call, data), _alone(data, 2.0))
    for block in model.blocks:
        block.set_gradient_divide_factor(5.0)
    got, summed, divided = _grads(model, call, data), _alone(data, 2.0), _alone(data, 2.0 / 5.0)
    assert_close(got, {name: (summed if name == "scale" else divided)[name] for name in got})


@row("accumulation", "meshes")
@eager_and_full
@on_ranks(4)
def test_micro_batches_that_reduce_over_the_shards_only(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, micros = MLP(), list(batches(3, 8, 10))
    call = shard(model, mode, mesh=mesh)
    with counted() as counts:
        for micro in micros:
            model.set_requires_all_reduce(micro is micros[-1])
            square_loss(call, my_part(micro)).backward()
            assert (model.scale.grad is None) == (micro is not micros[-1])
    alone = MLP()
    for micro in micros:
        square_loss(alone, micro).backward()
    assert_close(full_grads(model), full_grads(alone))
    local = model.blocks[0][0].weight.grad.to_local()
    other = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(other, local, group=mesh.get_group("replicate"))
    assert torch.equal(*other)
    for param in model.parameters():  # nothing is left over
        param.grad = None
    with counted() as of_one:
        assert_close(_grads(model, call, micros[0]), _alone(micros[0]))
    assert counts["all_reduce"] == of_one["all_reduce"]  # the sums went along


class Short(MLP):
    def forward(self, x, depth=2):
        x = x * self.scale
        for block in list(self.blocks)[:depth]:
            x = x + block(x)
        return x


@eager_and_full
@on_ranks(4)
def test_sums_over_the_shards_of_a_unit_that_the_last_micro_batch_does_not_use(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    (model, alone), micros = (Short(), Short()), list(batches(2, 8, 10))
    call = shard(model, mode, mesh=mesh)
    for micro, depth in zip(micros, (2, 1), strict=True):
        model.set_requires_all_reduce(depth == 1)
        square_loss(partial(call, depth=depth), my_part(micro)).backward()
        square_loss(partial(alone, depth=depth), micro).backward()
    assert_close(full_grads(model), full_grads(alone))


class Gather(AllGather):
    def __init__(self):
        self.sizes = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.sizes.append(input_tensor.numel())
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(ReduceScatter):
    def __init__(self):
        self.sizes = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.sizes.append(input_tensor.numel())
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)  # done at once: no work


@row("custom communication")
@eager_and_full
@on_ranks(2)
def test_the_users_own_collectives_and_hook(mode):
    data = batches(1, 8, 10)[0]
    model, gather, scatter, seen = MLP(), Gather(), Scatter(), []
    call = shard(model, mode, reshard_after_forward=True)

    def double(packed):
        seen.append(packed.numel())
        packed.mul_(2)

    model.blocks[0].set_custom_all_gather(gather)
    model.blocks[1].set_custom_reduce_scatter(scatter)
    model.blocks[1].set_all_reduce_hook(double)
    got = _grads(model, call, data)
    once, twice = _alone(data), _alone(data, 2.0)
    assert_close(got, {name: (twice if "blocks.1" in name else once)[name] for name in got})
    shards = [param.to_local().numel() for param in model.blocks[0].parameters()]
    sharded, packed = sum(shards), packed_layout(tuple(shards)).numel
    if mode == "eager":
        assert gather.sizes == [packed] * 2
        assert (scatter.sizes, seen) == ([2 * packed], [packed])
    else:  # backward gathers only what it reads: no biases
        assert sharded < sum(gather.sizes) < 2 * packed
        assert 2 * sharded <= sum(scatter.sizes) <= 2 * packed
        assert sharded <= sum(seen) <= packed


class _Stream(nullcontext):
    """A stream that logs, for want of one that a CPU has."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")


@row("custom communication")
@eager_and_full
@on_ranks(2)
def test_a_hook_on_a_stream_of_the_users(mode):
    data, log = batches(1, 8, 10)[0], []
    model = MLP(layers=1)
    call = shard(model, mode)
    model.blocks[0].set_all_reduce_hook(lambda row: log.append("hook"), stream=_Stream("hooks", log))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_stream", lambda device: _Stream("reduction", log))
        _grads(model, call, data)
    assert log[:4] == ["hooks waits for reduction", "on hooks", "hook", "reduction waits for hooks"]
    assert log == log[:4] * (len(log) // 4)


@row("custom communication")
@eager_and_full
@on_ranks(2)
def test_a_separate_group_for_reduce_scatters(mode):
    data = batches(1, 8, 10)[0]
    model = MLP()
    call = shard(model, mode)
    model.set_separate_reduce_scatter_group()
    groups = {param.spec.reduction.shards.name for block in model.blocks for param in block[0]._fsdp_params.values()}
    assert len(groups) == 1 and groups != {dist.group.WORLD.group_name}
    assert_close(_grads(model, call, data), _alone(data))
    model.set_separate_reduce_scatter_group(False)
    assert model.blocks[0][0]._fsdp_params["weight"].spec.reduction.shards.name == dist.group.WORLD.group_name
    assert_close(_grads(model, call, data), _alone(data))


@row("ignored and unused")
@eager_and_full
@on_ranks(2)
def test_unused_parameters_get_zeros_if_asked(mode):
    data = batches(1, 8, 10)[0]
    for asked in (False, True):
        model = MLP()
        for block in model.blocks:
            block.unused = torch.nn.Parameter(torch.ones(3))
        call = shard(model, mode)
        model.set_reduce_scatter_unused_params(asked)
        got = _grads(model, call, data)
        for name in ("blocks.0.unused", "blocks.1.unused"):
            grad = got.pop(name)
            assert torch.equal(grad, torch.zeros(3)) if asked else grad is None
        assert_close(got, _alone(data))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@on_ranks(4)
def test_parts_that_ranks_exchange(dtype):
    """Each rank sums what it received, rounded once; gloo's own reduce-scatter, an all-reduce, rounds more often."""
    torch.manual_seed(0)
    given, rank = (
        torch.randn(4, 4, 1000, dtype=torch.complex64 if dtype.is_complex else None).to(dtype),
        dist.get_rank(),
    )
    for op, reduce in ((dist.ReduceOp.SUM, torch.sum), (dist.ReduceOp.AVG, torch.mean)):
        output = torch.empty(1000, dtype=dtype)
        with patch.object(backend, "all_to_all", wraps=backend.all_to_all) as exchange:
            work = backend.reduce_scatter(output, given[rank].flatten(), dist.group.WORLD, op)
        work.wait()
        expected = reduce(given[:, rank].to(torch.complex128 if dtype.is_complex else torch.float64), 0)
        torch.testing.assert_close(output, expected.to(dtype), rtol=2**-8, atol=0.0)
        assert exchange.call_count == 1 and work.is_completed() and work.wait(timedelta(seconds=30))


@on_ranks(2)
def test_several_reductions_under_way():
    data = batches(1, 8, 10)[0]
    model = MLP(layers=4)
    call = shard(model, "eager")
    model.set_reduce_scatter_max_input_buffers(3)
    alone = MLP(layers=4)
    square_loss(alone, data).backward()
    assert_close(_grads(model, call, data), full_grads(alone))
    assert model._get_fsdp_state()._context.comm.max_reducing == 3


@row("accumulation")
@pytest.mark.parametrize("mode", ["full", "regions"])
@on_ranks(2)
def test_gradient_sync_has_a_graph_for_either_setting_and_evaluation_does_not_depend_on_it(mode):
    """An unsharded model has a graph for one size, one to evaluate and one for all sizes."""
    counts = {}
    for kind in ("unsharded", mode):
        torch._dynamo.reset()
        counters.clear()
        model = MLP()
        call = compiled(model) if kind == "unsharded" else shard(model, mode)
        for size in (8, 12, 16):
            for sync in (False, True):
                if kind != "unsharded":
                    model.set_requires_gradient_sync(sync)
                square_loss(call, batches(1, size, 10)[0]).backward()
                with torch.no_grad():
                    torch.testing.assert_close(call(batches(1, 20, 10)[0]), MLP()(batches(1, 20, 10)[0]))
        counts[kind] = counters["stats"]["unique_graphs"]
    assert counts["unsharded"] == 3 and counts[mode] == 4


@row("accumulation", mode="eager")
@on_ranks(2)
def test_a_backward_that_is_not_the_last():
    first, second = batches(2, 8, 10)
    model, alone = MLP(), MLP()
    call = shard(model, "eager")
    for micro in (first, second):
        model.set_is_last_backward(micro is second)
        square_loss(call, my_part(micro)).backward()
        square_loss(alone, micro).backward()
    assert_close(full_grads(model), full_grads(alone))


@row("methods", mode="eager")
@on_ranks(2)
def test_models_that_share_what_is_under_way():
    from fsdp_compiled import share_comm_ctx

    data = batches(1, 8, 10)[0]
    models = [MLP(), MLP()]
    for model in models:
        shard(model, "eager")
    share_comm_ctx(models)
    share_comm_ctx([])
    assert models[0]._get_fsdp_state()._context.comm is models[1]._get_fsdp_state()._context.comm
    for model in models:
        model.set_post_optim_event(torch.Event("cpu") if _has_cpu_events() else _Event())
        assert_close(_grads(model, model, data), _alone(data))
        assert model._get_fsdp_state()._context.post_optim_event is None


@on_ranks(2)
def test_an_exception_in_a_model_leaves_what_others_have_under_way():
    from fsdp_compiled import share_comm_ctx

    models, micros = [MLP(), MLP()], list(batches(2, 8, 10))
    for model in models:
        shard(model, "eager")
    share_comm_ctx(models)
    trained, failing = models
    for micro in micros:
        trained.set_is_last_backward(micro is micros[-1])
        square_loss(trained, my_part(micro)).backward()
        with pytest.raises(RuntimeError, match="must match"):
            failing(torch.ones(4, 9))
    alone = MLP()
    for micro in micros:
        square_loss(alone, micro).backward()
    assert_close(full_grads(trained), full_grads(alone))


@pytest.mark.parametrize("what", ["load", "convert"])
@on_ranks(2)
def test_a_state_that_is_loaded_while_gradients_are_being_reduced(what):
    first, second = batches(2, 8, 10)
    model, alone = MLP(), MLP()
    shard(model, "eager")
    for micro in (first, second):
        model.set_is_last_backward(micro is second)
        square_loss(model, my_part(micro)).backward()
        square_loss(alone, micro).backward()
        if micro is first:
            if what == "load":
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
            else:
                model.to(torch.float32)
    assert_close(full_grads(model), full_grads(alone))


@eager_and_full
@on_ranks(2)
def test_without_replicas_all_reduce_makes_no_difference(mode):
    model, data = MLP(), batches(1, 8, 10)[0]
    call = shard(model, mode)
    model.set_requires_all_reduce(False)
    assert_close(_grads(model, call, data), _alone(data))
    model.set_requires_all_reduce(True)
    model.zero_grad()
    model.synchronize_gradients()
    assert all(param.grad is None for param in model.parameters())
    assert_close(_grads(model, call, data), _alone(data))


class _Event:
    def wait(self):
        pass


def _has_cpu_events():
    try:
        torch.Event("cpu").wait()
    except RuntimeError:
        return False
    return True


@eager_and_full
@on_ranks(2)
def test_a_unit_whose_backward_reads_no_parameter(mode):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 4)

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    tokens = torch.arange(8) % 11
    alone, model = Net(), Net()
    alone(tokens).square().mean().backward()
    for unit in (model.embed, model.head, model):
        fully_shard(unit, reshard_after_forward=True)
    model.embed.set_unshard_in_backward(False)
    call = compiled(model) if mode == "full" else model
    call(my_part(tokens)).square().mean().backward()
    assert_close(full_grads(model), full_grads(alone))
    with pytest.raises(TypeError, match="unshard_in_backward: expected True or False"):
        model.set_unshard_in_backward(None)


@eager_and_full
@on_ranks(2)
def test_a_row_for_each_rank_whose_gradient_is_not_contiguous(mode):
    class Columns(torch.nn.Module):  # as PEFT's LoRA of an embedding
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rows = torch.nn.Parameter(torch.randn(2, 11))

        def forward(self, tokens):
            return torch.nn.functional.embedding(tokens, self.rows.T)

    tokens = torch.arange(8)
    alone, model = Columns(), fully_shard(Columns())
    alone(tokens).square().mean().backward()
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if mode == "full" else model
    call(my_part(tokens)).square().mean().backward()
    assert_close(full_grads(model), full_grads(alone))


@eager_and_full
@on_ranks(2)
def test_sparse_gradients_are_refused(mode):
    class Embeds(torch.nn.Sequential):
        blocks = ()

    model = Embeds(torch.nn.Embedding(6, 4, sparse=True), torch.nn.Linear(4, 4))
    call = shard(model, mode)
    with pytest.raises(
        NotImplementedError, match=r"0\.weight\.grad: expected a dense gradient, got torch.sparse_coo"
    ):
        call(torch.arange(6)).sum().backward()
