"""Small graphs for tests of passes."""

from __future__ import annotations

import torch
from fsdp_compiled.passes.route import Route, reduction_for
from torch import fx
from torch._subclasses import FakeTensorMode

from fsdp_compiled.collectives import operators  # noqa: F401  defines the operators
from fsdp_compiled.passes import ir
from fsdp_compiled.passes.spec import verify


def route(
    shape, param, unit="u", world=4, replicas=1, dim=0, dtype=torch.float32, reduce_dtype=torch.float32, **more
):
    scaling = reduction_for(reduce_dtype, world * replicas)
    return Route(
        shape=shape,
        dim=dim,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        grad_dtype=torch.float32,
        reshard=True,
        unit=unit,
        param=param,
        shard_group="shard",
        shard_world=world,
        replicate_group="replicate" if replicas > 1 else "",
        replicate_world=replicas,
        pre_divide=scaling.pre_divide,
        op=scaling.op,
        post_divide=scaling.post_divide,
        **more,
    )


class Builder:
    """Builds a graph of our operators with fake values, and runs passes on it."""

    def __init__(self, *passes) -> None:
        self.passes = passes
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.inputs = []

    def input(self, name, *shape, dtype=torch.float32, device="cpu"):
        with self.graph.inserting_after(next(reversed(self.inputs), self.graph._root)):
            node = self.graph.placeholder(name)
        self.inputs.append(node)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        return node

    def op(self, name, args):
        packet = getattr(torch.ops.fsdp_compiled, name)
        node = self.graph.call_function(packet.default, args)
        with self.mode:
            node.meta["val"] = packet.default(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def unshard(self, shard, route):
        return self.op("unshard", (shard, None, route.encode()))

    def reduce_grad(self, grad, route):
        return self.op("reduce_grad", (grad, route.encode()))

    def call(self, op, *args):
        """Append an operator that is not ours."""
        node = self.graph.call_function(op, args)
        with self.mode:
            node.meta["val"] = op(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def finish(self, *results):
        """Return the graph with these results, before any pass."""
        self.graph.output(results)
        return self.graph

    def text(self, *results):
        """Run the passes, each between two checks of the rules, and print the graph."""
        self.finish(*results)
        verify(self.graph)
        for run in self.passes:
            run(self.graph)
            verify(self.graph, type(run).__name__)
        self.graph.lint()
        return "\n".join(_line(node) for node in self.graph.nodes if node.op == "call_function")


def _line(node):
    name = str(node.target).removesuffix(".default").split(".")[-1] if not callable(node.target) else None
    name = name or getattr(node.target, "_opname", getattr(node.target, "__name__", "?"))
    value = node.meta["val"]
    shape = "" if not isinstance(value, torch.Tensor) else f" {list(value.shape)} {str(value.dtype)[6:]}"
    args = ", ".join(map(str, node.args))
    if ir.is_unshard(node) or ir.is_reduce_grad(node):
        args = f"{ir.source_of(node)}, {ir.route_of(node).param}"
    return f"{node.name} = {name}({args}){shape}"
