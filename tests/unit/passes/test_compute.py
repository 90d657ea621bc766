"""Estimated times of compute with the sizes that it has, by hand."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._prims import rng_prims
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.flop_counter import flop_registry

from fsdp_compiled.passes.cost import Cluster, Link
from fsdp_compiled.passes.cost.compute import is_attention, is_backward, node_us, tensors_of
from tests.support.builder import Builder

LINK = Link(1.0, 1.0, 1e9)
TOY = Cluster("toy", 2e12, 1e12, 1e12, 3.0, LINK, LINK)


def test_compute_is_the_longer_of_flops_and_traffic():
    b = Builder()
    x, y = b.input("x", 1000, 1000), b.input("y", 1000, 1000)
    product = b.call(torch.ops.aten.mm.default, x, y)
    assert node_us(product, TOY) == pytest.approx(2e9 / 1e12 / 0.7 * 1e6)
    small = b.call(torch.ops.aten.mm.default, b.input("a", 2, 2), b.input("c", 2, 2))
    assert node_us(small, TOY) == 3.0  # no product is faster than a kernel
    total = b.call(torch.ops.aten.add.Tensor, x, y)
    assert node_us(total, TOY) == pytest.approx(4e6 / 1e12 / 0.7 * 1e6)
    assert node_us(b.call(torch.ops.aten.t.default, x), TOY) == 0.0
    half = b.call(torch.ops.aten.mm.default, *(b.input(n, 1000, 1000, dtype=torch.bfloat16) for n in "pq"))
    assert node_us(half, TOY) == pytest.approx(2e9 / 2e12 / 0.7 * 1e6)


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
def test_attention_of_fewer_keys_than_queries(name):
    """A GPU takes grouped queries as they are; torch 2.11 counts them only where heads are equal."""
    b = Builder()
    long, bias = (1, 8, 64, 64), {"efficient": (None, True), "cudnn": (None, True)}.get(name, ())
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default

    def us(heads):
        q, k, v = (
            b.input(f"{x}{heads}", *long[:1], h, *long[2:], device="cuda")
            for x, h in (("q", 8), ("k", heads), ("v", heads))
        )
        node = b.graph.call_function(forward, (q, k, v, *bias))
        node.meta["val"] = (q.meta["val"],)
        return node_us(node, replace(TOY, kernel_us=0.0, memory_bytes_per_s=1e20))

    assert us(2) == us(8) == pytest.approx(4 * 8 * 64**3 / 1e12 / 0.7 * 1e6)


@pytest.mark.skipif(flex_attention not in flop_registry, reason="this torch has no formula for flex attention")
@pytest.mark.parametrize("heads", [2, 8])
def test_flex_attention_counts_in_full(heads):
    """How much its mask leaves out is not known. What its functions capture has no heads."""
    b, free = Builder(), replace(TOY, kernel_us=0.0, memory_bytes_per_s=1e20)
    q, k, v = (b.input(n, 1, h, 64, 64) for n, h in (("q", 8), ("k", heads), ("v", heads)))
    sums, captured = b.input("sums", 1, 8, 64), b.input("captured", 8, 64, 64)
    node = b.graph.call_function(flex_attention, (q, k, v, None, (64, 64, captured), 1.0, {}, (captured,), ()))
    node.meta["val"] = (q.meta["val"], sums.meta["val"])
    args = (q, k, v, q, sums, q, None, None, None, (64, 64, captured), 1.0, {}, (captured,), ())
    back = b.graph.call_function(flex_attention_backward, args)
    back.meta["val"] = (q.meta["val"], k.meta["val"], v.meta["val"], (captured.meta["val"],))
    whole = 4 * 8 * 64**3 / 1e12 / 0.7 * 1e6
    assert (node_us(node, free), node_us(back, free)) == pytest.approx((whole, 2.5 * whole))


@pytest.mark.parametrize("name", ["_for_cpu", ""])
def test_causal_attention_computes_half(name):
    b, free = Builder(), replace(TOY, kernel_us=0.0, memory_bytes_per_s=1e20)
    q, k, v = (b.input(n, 1, 8, 64, 64) for n in "qkv")
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{name}")
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{name}_backward")

    def us(is_causal):
        node = b.graph.call_function(forward.default, (q, k, v, 0.0, is_causal))
        node.meta["val"] = (q.meta["val"],)
        sums, more = b.input("sums", 1, 8, 64), () if name else (None, None, 64, 64)
        args = (q, q, k, v, q, sums, *more, 0.0, is_causal, *(() if name else (None, None)))
        back = b.graph.call_function(backward.default, args)
        back.meta["val"] = (q.meta["val"],) * 3
        return node_us(node, free), node_us(back, free)

    whole = 4 * 8 * 64**3 / 1e12 / 0.7 * 1e6
    assert us(False) == pytest.approx((whole, 2.5 * whole))
    assert us(True) == pytest.approx((whole / 2, 2.5 * whole / 2))


@pytest.mark.parametrize("length", [512, 520])
def test_attention_of_sequences_in_one_tensor(length):
    """Its formula reads lengths and numbers; documents count as long as the longest one, and half where causal."""
    b = Builder()
    q, k, v = (b.input(n, 4 * length, heads, 64, device="cuda") for n, heads in (("q", 18), ("k", 6), ("v", 6)))
    ends = b.input("ends", 4, dtype=torch.int32, device="cuda")
    forward = torch.ops.aten._flash_attention_forward.default
    node = b.graph.call_function(forward, (q, k, v, ends, ends, length, length, 0.0, True, False))
    node.meta["val"] = (q.meta["val"],)
    us = node_us(node, replace(TOY, kernel_us=0.0, memory_bytes_per_s=1e20))
    assert us == pytest.approx(3 * 4 * 18 * length * length * 64 / 2 / 1e12 / 0.7 * 1e6)


@pytest.mark.parametrize("length", [7, 520])
def test_a_size_that_varies_counts_as_traced_and_gets_no_guard(length):
    shapes = ShapeEnv()
    varies = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    b = Builder()
    b.mode = FakeTensorMode(shape_env=shapes)
    rows = b.input("x", 1, 1)
    rows.meta["val"] = b.mode.from_tensor(torch.empty(length, 4), symbolic_context=varies)
    double = b.call(torch.ops.aten.mul.Tensor, rows, 2)
    product = b.call(torch.ops.aten.mm.default, double, b.input("w", 4, 4))
    before = len(shapes.guards)
    free = replace(TOY, kernel_us=0.0)
    assert node_us(double, free) == pytest.approx(1e6 * length * 4 * 4 / (0.7 * 1e12))
    assert node_us(product, replace(free, memory_bytes_per_s=1e20)) == pytest.approx(
        1e6 * 2 * length * 4 * 4 / (0.7 * 1e12)
    )
    assert len(shapes.guards) == before


@pytest.mark.parametrize("saves", [True, False], ids=["forward", "recomputed"])
def test_attention_that_checkpointing_gives_a_random_state(saves):
    """The partitioner notes no value on what saves the state, but on those that take results out of it."""
    b, free = Builder(), replace(TOY, kernel_us=0.0, memory_bytes_per_s=1e20)
    q, k, v = (b.input(n, 1, 8, 64, 64) for n in "qkv")
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, True
    alone = b.graph.call_function(call[0], call[1:])
    alone.meta["val"] = (q.meta["val"], b.input("sums", 1, 8, 64).meta["val"])
    if saves:
        node = b.graph.call_function(rng_prims.run_and_save_rng_state, call)
        results = b.graph.call_function(operator.getitem, (node, 1))
    else:
        node = results = b.graph.call_function(rng_prims.run_with_rng_state, (b.input("state", 16), *call))
    b.graph.call_function(operator.getitem, (results, 0)).meta["val"] = q.meta["val"]
    assert is_attention(node) and not is_backward(node)
    assert node_us(node, free) == node_us(alone, free)
    assert [each.shape for each in tensors_of(node)] == [q.meta["val"].shape]
