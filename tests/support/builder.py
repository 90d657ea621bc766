"""Small graphs for tests of passes."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fsdp_compiled.collectives import operators  # noqa: F401  defines the operators
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.passes.rules import verify
from fsdp_compiled.sharding.spec import (
    AllGatherSpec,
    CommSpec,
    Group,
    ParamSpec,
    ReductionSpec,
    scaling_for,
)


def spec(
    shape,
    name,
    unit="u",
    world=4,
    replicas=1,
    dim=0,
    dtype=torch.float32,
    reduce_dtype=torch.float32,
    device="",
    post_forward=Group(),  # noqa: B008
    reshard=True,
    all_gather_comm="",
    **reduction,
):
    """The spec of one fp32 parameter over process groups named "shard" and "replicate"."""
    shards = Group("shard" if world > 1 else "", world)
    return CommSpec(
        ParamSpec(name, unit, tuple(shape), dim, torch.float32),
        AllGatherSpec(shards, dtype, all_gather_comm, device),
        ReductionSpec(
            reduce_dtype,
            **{
                "shards": shards,
                "replicas": Group("replicate", replicas) if replicas > 1 else Group(),
                "scaling": scaling_for(reduce_dtype, world * replicas),
                "to_host": bool(device),
                **reduction,
            },
        ),
        reshard,
        post_forward,
        reshard_is_set=True,  # no schedule keeps it by itself
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

    def unshard(self, shard, spec):
        return self.op("unshard", (shard, None, None, spec.encode()))

    def reduce_grad(self, grad, spec):
        return self.op("reduce_grad", (grad, spec.encode()))

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
    if nodes.operator_of(node) in ("unshard", "reduce_grad"):
        args = f"{nodes.source_of(node)}, {nodes.spec_of(node).param.name}"
    elif nodes.is_launch(node) or nodes.is_wait(node):
        bucket = nodes.bucket_of(node)
        how = " into place" if getattr(bucket, "into_place", False) else ""
        args = f"{node.args[0]}, {'+'.join(param.name for param in bucket.params)}{how}"
    return f"{node.name} = {name}({args}){shape}"
