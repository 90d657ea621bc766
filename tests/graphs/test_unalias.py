"""What torch gets wrong in regions, on unsharded models: results that share memory; and constants in caches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._inductor import config
from torch.compiler import nested_compile_region

from fsdp_compiled.passes import MakePicklable, Protect, region_options


@nested_compile_region
def keeps_its_argument(x):
    first, last = F.pad(x, (1, 0))[..., :8].roll(1, -1).chunk(2, -1)
    return torch.cat([last.sigmoid(), first], -1) * x * 0.5


@nested_compile_region
def keeps_parts_of_what_it_keeps(x):
    y = torch.cat([x.sin(), x.cos()], -1)
    return y.tanh()[..., :8] * y[..., 8:].exp()


@pytest.mark.parametrize("block", [keeps_its_argument, keeps_parts_of_what_it_keeps])
def test_nothing_is_written_over_what_a_region_keeps(block):
    def call(x):
        total = 0
        for _ in range(4):
            x = block(x)
            total = total + (x * 2).relu()
            x = x + 1
        return x + total

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, options=region_options())
    gradients = []
    for each in (call, compiled):
        x = torch.linspace(-1, 1, 160, dtype=torch.float64).view(4, 5, 8).requires_grad_()
        each(x).square().mean().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_a_pass_of_the_users_is_not_replaced():
    def mine(scheduled):
        return scheduled

    message = "regions: expected no pass in Inductor's option _pre_fusion_custom_pass, .*, got <function .*mine"
    with pytest.raises(NotImplementedError, match=message):
        region_options({"_pre_fusion_custom_pass": mine})
    with config.patch(_pre_fusion_custom_pass=mine):
        with pytest.raises(NotImplementedError, match=message):
            region_options()
        assert region_options({"_pre_fusion_custom_pass": None}) == {"_pre_fusion_custom_pass": Protect()}


@pytest.mark.parametrize(
    "fill, dtype",
    [
        (0, torch.float32),
        (2.5, torch.bfloat16),
        (-torch.inf, torch.float64),
        (True, torch.bool),
        (2**40, torch.int64),
    ],
)
def test_constants_whose_size_varies_are_what_they_were(fill, dtype):
    want = torch.full([1, 3, 2], fill, dtype=dtype)
    body, outer = fx.Graph(), fx.Graph()
    size = body.placeholder("s")
    size.meta["val"] = 3
    full = body.call_function(torch.ops.aten.full.default, ([1, size, 2], fill), {"dtype": dtype})
    full.meta["val"] = want
    body.output((full,))
    region = fx.GraphModule({}, body)
    call = (outer.get_attr("region"), "region", outer.placeholder("s"))
    outer.output(outer.call_function(torch.ops.higher_order.invoke_subgraph, call))
    around = fx.GraphModule({"region": region}, outer)
    MakePicklable()(around.graph)
    assert not body.find_nodes(op="call_function", target=torch.ops.aten.full.default)
    region.recompile()
    (got,) = region(3)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert got.stride() == want.stride()
