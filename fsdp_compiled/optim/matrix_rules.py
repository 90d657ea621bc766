"""What optimizers do to matrices: on shards, on a complete matrix, on shards again. An optimizer more is a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from ..passes.cost.matrix_cost import newton_schulz_flops

Group = Mapping[str, Any]  # a parameter group's settings
NewtonSchulz = Callable[[Tensor, tuple[float, float, float], int, float], Tensor]  # as torch's own
State = Sequence[Tensor]  # of one parameter, in the order of ``MatrixRule.state``


@dataclass(frozen=True)
class MatrixRule:
    """An optimizer of matrices, as functions of local tensors.

    Args:
        state: names of the tensors like each parameter that it keeps, which begin as zeros.
        dtype: in which matrices travel.
        begin: from a group's settings, shards, their gradients and their state: changes shards and state, element by
            element, before anything travels.
        sent: what travels of a part of a shard, from the settings, its gradient and its state.
        matrix_function: from the settings and a complete matrix, contiguous and of ``dtype``, which it may
            overwrite, the update that travels back.
        apply: from the settings, a part of a shard, its update and the complete matrix's shape: changes the part.
        flops: of ``matrix_function``, by the settings and a shape.
        with_newton_schulz: from another Newton-Schulz, the matrix function by it.
    """

    state: tuple[str, ...]
    dtype: torch.dtype
    begin: Callable[[Group, Sequence[Tensor], Sequence[Tensor], Sequence[State]], None]
    sent: Callable[[Group, Tensor, State], Tensor]
    matrix_function: Callable[[Group, Tensor], Tensor]
    apply: Callable[[Group, Tensor, Tensor, tuple[int, int]], None]
    flops: Callable[[Group, tuple[int, int]], float]
    with_newton_schulz: Callable[[NewtonSchulz], Callable[[Group, Tensor], Tensor]]


def _lr(group: Group) -> Any:
    lr = group["lr"]
    return lr.squeeze() if isinstance(lr, Tensor) else lr


def _muon_begin(group: Group, shards: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State]) -> None:
    momenta, weight = [state[0] for state in states], 1 - group["momentum"]
    kept = 1 - _lr(group) * group["weight_decay"]
    if all(shard.dtype is torch.float32 for shard in shards):
        torch._foreach_lerp_(momenta, list(grads), weight)
        torch._foreach_mul_(list(shards), kept)
        return
    for shard, grad, momentum in zip(shards, grads, momenta, strict=True):
        momentum.lerp_(grad, weight)
        shard.mul_(kept)  # foreach rounds the factor to bf16 first


def _muon_sent(group: Group, grad: Tensor, state: State) -> Tensor:
    return grad.lerp(state[0], group["momentum"]) if group["nesterov"] else state[0]


def _muon_update(newton_schulz: NewtonSchulz, group: Group, matrix: Tensor) -> Tensor:
    return newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _muon_apply(group: Group, part: Tensor, update: Tensor, shape: tuple[int, int]) -> None:
    part.add_(update, alpha=-_adjust_lr(_lr(group), group["adjust_lr_fn"], torch.Size(shape)))


MUON = MatrixRule(
    state=("momentum_buffer",),
    dtype=torch.bfloat16,  # to which torch's Newton-Schulz casts first, so that this changes no bit
    begin=_muon_begin,
    sent=_muon_sent,
    matrix_function=partial(_muon_update, _zeropower_via_newtonschulz),
    apply=_muon_apply,
    flops=lambda group, shape: newton_schulz_flops(shape, group["ns_steps"]),
    with_newton_schulz=lambda newton_schulz: partial(_muon_update, newton_schulz),
)
RULES: Mapping[type[torch.optim.Optimizer], MatrixRule] = {torch.optim.Muon: MUON}
