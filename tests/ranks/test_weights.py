"""Complete parameters and changed shards for others, such as an inference engine."""

from __future__ import annotations

import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from quantised_all_gather import gather_quantised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compiled import (
    CPUOffloadPolicy,
    RankMismatchError,
    fully_shard,
    stream_parameters,
    stream_shards,
    unsharded,
)
from fsdp_compiled.weights import complete
from fsdp_compiled.weights.shards import _weights
from tests.support.parity import row
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    Tied,
    batches,
    each_with_regions,
    eager_and_full,
    full_params,
    my_part,
    shard,
    square_loss,
    train,
)
from tests.support.until import until

SMALL = 500  # bytes of a bucket; the blocks of MLP() take about 1,300


def _assert_streamed(model, dtype=None, **kwargs):
    """All parameters come, equal to what DTensor gathers."""
    want = {name: param if dtype is None else param.to(dtype) for name, param in full_params(model).items()}
    got = dict(stream_parameters(model, dtype=dtype, **kwargs))
    assert list(got) == list(want)
    for name, tensor in got.items():
        assert type(tensor) is torch.Tensor and not tensor.requires_grad and tensor.is_contiguous()
        assert torch.equal(tensor, want[name]), name


@row("optimizers and evaluation")
@each_with_regions
@on_ranks(2)
def test_a_model_that_trains(mode):
    model, alone = MLP(), MLP()
    call = shard(model, mode)
    for data in batches(3, 1, 8, 10):
        train(model, call, data, square_loss)
        train(alone, alone, data, square_loss, sharded=False)
        for kwargs in ({}, {"bucket_bytes": SMALL}, {"bucket_bytes": 1}, {"dtype": torch.bfloat16}):
            _assert_streamed(model, **kwargs)
    for name, tensor in stream_parameters(torch.compile(model)):
        torch.testing.assert_close(tensor, dict(alone.named_parameters())[name].detach())


class Mixed(nn.Module):
    """Frozen, ignored, tied and complex parameters, odd dtypes, an empty one, and buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tied, self.norm = Tied(), nn.BatchNorm1d(10)
        self.ignored = nn.Parameter(torch.rand(3, 5))
        self.frozen = nn.Parameter(torch.rand(5, 3, dtype=torch.bfloat16), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)
        self.complex = nn.Parameter(torch.rand(3, 2, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.rand(0, 4))
        self.register_buffer("lost", torch.ones(2), persistent=False)


@on_ranks(2)
def test_each_tensor_comes_once_and_what_is_not_floating_point_is_not_cast():
    model, alone = Mixed(), Mixed()
    fully_shard(model.tied)
    fully_shard(model, ignored_params={model.ignored})
    for dtype in (None, torch.float64):
        got = dict(stream_parameters(model, dtype=dtype, bucket_bytes=SMALL))
        want = {name: value for name, value in alone.state_dict().items() if name != "tied.last.weight"}
        assert list(got) == list(want)
        for name, value in want.items():
            assert torch.equal(got[name], value.to(dtype) if dtype and value.is_floating_point() else value), name


@row("optimizers and evaluation", mode="eager")
@pytest.mark.parametrize("offload", [False, True])
@on_ranks(4)
def test_replicas_smaller_groups_and_shards_on_the_cpu(offload):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    model = MLP(hidden=9)
    shard(model, "eager", mesh=mesh, reshard_after_forward=True, **policy)
    _assert_streamed(model, bucket_bytes=SMALL)
    model = MLP(hidden=9)
    shard(model, "eager", reshard_after_forward=2, **policy)
    loss = square_loss(model, my_part(batches(1, 8, 10)[0]))
    _assert_streamed(model, bucket_bytes=SMALL)  # while shards over the smaller group are kept
    loss.backward()
    _assert_streamed(model, torch.bfloat16)


@row("optimizers and evaluation", mode="eager")
@on_ranks(4)
def test_on_top_of_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, alone = MLP(hidden=16), MLP(hidden=16)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    shard(model, "eager", mesh=mesh["dp"])
    got = dict(stream_parameters(model, bucket_bytes=SMALL))
    for name, param in alone.named_parameters():
        assert torch.equal(got[name], param.detach()), name


@on_ranks(2)
def test_an_all_gather_of_another_dtype_sends_the_parameters_own():
    model, alone = MLP(), MLP()
    for block in model.blocks:
        gather_quantised(block, torch.int8)
    shard(model, "eager")
    got = dict(stream_parameters(model))
    for name, param in alone.named_parameters():
        assert torch.equal(got[name], param.detach()), name


@on_ranks(2)
def test_two_buckets_have_memory_and_one_travels_ahead():
    model, made, launched = MLP(), [], []
    shard(model, "eager")
    launch = complete.launch_all_gather

    def watched(shards, bucket):
        pending = launch(shards, bucket)
        if bucket.spec.dtype == torch.float32:
            launched.append(bucket)
            finish = pending.finish

            def finished():
                tensors = finish()
                made.extend(weakref.ref(tensor) for tensor in tensors)
                return tensors

            pending.finish = finished
        return pending

    def nbytes_alive():
        return sum(tensor.nbytes for tensor in (ref() for ref in made) if tensor is not None)

    with mock.patch.object(complete, "launch_all_gather", watched):
        read = list[str]()
        for name, tensor in stream_parameters(model, bucket_bytes=SMALL):
            read.append(name)
            bucket = next(i for i, each in enumerate(launched) if name in [param.name for param in each.params])
            assert len(launched) <= bucket + 2
            # The next bucket's are made when it is waited for; gloo's threads let go late of what is waited for.
            assert until(lambda: nbytes_alive() <= max(sum(each.sizes) for each in launched))
            del tensor
        assert len(launched) > 4 and all(sum(each.sizes) <= 2 * SMALL for each in launched)


@on_ranks(2)
def test_tensors_come_where_they_are_asked_for():
    model = MLP()
    shard(model, "eager")
    for ranks, here in (([1], dist.get_rank() == 1), ((), False), (range(2), True)):
        assert len(list(stream_parameters(model, ranks=ranks))) == (13 if here else 0)
    _assert_streamed(model)


def _read(model, count, fails=False, pause_s=0.0):
    read = []
    for name, _ in stream_parameters(model, bucket_bytes=SMALL):
        read.append(name)
        time.sleep(pause_s)
        if len(read) == count:
            if fails:
                raise LookupError("the engine is gone")
            break
    return read


@row("optimizers and evaluation", mode="eager")
@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2, timeout_s=20)
def test_a_rank_that_stops_in_the_middle(fails):
    model, is_first = MLP(), dist.get_rank() == 0
    shard(model, "eager")
    if is_first and fails:
        with pytest.raises(LookupError):
            _read(model, 3, fails)
    elif is_first:
        _read(model, 3)
    else:
        with pytest.raises(
            RankMismatchError, match=r"expected all ranks to read on from .*, got ranks \[0\] stopped"
        ):
            _read(model, 13)
    _assert_streamed(model)
    train(model, model, batches(1, 8, 10), square_loss)


@on_ranks(2, timeout_s=20)
def test_ranks_that_stop_together_or_before_they_begin_or_at_the_end():
    model = MLP()
    shard(model, "eager")
    for count in (1, 3, 12, 13):
        assert len(_read(model, count)) == count
    stream = stream_parameters(model)
    del stream
    _read(model, 12 + dist.get_rank())  # what is left comes with the last bucket, which has travelled
    stream = stream_parameters(model, bucket_bytes=SMALL)
    if dist.get_rank():
        stream.close()
    else:
        with pytest.raises(RankMismatchError, match=r"got ranks \[1\] stopped"):
            list(stream)
    _assert_streamed(model)


@on_ranks(2, timeout_s=20)
def test_a_slow_rank_is_waited_for():
    model = MLP()
    shard(model, "eager")
    start = time.monotonic()
    _read(model, 13, pause_s=0.05 * dist.get_rank())
    assert time.monotonic() - start > 0.3


@on_ranks(4, timeout_s=20)
def test_a_rank_that_stops_is_known_on_all_meshes():
    """Experts are sharded over pairs of ranks: rank 3 shares no group of theirs with rank 0."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))["dp"]
    model = MLP(layers=4)
    for block in model.blocks[1::2]:
        fully_shard(block, mesh=pairs)
    fully_shard(model)
    _assert_streamed(model, bucket_bytes=SMALL)
    if dist.get_rank() == 0:
        _read(model, 2)
    else:
        with pytest.raises(RankMismatchError, match="stopped before it"):
            _read(model, 25)
    _assert_streamed(model)


@on_ranks(4, timeout_s=20)
def test_a_rank_that_stops_is_known_over_tensor_parallel_ranks_too():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = MLP(hidden=16, layers=4)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    shard(model, "eager", mesh=mesh["dp"])
    model.alone = nn.Parameter(distribute_tensor(torch.rand(4, 3), mesh["tp"], [Shard(0)]), requires_grad=False)
    for stops in (0, 3):
        if dist.get_rank() == stops:
            _read(model, 2)
        else:
            with pytest.raises(RankMismatchError, match="stopped before it"):
                _read(model, 26)
    assert len(dict(stream_parameters(model))) == 26


@on_ranks(2, timeout_s=10)
def test_ranks_that_stream_different_tensors():
    model = MLP()
    shard(model, "eager")
    with pytest.raises(
        RankMismatchError, match="sent as bfloat16.*sent as float32|sent as float32.*sent as bfloat16"
    ):
        list(stream_parameters(model, dtype=torch.bfloat16 if dist.get_rank() else None))


@on_ranks(2)
def test_within_unsharded():
    model = MLP()
    shard(model, "eager")
    want = full_params(model)
    with unsharded(model):
        for name, tensor in stream_parameters(model):
            assert torch.equal(tensor, want[name])
        shards = list(stream_shards(model))
    assert [each.name for each in shards] == list(want)
    for name, tensor, part, shape in shards:
        assert torch.equal(tensor, want[name][part]) and shape == want[name].shape


@row("optimizers and evaluation")
@eager_and_full
@on_ranks(2)
def test_shards_that_changed(mode):
    model, engine = MLP(), MLP()
    call = shard(model, mode)
    model.blocks[0][0].weight.requires_grad = False
    own, since = dict(engine.named_parameters()), {}
    every = [each.name for each in stream_shards(model)]
    assert [each.name for each in stream_shards(model, since=since)] == every
    assert not list(stream_shards(model, since=since))
    for batch in batches(3, 8, 10):
        train(model, call, batch[None], square_loss)
        changed = list(stream_shards(model, since=since))
        assert [each.name for each in changed] == [name for name in every if name != "blocks.0.0.weight"]
        for name, tensor, part, shape in changed:
            assert own[name].shape == shape
            own[name].data[part] = tensor
    for shard_of in stream_shards(model):
        assert torch.equal(shard_of.tensor, own[shard_of.name][shard_of.part])
    shards = iter(stream_shards(model, since=(since := {})))
    for _ in range(3):
        next(shards)
    shards.close()
    assert [each.name for each in stream_shards(model, since=since)] == every[2:]  # the third was not done with


def test_what_hashes_multiply_by_is_drawn_on_the_host_whatever_the_default_device():
    found = []
    for default in ("cpu", "meta"):
        _weights.cache_clear()
        with torch.device(default):
            found.append(_weights(torch.device("cpu")))
    assert torch.equal(*found)


@on_ranks(1)
def test_a_change_that_the_dtype_rounds_away_is_none():
    model, since = Mixed(), {}
    fully_shard(model)
    names = [each.name for each in stream_shards(model, since=since, dtype=torch.bfloat16)]
    assert "empty" not in names and "tied.last.weight" not in names and "norm.running_mean" in names
    with torch.no_grad():
        model.tied.first.bias.mul_(1 + 2**-20)
        model.complex.mul_(-1)
        model.counts.add_(2**40)
        model.ignored.to_local()[0, 0] += 1
        model.norm.running_mean[3] += 1
    changed = [each.name for each in stream_shards(model, since=since, dtype=torch.bfloat16)]
    assert changed == [name for name in names if name in ("ignored", "counts", "complex", "norm.running_mean")]


@on_ranks(2)
def test_arguments_that_are_wrong():
    model = MLP()
    with pytest.raises(ValueError, match="MLP: expected a sharded model, got one without any unit"):
        stream_parameters(model)
    shard(model, "eager")
    for kwargs, error, text in (
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes: expected a positive number, got 0"),
        ({"bucket_bytes": 1.5}, TypeError, "bucket_bytes: expected an integer"),
        ({"dtype": torch.int8}, ValueError, "dtype: expected a floating-point dtype or None"),
        ({"dtype": "bf16"}, TypeError, "dtype: expected a floating-point dtype or None"),
        ({"ranks": 0}, TypeError, "ranks: expected a collection of ranks or None"),
        ({"ranks": [2]}, ValueError, "ranks: expected ranks from 0 to 1, got 2"),
        ({"merge_adapters": 1}, TypeError, "merge_adapters: expected True or False"),
        ({"merge_adapters": True}, ValueError, "merge_adapters: expected a model with adapters of PEFT, got MLP"),
    ):
        with pytest.raises(error, match=text):
            stream_parameters(model, **kwargs)
    with pytest.raises(TypeError, match="since: expected a dict or None"):
        stream_shards(model, since=3)
    with pytest.raises(TypeError, match="model: expected an nn.Module"):
        stream_shards([model])
    model = MLP()
    gather_quantised(model, torch.int8)
    shard(model, "eager")
    with pytest.raises(
        NotImplementedError, match="blocks.0.0.weight: expected plain shards, got a QuantisedGathered"
    ):
        stream_shards(model)
