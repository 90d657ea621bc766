"""What an uncompiled step takes on a cluster, by arithmetic: each operator reads and writes its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fsdp_compiled.passes.cost import Cluster
from fsdp_compiled.passes.cost.compute import COUNTED_AS

_FREE = ("empty", "view", "nll_loss_forward")  # operators that touch nothing, or next to nothing
_WRITE_ONLY = ("zeros", "nll_loss_backward")  # that take the shape alone from what they are given


class Eager(TorchDispatchMode):
    """Sums what operators take on a cluster, one after the other, by kind, in us."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster, self.us = cluster, {"products": 0.0, "attention": 0.0, "others": 0.0}

    def slower(self, operator: str, out: Any) -> float:
        """Return how much longer an operator that makes ``out`` takes than the cluster's record says."""
        return 1.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        operator, name = func.overloadpacket, str(func.overloadpacket)
        if func.is_view or not made or any(word in name for word in _FREE):
            return out
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        given = [] if any(word in name for word in _WRITE_ONLY) else given
        traffic = sum({id(each): _touched(each) for each in (*given, *made)}.values())
        if "embedding" in name:
            traffic = 2 * sum(each.nbytes for each in made)
        operator = COUNTED_AS.get(operator, operator)
        cluster, itemsize, slower = self.cluster, made[0].element_size(), self.slower(name, out)
        if operator not in flop_registry:
            self.us["others"] += max(slower * cluster.memory_us(traffic), cluster.kernel_us)
            return out
        flops = flop_registry[operator](*args, **(kwargs or {}), out_val=out)
        if "attention" in name:  # causal
            self.us["attention"] += slower * cluster.attention_us(flops / 2, traffic, itemsize, "backward" in name)
        else:
            self.us["products"] += slower * cluster.product_us(flops, traffic, itemsize)
        return out


def _touched(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory: what is expanded is there once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def counted(make: Callable[[], nn.Module], batch: int, seq: int, eager: Eager) -> int:
    """Sum up a forward and a backward of a model in bf16, unsharded, that returns a loss; return its parameters."""
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = make()
        finally:
            torch.set_default_dtype(torch.float32)
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        with eager:
            model(tokens, tokens).backward()
        return sum(param.numel() for param in model.parameters())
