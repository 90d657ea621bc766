"""Small models that a test shards itself. They know nothing of inputs, losses or ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel import parallelize_module as apply_plan
from torch.utils.checkpoint import checkpoint

from .. import fully_shard


class MLP(nn.Module):
    """Two linears, each followed by a ReLU: ``[..., dim] -> [..., dim]``.

    Args:
        dim: of input and output.
        device: of the parameters.
        bias: whether the linears have one.
        with_buffer: add a random buffer ``[dim]`` to the result.
        dim_multiplier: the hidden dimension is ``dim_multiplier * dim``.
    """

    buffer: Tensor | None

    def __init__(
        self,
        dim: int,
        device: torch.device | None = None,
        *,
        bias: bool = True,
        with_buffer: bool = False,
        dim_multiplier: int = 4,
    ) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, dim_multiplier * dim, device=device, bias=bias)
        self.out_proj = nn.Linear(dim_multiplier * dim, dim, device=device, bias=bias)
        self.register_buffer("buffer", torch.randn(dim, device=device) if with_buffer else None)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.out_proj(F.relu(self.in_proj(x))))
        return out if self.buffer is None else out + self.buffer

    def reset_parameters(self) -> None:
        """Fill the buffer anew; the linears have methods of their own."""
        if self.buffer is not None:
            nn.init.normal_(self.buffer)


class MLPStack(nn.Sequential):
    """Three MLPs, two of them with ``3 * mlp_dim`` hidden features, which few numbers of ranks divide.

    Args:
        mlp_dim: of input and output.
        with_seq_parallel: end in a LayerNorm without bias, for sequence parallelism.
    """

    def __init__(self, mlp_dim: int, *, with_seq_parallel: bool = False) -> None:
        mlps: list[nn.Module] = [MLP(mlp_dim, dim_multiplier=multiplier) for multiplier in (3, 4, 3)]
        super().__init__(*mlps, *([nn.LayerNorm(mlp_dim, bias=False)] if with_seq_parallel else []))
        self.with_seq_parallel = with_seq_parallel

    def parallelize(
        self,
        tp_mesh: DeviceMesh | None,
        dp_mesh: DeviceMesh,
        use_activation_checkpointing: bool,
        **fsdp_kwargs: Any,
    ) -> MLPStack:
        """Apply tensor parallelism, then shard every MLP and the stack.

        Args:
            tp_mesh: 1-D; None for no tensor parallelism.
            dp_mesh: given to ``fully_shard`` as ``mesh``.
            use_activation_checkpointing: recompute each MLP in backward.
            fsdp_kwargs: given to ``fully_shard``.

        Returns:
            The stack itself. With sequence parallelism its output is sharded along dimension 1.
        """
        if tp_mesh is not None:
            apply_plan(self, device_mesh=tp_mesh, parallelize_plan=self._tensor_parallel_plan())
        for mlp in self:
            if isinstance(mlp, MLP):
                if use_activation_checkpointing:
                    mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)  # type: ignore[method-assign]
                fully_shard(mlp, mesh=dp_mesh, **fsdp_kwargs)
        return fully_shard(self, mesh=dp_mesh, **fsdp_kwargs)

    def _tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        # Between the linears activations stay DTensors, which may be uneven.
        plan: dict[str, ParallelStyle] = {}
        for index in range(3):
            plan[f"{index}.in_proj"] = ColwiseParallel(use_local_output=False)
            plan[f"{index}.out_proj"] = RowwiseParallel(use_local_output=False)
        plan["2.out_proj"] = RowwiseParallel(output_layouts=Shard(1)) if self.with_seq_parallel else RowwiseParallel()
        if self.with_seq_parallel:
            plan["3"] = SequenceParallel(sequence_dim=1)
        return plan


class DoubleLinear(nn.Module):
    """Two parallel linears with ReLU: a module with two outputs, or with an unused part.

    Args:
        dim: ``[..., dim] -> [..., dim]``, twice.
        use_second_linear: return both results, or the first alone.
    """

    def __init__(self, dim: int, use_second_linear: bool = True) -> None:
        super().__init__()
        self.lin1 = nn.Linear(dim, dim)
        self.lin2 = nn.Linear(dim, dim)
        self.relu = nn.ReLU()
        self.use_second_linear = use_second_linear

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        first: Tensor = self.relu(self.lin1(x))
        return (first, self.relu(self.lin2(x))) if self.use_second_linear else first


class SkipModule(nn.Module):
    """One linear without bias, ``[..., 10] -> [..., 10]``, that stays part of an outer unit."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class NestedLinear(nn.Module):
    """One linear without bias, ``[..., 10] -> [..., 10]``, which is a unit if ``fsdp_wrap``."""

    def __init__(self, fsdp_wrap: bool) -> None:
        super().__init__()
        self.nested_linear = nn.Linear(10, 10, bias=False)
        if fsdp_wrap:
            fully_shard(self.nested_linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.nested_linear(x)


class SkipModel(nn.Module):
    """Three linears in a row, ``[..., 10] -> [..., 10]``; the last lies in a unit, and in two if ``double_nest``."""

    def __init__(self, double_nest: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10, bias=False)
        self.linear_skip = SkipModule()
        self.nested_linear = fully_shard(NestedLinear(fsdp_wrap=double_nest))

    def forward(self, x: Tensor) -> Tensor:
        return self.nested_linear(self.linear_skip(self.linear(x)))


class DummyDDP(nn.Module):
    """A module under the name ``module``, where DistributedDataParallel has it, and nothing else."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
