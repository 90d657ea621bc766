"""The operators by themselves: schema, fake, autograd, launch and wait."""

from __future__ import annotations

import sys
from math import prod
from unittest import mock

import pytest
import torch
from torch.library import opcheck

from fsdp_compiled import collectives
from fsdp_compiled.collectives import copies, reduce_grad, reference, unshard
from fsdp_compiled.collectives.earlier import tell_sums
from fsdp_compiled.errors import FSDPError
from fsdp_compiled.sharding.layout import ShardLayout, packed_layout
from fsdp_compiled.sharding.spec import (
    AllGatherBucket,
    AllGatherSpec,
    CommSpec,
    Group,
    ParamSpec,
    ReductionBucket,
    ReductionSpec,
)
from tests.support.ranks import on_ranks


def _spec(shape, world, group, dim=0, dtype=torch.float32, reduce_dtype=torch.float32):
    ranks = Group(group, world)
    return CommSpec(
        ParamSpec("weight", "unit", shape, dim, torch.float32),
        AllGatherSpec(ranks, dtype),
        ReductionSpec(reduce_dtype, ranks),
    ).encode()


def test_a_spec_survives_its_text():
    spec = CommSpec.decode(_spec((4, 3), 2, "g", dtype=torch.bfloat16))
    assert CommSpec.decode(spec.encode()) == spec
    assert (spec.param.shape, spec.all_gather.dtype, spec.reduction.shards) == ((4, 3), torch.bfloat16, Group("g", 2))
    for_input = CommSpec.decode(_spec(None, 2, "g")).for_input((3, 5), torch.uint8)
    assert (for_input.param.shape, for_input.param.dtype, for_input.all_gather.dtype) == (
        (6, 5),
        *(2 * [torch.uint8]),
    )
    bucket = ReductionBucket(spec.reduction, (spec.param,))
    assert ReductionBucket.decode(bucket.encode()) == bucket


class Sums:
    """Takes what is kept for a parameter."""

    name = "weight"

    def keep(self, grad):
        self.kept = grad.clone()


@pytest.mark.parametrize("shape", [(6,), (4, 3)])
def test_opcheck(shape):
    spec = _spec(shape, 1, "")
    shard = torch.randn(shape, requires_grad=True)
    opcheck(torch.ops.fsdp_compiled.unshard.default, (shard, None, None, spec))
    leaf = torch.randn(shape, requires_grad=True)
    opcheck(torch.ops.fsdp_compiled.unshard.default, (shard, None, leaf, spec))
    of_one, sums = torch.zeros(1, requires_grad=True), Sums()
    tell_sums(of_one, sums)
    without_copies = ("test_schema", "test_autograd_registration", "test_faketensor")  # which have no sums
    opcheck(torch.ops.fsdp_compiled.unshard.default, (shard, of_one, None, spec), test_utils=without_copies)
    opcheck(torch.ops.fsdp_compiled.reduce_grad.default, (torch.randn(shape), spec))


def test_fake_shapes_and_dtypes():
    with torch._subclasses.FakeTensorMode():
        whole = unshard(torch.empty(2, 5), None, None, _spec((7, 5), 4, "0", dtype=torch.bfloat16))
        part = reduce_grad(torch.empty(7, 5, dtype=torch.bfloat16), _spec((7, 5), 4, "0"))
    assert (whole.shape, whole.dtype) == ((7, 5), torch.bfloat16)
    assert (part.shape, part.dtype) == ((2, 5), torch.float32)


@on_ranks(2)
def test_an_all_gather_and_its_gradient_over_2_ranks():
    rank = torch.distributed.get_rank()
    whole = torch.arange(15.0).view(5, 3)
    padded = torch.cat([whole, torch.zeros(1, 3)]).chunk(2)[rank].requires_grad_()
    spec = _spec((5, 3), 2, torch.distributed.group.WORLD.group_name)
    gathered = unshard(padded, None, None, spec)
    torch.testing.assert_close(gathered, whole)
    (gathered * (rank + 1)).sum().backward()
    mine = [torch.full((3, 3), 1.5), torch.tensor([[1.5] * 3] * 2 + [[0.0] * 3])][rank]
    torch.testing.assert_close(padded.grad, mine)


@pytest.mark.parametrize("shape", [(6, 2), (6, 4), (3, 2, 5), (2, 3)])
def test_an_unpacked_parameter_is_contiguous_whatever_dimension_is_sharded(shape):
    want = torch.arange(float(prod(shape))).view(shape)
    layouts = [ShardLayout(shape, dim, 2) for dim in range(len(shape)) if shape[dim] % 2 == 0]
    shards = [[want.chunk(2, layout.dim)[rank].contiguous() for layout in layouts] for rank in range(2)]
    packed = torch.empty(2, packed_layout(tuple(layout.shard_numel for layout in layouts)).numel)
    for rank in range(2):
        copies.pack(shards[rank], packed[rank])
    for got in reference.unpacked_parameters(packed, layouts):
        assert got.stride() == want.stride() and got.equal(want)


@on_ranks(2)
def test_a_leaf_takes_the_unsharded_gradient():
    spec = _spec((4,), 2, torch.distributed.group.WORLD.group_name)
    shard = torch.ones(2, requires_grad=True)
    leaf, sums = torch.zeros(1, requires_grad=True), Sums()
    tell_sums(leaf, sums)
    unshard(shard, leaf, None, spec).sum().backward()
    assert shard.grad is None and leaf.grad.shape == (1,)
    torch.testing.assert_close(sums.kept, torch.ones(4))


def test_a_leaf_whose_sums_are_unknown():
    shard, leaf = torch.ones(4, requires_grad=True), torch.zeros(1, requires_grad=True)
    with pytest.raises(FSDPError, match="weight: it is unknown where its gradients are summed up"):
        unshard(shard, leaf, None, _spec((4,), 1, "")).sum().backward()


def test_a_shard_on_the_meta_device():
    with pytest.raises(RuntimeError, match="weight: expected a parameter with storage, got one on the meta device"):
        unshard(torch.empty(4, device="meta"), None, None, _spec((4,), 1, ""))


PARAMS = (
    ParamSpec("w", "u", (5, 3), 0, torch.float32),
    ParamSpec("v", "u", (4, 2), 1, torch.bfloat16),
)


def _whole_then_half(rank):
    full = [torch.arange(15.0).view(5, 3), torch.arange(8.0).view(4, 2).to(torch.bfloat16)]
    return full, [torch.cat([full[0], torch.zeros(1, 3)]).chunk(2)[rank], full[1].chunk(2, 1)[rank]]


@on_ranks(2)
def test_a_launch_and_a_wait_of_an_all_gather():
    group, rank = torch.distributed.group.WORLD.group_name, torch.distributed.get_rank()
    ops, (full, shards) = torch.ops.fsdp_compiled, _whole_then_half(rank)
    for persist in (True, False):
        bucket = AllGatherBucket(AllGatherSpec(Group(group, 2), torch.float64), PARAMS, inputs_persist=persist)
        handle = ops.launch_all_gather(shards, bucket.encode())
        assert handle.shape == (1,)
        got = ops.wait_all_gather(handle, bucket.encode())
        assert all(torch.equal(a, b.double()) for a, b in zip(got, full, strict=True))
        assert all(each.data_ptr() % 16 == 0 for each in got)
        with pytest.raises(FSDPError, match="waited for that no launch started, or twice"):
            ops.wait_all_gather(handle, bucket.encode())
        opcheck(ops.launch_all_gather.default, (shards, bucket.encode()), test_utils=("test_schema",))


@on_ranks(2)
def test_a_launch_and_a_wait_of_a_reduction():
    group, rank = torch.distributed.group.WORLD.group_name, torch.distributed.get_rank()
    ops, (full, shards) = torch.ops.fsdp_compiled, _whole_then_half(rank)
    bucket = ReductionBucket(ReductionSpec(torch.float32, Group(group, 2)), PARAMS)
    handle = ops.launch_reduce_scatter([grad * (1 + 2 * rank) for grad in full], bucket.encode())
    got = ops.wait_reduce_scatter(handle, bucket.encode())
    assert all(torch.equal(a, 2 * b) for a, b in zip(got, shards, strict=True))
    assert all(each.data_ptr() % 16 == 0 for each in got)
    replicas = ReductionBucket(ReductionSpec(torch.float32, Group(), Group(group, 2), to_host=True), PARAMS[:1])
    handle = ops.launch_all_reduce([full[0] * (1 + 2 * rank)], replicas.encode())
    (handle,) = ops.wait_all_reduce(handle, replicas.encode())
    (got,) = ops.wait_copy_to_host(ops.launch_copy_to_host([handle], replicas.encode()), replicas.encode())
    assert torch.equal(got, 2 * full[0])


def test_fakes_of_launches_and_waits():
    ranks, ops = Group("g", 2), torch.ops.fsdp_compiled
    gathered = AllGatherBucket(AllGatherSpec(ranks, torch.float16), PARAMS).encode()
    reduced = ReductionBucket(ReductionSpec(torch.float16, ranks, Group("r", 3), to_host=True), PARAMS).encode()
    with torch._subclasses.FakeTensorMode():
        unsharded = ops.wait_all_gather(ops.launch_all_gather([torch.empty(3, 3)], gathered), gathered)
        handle = ops.launch_reduce_scatter([torch.empty(5, 3, device="cuda")], reduced)
        (handle,) = ops.wait_reduce_scatter(handle, reduced)
        (handle,) = ops.wait_all_reduce(ops.launch_all_reduce([handle], reduced), reduced)
        grads = ops.wait_copy_to_host(ops.launch_copy_to_host([handle], reduced), reduced)
    assert [(each.shape, each.dtype) for each in unsharded] == [((5, 3), torch.float16), ((4, 2), torch.float16)]
    assert handle.device.type == "cuda"
    assert [(each.shape, each.dtype) for each in grads] == [((3, 3), torch.float32), ((4, 1), torch.bfloat16)]
    assert all(each.device.type == "cpu" for each in grads)


def test_what_a_gpu_without_triton_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsdp_compiled.collectives.kernels", None)
    monkeypatch.delattr(collectives, "kernels", raising=False)  # where it is looked up first
    copies._module.cache_clear()
    with pytest.raises(
        ImportError, match="copies parameters on a GPU by Triton kernels, and triton is not installed; "
    ):
        copies._for(mock.Mock(device=torch.device("cuda"), is_complex=lambda: False))
