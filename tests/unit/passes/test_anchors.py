"""What schedules are decided from: positions and times that no size of a rank's inputs enters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from fsdp_compiled.passes import Cluster, Link
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.passes.graph.anchors import SEQUENCE, AnchoredCompute, mark_parameters
from tests.support.builder import Builder, spec

aten = torch.ops.aten
LINK = Link(1.0, 1.0, 1e9)
TOY = Cluster("toy", 2e12, 1e12, 1e15, 1e-9, LINK, LINK)


def _anchored(graph: fx.Graph, tokens: int = 100) -> AnchoredCompute:
    return AnchoredCompute(graph, nodes.is_communication, tokens)


def _us(flops: float) -> float:
    return flops / 1e12 / 0.7 * 1e6


def _layer(length: int, extra: bool = False) -> tuple[Builder, dict[str, fx.Node]]:
    """A normalised product and its gradient; ``extra`` compute is what only some ranks have."""
    b = Builder()
    s1, s2 = b.input("primals_1", 4), b.input("primals_2", 4, 32)
    x, grad = b.input("primals_3", length, 16), b.input("tangents_1", length, 32)
    w1, w2 = b.unshard(s1, spec((16,), "norm")), b.unshard(s2, spec((16, 32), "up"))
    if extra:
        x = b.call(aten.sin.default, b.call(aten.cos.default, x))
    scaled = b.call(aten.mul.Tensor, x, w1)
    up = b.call(aten.mm.default, scaled, w2)
    gelu = b.call(aten.relu.default, up)
    if extra:
        gelu = b.call(aten.neg.default, gelu)
    made = b.call(aten.mm.default, b.call(aten.t.default, scaled), grad)
    reduced = b.reduce_grad(made, spec((16, 32), "up"))
    b.finish(gelu, reduced)
    return b, {"norm": w1, "up": w2, "scaled": scaled, "product": up, "made": made}


def test_anchors_read_a_parameter_or_make_its_gradient():
    b, named = _layer(7)
    compute = _anchored(b.graph)
    assert [compute.position[named[name]] for name in ("scaled", "product", "made")] == [1, 3, 5]
    assert compute.end == 7
    assert compute.reads(named["norm"]) == (1, 1)
    assert compute.reads(named["up"]) == (3, 3)
    assert compute.after(named["made"]) == 6
    elementwise, product = 2 * 100 * 16 * 4 / 0.7 / 1e15 * 1e6, _us(2 * 16 * 32 * 100)
    assert compute.time(TOY) == pytest.approx((0, elementwise, 0, product, 0, product, 0), rel=1e-6)


@pytest.mark.parametrize("length, extra", [(8, False), (4096, False), (32, False), (7, True), (16, True)])
def test_no_size_and_no_compute_between_anchors_changes_a_position_or_a_time(length, extra):
    """16 and 32 are dimensions of the parameters, too."""
    (b, named), (other, others) = _layer(7), _layer(length, extra)
    one, two = _anchored(b.graph), _anchored(other.graph)
    assert one.time(TOY) == two.time(TOY)
    assert [one.position[named[name]] for name in ("scaled", "made")] == [
        two.position[others[name]] for name in ("scaled", "made")
    ]
    assert one.reads(named["up"]) == two.reads(others["up"])


def test_tokens_scale_products():
    b, named = _layer(7)
    at = _anchored(b.graph).position[named["product"]]
    few, many = (_anchored(b.graph, tokens).time(TOY)[at] for tokens in (100, 400))
    assert many == pytest.approx(4 * few)


def test_what_parameters_alone_give_belongs_to_what_reads_it():
    b = Builder()
    x = b.input("primals_2", 5, 16)
    weight = b.unshard(b.input("primals_1", 8, 16), spec((32, 16), "up"))
    early = b.call(aten.t.default, b.call(aten.mul.Tensor, weight, 2.0))
    between = b.call(aten.sin.default, x)
    product = b.call(aten.mm.default, between, early)
    b.finish(product)
    compute = _anchored(b.graph)
    assert early not in compute.position
    assert compute.reads(weight) == (1, 1)
    assert compute.after(early) == compute.end == 3


def test_what_forward_keeps_stays_a_parameter_in_backward():
    b = Builder()
    weight = b.unshard(b.input("primals_1", 8, 16), spec((32, 16), "up"))
    b.finish(b.call(aten.mul.Tensor, weight, 2.0))
    mark_parameters(b.graph)
    backward = Builder()
    kept, grad = backward.input("unshard", 32, 16), backward.input("tangents_1", 5, 32)
    kept.meta |= {key: value for key, value in weight.meta.items() if key != "val"}
    backward.finish(backward.call(aten.mm.default, grad, kept))
    assert _anchored(backward.graph).time(TOY) == pytest.approx((0, _us(2 * 32 * 16 * 100), 0))


@pytest.mark.parametrize("tokens", [100, 3 * SEQUENCE])
@pytest.mark.parametrize("batch, length", [(2, 64), (1, 9)])
def test_attention_is_quadratic_in_a_nominal_sequence(batch, length, tokens):
    b = Builder()
    shape = (batch, 8, length, 64)
    q, k, v = (b.input(name, *shape, device="cuda") for name in "qkv")
    node = b.graph.call_function(aten._scaled_dot_product_flash_attention.default, (q, k, v))
    node.meta["val"] = (q.meta["val"],)
    b.finish(node)
    (_, us, _) = _anchored(b.graph, tokens).time(TOY)
    assert us == pytest.approx(_us(4 * tokens * min(tokens, SEQUENCE) * 8 * 64))


def test_no_product_is_faster_than_a_kernel():
    b, _ = _layer(7)
    assert sorted(_anchored(b.graph).time(replace(TOY, kernel_us=9.0)))[-2:] == [9.0, 9.0]


def _linear(out: int) -> tuple[AnchoredCompute, fx.Node, fx.Node]:
    """A map with a bias, the bias, and the product that reads both."""
    b = Builder()
    x = b.input("primals_3", 8, 24)
    weight = b.unshard(b.input("primals_1", -(-out // 4), 24), spec((out, 24), "weight"))
    bias = b.unshard(b.input("primals_2", -(-out // 4)), spec((out,), "bias"))
    product = b.call(aten.addmm.default, bias, x, b.call(aten.t.default, weight))
    b.finish(b.call(aten.tanh.default, product))
    return _anchored(b.graph), bias, product


@pytest.mark.parametrize("out", [12, 1])
def test_a_bias_belongs_to_its_product(out):
    compute, bias, product = _linear(out)
    assert compute.reads(bias) == (1, 1)
    assert compute.after(product) == 2


def test_a_vector_is_no_matrix_even_in_a_product():
    compute, _, _ = _linear(1)
    elementwise = 2 * 100 * 24 * 4 / 0.7 / 1e15 * 1e6
    assert compute.time(replace(TOY, kernel_us=9.0)) == pytest.approx((0, elementwise, 0), rel=1e-6)


def test_a_bias_without_a_product_is_an_anchor():
    b = Builder()
    x = b.input("primals_3", 8, 12)
    scale = b.unshard(b.input("primals_1", 3), spec((12,), "scale"))
    bias = b.unshard(b.input("primals_2", 3), spec((12,), "bias"))
    b.finish(b.call(aten.add.Tensor, b.call(aten.mul.Tensor, x, scale), bias))  # a norm's
    assert _anchored(b.graph).end == 5


def test_a_convolution_and_its_backward():
    b = Builder()
    image = b.input("primals_2", 2, 3, 8, 8)
    weight = b.unshard(b.input("primals_1", 4, 3, 3, 3), spec((16, 3, 3, 3), "conv"))
    options = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = b.call(aten.convolution.default, image, weight, *options)
    grads = b.call(aten.convolution_backward.default, out, image, weight, None, *options[1:], [True, True, False])
    b.finish(grads)
    _, forward, _, backward, _ = _anchored(b.graph).time(TOY)
    assert forward == pytest.approx(_us(2 * 16 * 27 * 100))
    assert backward == pytest.approx(2 * forward)
