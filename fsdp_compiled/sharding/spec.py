"""The spec of a collective: what travels, over which groups, in which dtypes. Operators carry it as text.

In arguments rather than in ``node.meta``, because arguments survive every graph rewrite and enter the compile-cache
keys; as one text, because Dynamo guards every constant that a parameter's read takes, in every step.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import compress
from typing import Any, get_args, get_origin, get_type_hints

import torch

from .layout import PackedLayout, ShardLayout


class Text:
    """A frozen record that operators carry as text: JSON of the fields that differ from their defaults."""

    def encode(self) -> str:
        return json.dumps(self, default=_plain, separators=(",", ":"))

    @classmethod
    @cache
    def decode(cls, text: str) -> Any:
        """Read back what :meth:`encode` wrote: the same record for the same text."""
        return _read(cls, json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return word(value)
    shown = ((f.name, getattr(value, f.name), f.default) for f in fields(value))
    return {name: each for name, each, default in shown if each != default}


def _read(kind: Any, value: Any) -> Any:
    if is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        return kind(**{name: _read(hints[name], each) for name, each in value.items()})  # type: ignore[operator]
    if kind is torch.dtype:
        return getattr(torch, value)
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], each) for each in value)
    options = [each for each in get_args(kind) if each is not type(None)]
    return _read(options[0], value) if options and value is not None else value


_hints = cache(get_type_hints)


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Group:
    """A process group by its name; the default is this rank alone, without a group."""

    name: str = ""
    world: int = 1


@dataclass(frozen=True)
class Scaling:
    """How a sum over ranks becomes a mean without overflow: divide, reduce with ``op``, divide."""

    pre_divide: float = 1.0
    op: str = "avg"
    post_divide: float = 1.0


def scaling_for(dtype: torch.dtype, world: int, factor: float | None = None, sum_only: bool = False) -> Scaling:
    """Return how gradients in ``dtype`` are reduced over ``world`` ranks: to the mean, or the sum over a divisor.

    fp32 and bf16 have the exponent range to be averaged by the collective itself. fp16 may overflow in the sum
    and underflow when divided first, so it is divided by about the square root of the divisor on either side.

    ``world`` counts replicas too; ``factor``, if given, divides the sum in its place. ``sum_only`` asks for no
    averaging collective.

    *Source:* the pre / post split is the one of Horovod and of PyTorch DDP's fp16 hooks.
    """
    divisor = world if factor is None else factor
    if world == 1:
        return Scaling(divisor, "sum", 1.0)
    if dtype.to_real() in (torch.float32, torch.bfloat16, torch.float64):
        if divisor == world and not sum_only:
            return Scaling(1.0, "avg", 1.0)
        return Scaling(1.0, "sum", divisor)
    pre = 1
    while divisor % pre == 0 and divisor / pre > pre:
        pre *= 2
    return Scaling(float(pre), "sum", divisor / pre)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, or one input of an all-gather extension before its shape is known."""

    name: str  # full name
    unit: str  # full name of its unit
    shape: tuple[int, ...] | None  # of the unsharded parameter; None, and dtype with it: see CommSpec.for_input
    dim: int  # the sharded dimension
    dtype: torch.dtype  # of the sharded parameter
    grad_dtype: torch.dtype | None = None  # of its gradient; None: as ``dtype``

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.grad_dtype or self.dtype

    def layout(self, world: int) -> ShardLayout:
        """Return how ``world`` ranks share the parameter."""
        assert self.shape is not None, f"{self.name}: resolve the spec for its input first"
        return ShardLayout(self.shape, self.dim, world)


class Spec:
    """How something travels: the base of the specs of all kinds of collectives."""

    dtype: torch.dtype  # that travels

    @property
    def world(self) -> int:
        """Ranks that share each parameter; 1 where each has all of it."""
        return 1

    @property
    def how(self) -> str:
        """What ranks compare besides the parameters."""
        return f"sent as {word(self.dtype)}"

    def key(self, param: ParamSpec) -> Hashable:
        """Return what must be equal for parameters that share a collective."""
        return self

    def over(self, shards: Group, replicas: Group) -> Spec:
        """Return how the same would travel if these ranks shared each parameter, and these had equal shards."""
        raise NotImplementedError(f"{type(self).__name__} over other ranks")

    def local_steps(self, param: ParamSpec) -> tuple[torch.dtype | float, ...] | None:
        """Return what is left to do if nothing travels, casts and divisions by a number; None if anything does."""
        return None


@dataclass(frozen=True)
class AllGatherSpec(Spec):
    group: Group  # of the ranks that hold the shards
    dtype: torch.dtype  # of the all-gather input and of the unsharded parameter
    comm: str = ""  # name of the user's :class:`AllGather`; "" for the process group's own
    device: str = ""  # type of the device of compute where shards live on the CPU; "" where they live with compute

    @property
    def world(self) -> int:
        return self.group.world

    def over(self, shards: Group, replicas: Group) -> AllGatherSpec:
        return replace(self, group=shards)

    @property
    def how(self) -> str:
        return super().how + (f" by communicator {self.comm}" if self.comm else "")

    def local_steps(self, param: ParamSpec) -> tuple[torch.dtype | float, ...] | None:
        return (self.dtype,) if self.world == 1 and not self.device else None


@dataclass(frozen=True)
class ReductionSpec(Spec):
    """A reduce-scatter and, over replicas, an all-reduce."""

    dtype: torch.dtype  # of the reduce-scatter input
    shards: Group = Group()  # of the reduce-scatter
    replicas: Group = Group()  # of the all-reduce
    scaling: Scaling = Scaling()  # how the sum becomes a mean
    comm: str = ""  # name of the user's :class:`ReduceScatter`; "" for the process group's own
    hook: str = ""  # name of the user's hook on the reduced, packed gradients; "" for none
    to_host: bool = False  # whether the shards live on the CPU, and so their gradients

    @property
    def world(self) -> int:
        return self.shards.world

    def over(self, shards: Group, replicas: Group) -> ReductionSpec:
        world = shards.world * replicas.world
        return replace(self, shards=shards, replicas=replicas, scaling=scaling_for(self.dtype, world))

    @property
    def how(self) -> str:
        scaling = self.scaling
        mean = f"{scaling.op}, divided by {scaling.pre_divide:g} before and {scaling.post_divide:g} after"
        return f"{super().how} ({mean})" + (f" by communicator {self.comm}" if self.comm else "")

    def key(self, param: ParamSpec) -> Hashable:
        return self, param.unit if self.hook or self.comm else ""  # the user's code sees one unit's gradients

    def local_steps(self, param: ParamSpec) -> tuple[torch.dtype | float, ...] | None:
        if self.shards.world * self.replicas.world > 1 or self.hook or self.to_host:
            return None
        return self.dtype, self.scaling.pre_divide, param.gradient_dtype


@dataclass(frozen=True)
class CommSpec(Text):
    """Everything that one parameter's traced read decides: the argument of ``unshard`` and ``reduce_grad``."""

    param: ParamSpec
    all_gather: AllGatherSpec
    reduction: ReductionSpec
    reshard: bool = True  # whether backward all-gathers again; False keeps the unsharded parameter from forward
    post_forward: Group = Group()  # holds the parameter between forward and backward; this rank alone: none
    reshard_is_set: bool = False  # by the user; else a schedule may keep the parameter all the same

    @cached_property
    def layout(self) -> ShardLayout:
        """How the ranks of the all-gather share the parameter."""
        return self.param.layout(self.all_gather.group.world)

    @property
    def all_gather_bytes(self) -> int:
        """Bytes of the all-gather output, padding included."""
        return self.layout.padded_bytes(self.all_gather.dtype)

    def for_input(self, shape: Sequence[int], dtype: torch.dtype) -> CommSpec:
        """Return the spec for an input, sharded along dimension 0, always the same; itself if its shape is known."""
        return self if self.param.shape is not None else _for_input(self, tuple(shape), dtype)

    def over_shards_only(self) -> CommSpec:
        """Return the spec of a partial gradient, which is not reduced over replicas and stays with compute."""
        scaling = replace(self.reduction.scaling, post_divide=1.0)
        reduction = replace(self.reduction, replicas=Group(), scaling=scaling, hook="", to_host=False)
        return replace(self, param=replace(self.param, grad_dtype=reduction.dtype), reduction=reduction)

    @cached_property
    def text_over_shards_only(self) -> str:
        return self.over_shards_only().encode()

    @cached_property
    def after_forward(self) -> CommSpec:
        """The spec by which backward all-gathers over the smaller group what forward left there."""
        all_gather = replace(self.all_gather, group=self.post_forward, comm="", device="")
        param = replace(self.param, dtype=self.all_gather.dtype)
        return replace(self, param=param, all_gather=all_gather, post_forward=Group())


@lru_cache(maxsize=4096)
def _for_input(spec: CommSpec, shape: tuple[int, ...], dtype: torch.dtype) -> CommSpec:
    unsharded = (shape[0] * spec.all_gather.group.world, *shape[1:])
    param = replace(spec.param, shape=unsharded, dim=0, dtype=dtype)
    return replace(spec, param=param, all_gather=replace(spec.all_gather, dtype=dtype))


class Bucket(Text):
    """What one collective carries: ``params`` or their gradients, in packing order. Where shards lie is the same."""

    spec: Spec
    params: tuple[ParamSpec, ...]
    stages: tuple[str, ...]  # the operations in turn; each has operators and a range of its name

    def group_of(self, stage: str) -> Group | None:
        """Return the process group of a stage; None for a copy, which involves no other rank."""
        raise NotImplementedError

    def bytes_of(self, stage: str) -> int:
        """Return the bytes that a stage works on, counted unsharded: an all-gather's output, a reduction's input."""
        return sum(self.sizes)

    def device_of(self, inputs: Sequence[torch.Tensor]) -> torch.device:
        return inputs[0].device

    @property
    def form(self) -> str:
        """How its buffers are made up, where ranks could differ in it; "" where one buffer is packed."""
        return ""

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Full names of the units that it spans, in packing order."""
        return tuple(dict.fromkeys(param.unit for param in self.params))

    @cached_property
    def layouts(self) -> tuple[ShardLayout, ...]:
        """How the ranks share each parameter."""
        return tuple(param.layout(self.spec.world) for param in self.params)

    @cached_property
    def packed(self) -> PackedLayout:
        """Where one rank's shards lie in the packed buffer."""
        return PackedLayout(tuple(layout.shard_numel for layout in self.layouts))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each unsharded, padded parameter or gradient, in the dtype that travels."""
        return tuple(layout.padded_bytes(self.spec.dtype) for layout in self.layouts)


@dataclass(frozen=True)
class AllGatherBucket(Bucket):
    """What one all-gather carries: the argument of its launch and of its wait."""

    spec: AllGatherSpec
    params: tuple[ParamSpec, ...]
    into_place: bool = False  # each parameter is gathered straight into its own memory, not copied out of one buffer
    inputs_persist: bool = True  # until the wait, as parameters do; the compute stream copies others first
    stages = ("all_gather",)

    def group_of(self, stage: str) -> Group:
        return self.spec.group

    @property
    def form(self) -> str:
        return "each into its own memory" if self.into_place and len(self.params) > 1 else ""

    def device_of(self, inputs: Sequence[torch.Tensor]) -> torch.device:
        return torch.device(self.spec.device) if self.spec.device else inputs[0].device


@dataclass(frozen=True)
class ReductionBucket(Bucket):
    """What one reduction carries: the argument of its launches and waits. Fields as in :class:`AllGatherBucket`."""

    spec: ReductionSpec
    params: tuple[ParamSpec, ...]
    inputs_persist: bool = False

    @cached_property
    def stages(self) -> tuple[str, ...]:  # type: ignore[override]
        """A reduce-scatter or an all-reduce or both, and perhaps a copy to the host."""
        all_reduces = self.spec.replicas.world > 1
        done = self.spec.shards.world > 1 or not all_reduces, all_reduces, self.spec.to_host
        return tuple(compress(("reduce_scatter", "all_reduce", "copy_to_host"), done))

    def group_of(self, stage: str) -> Group | None:
        return {"reduce_scatter": self.spec.shards, "all_reduce": self.spec.replicas}.get(stage)

    def bytes_of(self, stage: str) -> int:
        return sum(self.sizes) // (1 if stage == self.stages[0] else self.spec.shards.world)
