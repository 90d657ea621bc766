"""Where a parameter travels and how its gradient is averaged, as operators carry it in their arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import torch


@dataclass(frozen=True)
class Route:
    """Where one parameter travels and in which dtypes: the constant argument of our operators.

    Identity and policy travel in an argument rather than in ``node.meta`` because arguments survive every graph
    rewrite and enter the compile-cache keys; meta does neither. They travel as one text, see :meth:`encode`,
    because Dynamo guards every constant that a parameter's read takes, in every step.
    """

    shape: tuple[int, ...]  # of the unsharded parameter
    dim: int  # the sharded dimension
    dtype: torch.dtype  # of the all-gather and of the unsharded parameter
    reduce_dtype: torch.dtype  # of the reduce-scatter
    grad_dtype: torch.dtype  # of the sharded parameter and its gradient
    reshard: bool  # gather again in backward rather than keep from forward
    unit: str  # full name of the unit
    param: str  # full name of the parameter
    shard_group: str  # process group names; "" where the world is 1
    shard_world: int
    replicate_group: str
    replicate_world: int
    reduce_group: str = ""  # of the reduce-scatter, if it has one of its own
    pre_divide: float = 1.0  # with op and post_divide: see Reduction
    op: str = "avg"
    post_divide: float = 1.0
    post_forward_group: str = ""  # backward gathers over this smaller group from what forward left
    post_forward_world: int = 0  # 0: there is none
    gather_comm: str = ""  # names of what the user put in place of the collectives, see collectives.custom
    reduce_comm: str = ""
    reduce_hook: str = ""
    sink_is_sharded: bool = False  # the gradient stops before the replicas, see collectives.ops.unshard
    device: str = ""  # type of the device of compute, where the shard lives on another one
    follows_shard: bool = False  # shape and dtype are those of whatever shard is given, as with extensions

    @property
    def scatter_group(self) -> str:
        """Name of the process group of the reduce-scatter."""
        return self.reduce_group or self.shard_group

    def post_forward(self) -> Route:
        """Return the way from what forward left, sharded over the smaller group, to the unsharded parameter."""
        return replace(
            self,
            grad_dtype=self.dtype,
            shard_group=self.post_forward_group,
            shard_world=self.post_forward_world,
            post_forward_group="",
            post_forward_world=0,
            gather_comm="",
        )

    @property
    def communicates(self) -> bool:
        """Whether a gradient on this way meets those of other ranks."""
        return self.shard_world * self.replicate_world > 1

    def reduces_as_it_is(self, dtype: torch.dtype, shape: Sequence[int], dim: int) -> bool:
        """Tell whether a gradient alone is what is reduced: neither cast, divided, padded nor permuted.

        Args:
            dtype: of the gradient.
            shape: of the gradient.
            dim: along which its parameter is sharded.
        """
        is_plain = dtype == self.reduce_dtype and self.pre_divide == 1.0
        return is_plain and dim == 0 and shape[0] % self.shard_world == 0

    def in_dtype(self, dtype: torch.dtype) -> Route:
        """Return the same way for another dtype of the all-gather."""
        return self if dtype == self.dtype else replace(self, dtype=dtype)

    def over_shards_only(self) -> Route:
        """Return the way of a gradient not reduced over replicas yet: it stays with compute, in ``reduce_dtype``."""
        return replace(
            self,
            grad_dtype=self.reduce_dtype,
            replicate_group="",
            replicate_world=1,
            post_divide=1.0,
            reduce_hook="",
            device="",
        )

    def for_shard(self, shard: torch.Tensor) -> Route:
        """Return the way of this ``shard``."""
        if not self.follows_shard:
            return self
        shape = (shard.shape[0] * self.shard_world, *shard.shape[1:])
        return replace(self, shape=shape, dim=0, dtype=shard.dtype, grad_dtype=shard.dtype, follows_shard=False)

    def encode(self) -> str:
        """Return the fields that differ from their defaults as JSON, the operators' argument."""
        written = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return json.dumps(written, default=lambda dtype: str(dtype).removeprefix("torch."))

    @staticmethod
    @cache
    def decode(text: str) -> Route:
        """Read back what :meth:`encode` wrote."""
        read = json.loads(text)
        dtypes = {name: getattr(torch, value) for name, value in read.items() if name.endswith("dtype")}
        return Route(**{**read, **dtypes, "shape": tuple(read["shape"])})


@dataclass(frozen=True)
class Reduction:
    """How a sum over ranks becomes a mean without overflow: divide, reduce with ``op``, divide."""

    pre_divide: float
    op: str
    post_divide: float


def reduction_for(
    dtype: torch.dtype, world: int, divide_factor: float | None = None, sum_only: bool = False
) -> Reduction:
    """Return how gradients in ``dtype`` are reduced over ``world`` ranks: to the mean, or the sum over a divisor.

    fp32 and bf16 have the exponent range to be averaged by the collective itself. fp16 may overflow in the sum
    and underflow when divided first, so it is divided by about the square root of the divisor on either side.

    Args:
        dtype: of the reduce-scatter.
        world: all ranks, replicas included.
        divide_factor: what to divide the sum by; None for ``world``.
        sum_only: use no averaging collective.

    *Source:* the pre / post split is the one of Horovod and of PyTorch DDP's fp16 hooks.
    """
    divisor = world if divide_factor is None else divide_factor
    if world == 1:
        return Reduction(divisor, "sum", 1.0)
    if dtype in (torch.float32, torch.bfloat16, torch.float64):
        if divisor == world and not sum_only:
            return Reduction(1.0, "avg", 1.0)
        return Reduction(1.0, "sum", divisor)
    pre = 1
    while divisor % pre == 0 and divisor / pre > pre:
        pre *= 2
    return Reduction(float(pre), "sum", divisor / pre)


def scaling_of(route: Route) -> Reduction:
    """Return how the route's reduction divides."""
    return Reduction(route.pre_divide, route.op, route.post_divide)
