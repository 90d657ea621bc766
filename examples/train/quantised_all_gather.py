"""Sends linear weights as int8 or float8 rows with a scale each, a quarter of fp32's bytes, by a tensor subclass.

    torchrun --nproc-per-node 2 examples/train/quantised_all_gather.py --compile

Trains one small model as it is, one with int8 and one with float8 on the same random tokens, and prints the losses
and what the all-gathers of a compiled step carry. ``--compile`` trains in that graph too. Weights, gradients and
optimizer stay fp32; forward and backward see the rounded weights, and the gradient passes the rounding unchanged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_compiled import MixedPrecisionPolicy, fully_shard
from fsdp_compiled.inspect import capture
from fsdp_compiled.testing.llama import Config, Llama

aten = torch.ops.aten


LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # *Source:* torch.iinfo, torch.finfo


class QuantisedGathered(Tensor):
    """A matrix whose all-gather carries rows of ``wire`` and one fp32 scale per row; all else sees its values."""

    # What makes another of the kind: sharding, copies and the optimizer's views of it.
    _KEEP = (
        aten.detach.default,
        aten.clone.default,
        aten.slice.Tensor,
        aten.new_zeros.default,
        aten.view.default,
        aten._to_copy.default,
    )

    @staticmethod
    def __new__(cls: type[QuantisedGathered], values: Tensor, wire: torch.dtype) -> QuantisedGathered:
        return Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor, wire: torch.dtype) -> None:
        self.values, self.wire = values, wire

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["values"], self.wire

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], wire: torch.dtype, size: Any, stride: Any
    ) -> QuantisedGathered:
        return QuantisedGathered(parts["values"], wire)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wire = next(arg.wire for arg in tree_leaves((args, kwargs)) if isinstance(arg, QuantisedGathered))
        args, kwargs = tree_map_only(QuantisedGathered, lambda tensor: tensor.values, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(Tensor, lambda values: cls(values, wire), out) if func in cls._KEEP else out

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: Sequence[int],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, Tensor], torch.Size]:
        """Return what this rank sends, and the shape of the unsharded matrix."""
        return quantise(self.values, self.wire), outer_size

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, Tensor], size: torch.Size, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the unsharded matrix in ``dtype`` and what holds its memory, or fill ``out``."""
        rows, scales = outputs
        unsharded = (rows.to(torch.float32) * scales)[: size[0]].to(dtype)
        if out is not None:
            out.copy_(unsharded)
            return None
        return unsharded, (unsharded,)


def quantise(rows: Tensor, wire: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows in ``wire`` and fp32 scales ``[rows, 1]``, whose product is about the fp32 matrix."""
    scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST[wire]
    scaled = rows / scales
    return (scaled if wire.is_floating_point else torch.round(scaled)).to(wire), scales


def gather_quantised(model: nn.Module, wire: torch.dtype) -> None:
    """Let every linear weight below ``model`` travel as ``wire``; call it before ``fully_shard``."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(QuantisedGathered(module.weight.detach(), wire))


def train(wire: torch.dtype | None, args: argparse.Namespace) -> tuple[list[float], int]:
    """Return the losses, and the bytes that the all-gathers of one step carry."""
    config = Config(vocab=256, width=64, layers=1, heads=2, kv_heads=2, hidden=192, max_seq=64)
    model = Llama(config)
    model.init_weights(seed=0)
    if wire is not None:
        gather_quantised(model.blocks, wire)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    call = torch.compile(model, fullgraph=True) if args.compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batch = torch.randint(config.vocab, (2, 65), generator=generator)
    losses = []
    for _ in range(args.steps):
        loss = call(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    graphs = capture(model, batch[:, :-1], batch[:, 1:]).graphs
    return losses, sum(c.bytes for graph in graphs for c in graph.collectives if c.kind == "all_gather")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    for wire in (None, torch.int8, torch.float8_e4m3fn):
        losses, sent = train(wire, args)
        if dist.get_rank() == 0:
            kind = str(wire or torch.float32).removeprefix("torch.")
            print(f"{kind}: loss {losses[0]:.6f} -> {losses[-1]:.6f}, {sent} bytes gathered a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
