"""The two operators by themselves: schema, fake, autograd."""

from __future__ import annotations

import sys

import pytest
import torch
from fsdp_compiled.passes.route import Route
from torch.library import opcheck

from fsdp_compiled.collectives import copies, reduce_grad, unshard
from tests.ranks import on_ranks


def _route(shape, world, group, dim=0, dtype=torch.float32, reduce_dtype=torch.float32):
    return Route(shape, dim, dtype, reduce_dtype, torch.float32, True, "unit", "weight", group, world, "", 1).encode()


@pytest.mark.parametrize("shape", [(6,), (4, 3)])
def test_opcheck(shape):
    route = _route(shape, 1, "")
    shard = torch.randn(shape, requires_grad=True)
    opcheck(torch.ops.fsdp_compiled.unshard.default, (shard, None, route))
    sink = torch.randn(shape, requires_grad=True)
    opcheck(torch.ops.fsdp_compiled.unshard.default, (shard, sink, route))
    opcheck(torch.ops.fsdp_compiled.reduce_grad.default, (torch.randn(shape), route))


def test_fake_shapes_and_dtypes():
    with torch._subclasses.FakeTensorMode():
        whole = unshard(torch.empty(2, 5), None, _route((7, 5), 4, "0", dtype=torch.bfloat16))
        part = reduce_grad(torch.empty(7, 5, dtype=torch.bfloat16), _route((7, 5), 4, "0"))
    assert (whole.shape, whole.dtype) == ((7, 5), torch.bfloat16)
    assert (part.shape, part.dtype) == ((2, 5), torch.float32)


@on_ranks(2)
def test_gather_and_its_gradient_over_2_ranks():
    rank = torch.distributed.get_rank()
    whole = torch.arange(15.0).view(5, 3)
    padded = torch.cat([whole, torch.zeros(1, 3)]).chunk(2)[rank].requires_grad_()
    route = _route((5, 3), 2, torch.distributed.group.WORLD.group_name)
    gathered = unshard(padded, None, route)
    torch.testing.assert_close(gathered, whole)
    (gathered * (rank + 1)).sum().backward()
    mine = [torch.full((3, 3), 1.5), torch.tensor([[1.5] * 3] * 2 + [[0.0] * 3])][rank]
    torch.testing.assert_close(padded.grad, mine)


@on_ranks(2)
def test_a_sink_takes_the_unsharded_gradient():
    route = _route((4,), 2, torch.distributed.group.WORLD.group_name)
    shard = torch.ones(2, requires_grad=True)
    sink = torch.zeros(1).expand(4).requires_grad_()
    unshard(shard, sink, route).sum().backward()
    assert shard.grad is None
    torch.testing.assert_close(sink.grad, torch.ones(4))


def test_a_shard_on_the_meta_device():
    with pytest.raises(RuntimeError, match="weight: expected a parameter with storage, got one on the meta device"):
        unshard(torch.empty(4, device="meta"), None, _route((4,), 1, ""))


def test_opcheck_of_copies():
    shards, grads = [torch.randn(3), torch.randn(2, 2)], [torch.randn(5, 2), torch.randn(2, 4)]
    ops = torch.ops.fsdp_compiled
    opcheck(ops.copy_in_shards.default, (shards, torch.empty(7, dtype=torch.bfloat16)))
    opcheck(ops.copy_out_gathered.default, (torch.randn(2, 7), [torch.empty(6), torch.empty(2, 4)], [0, 1]))
    opcheck(ops.copy_in_gradients.default, (grads, [0, 1], 2, torch.bfloat16, 2.0))
    opcheck(ops.copy_out_reduced.default, (torch.randn(7), shards, 2.0, True))


def test_opcheck_of_a_gather_beside_compute():
    shards = [torch.randn(16), torch.randn(4, 8)]  # nothing between them, where memory would be arbitrary
    routes = [_route((16,), 1, ""), _route((4, 8), 1, "")]
    opcheck(torch.ops.fsdp_compiled.launch_gather.default, (shards, routes, False, True))


def test_opcheck_of_the_way_to_the_host():
    opcheck(torch.ops.fsdp_compiled.send_to_host.default, (torch.randn(1, 7),))


def test_what_a_gpu_without_triton_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsdp_compiled.collectives.kernels", None)
    with pytest.raises(
        ImportError, match="copies parameters on a GPU by Triton kernels, and triton is not installed; "
    ):
        copies._for(torch.device("cuda"))
