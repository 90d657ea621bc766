"""What a tensor subclass may do around the all-gather of its parameter: quantise it, and make the result.

A parameter's local tensor takes part if its class, or that tensor itself, has both methods of the protocol that
PyTorch's FSDP2 defines:

* ``fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)``, or with ``mesh`` alone, returns
  ``(inputs, metadata)``: what this rank sends, each with the shard's dimension 0 first, and anything;
* ``fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)`` returns ``(unsharded, inner tensors)``,
  or fills ``out``, which it returned before; rows that pad an uneven dimension 0 are cut off afterwards. Under tensor
  parallelism all of these are this rank's part.

If ``fsdp_should_release_all_gather_outputs_after_post_all_gather()`` is there, too, and returns True, uncompiled code
frees the outputs once the second has returned; a graph frees what nothing reads in any case.

A wrapper subclass that defines neither, such as torchao's quantised weights, is sharded by its own slicing. Its shard
is given the two methods: each inner tensor travels as it is, and the unsharded weight is made of the results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..expect import expect, unexpected
from ..sharding.layout import ShardLayout
from ..sharding.spec import CommSpec
from .placement import ParamPlacement

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def is_extended(tensor: Tensor) -> bool:
    """Tell whether ``tensor``, or its class, extends the all-gather."""
    return any(hasattr(tensor, method) for method in (PRE, POST, _RELEASES))


def is_wrapper(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is of a subclass that wraps other tensors."""
    return hasattr(tensor, "__tensor_flatten__")


def take_extended(unsharded: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """Return the padded shard as ``take_shard`` does, by the operations that FSDP2 asks of such a subclass."""
    parts = unsharded.chunk(layout.world, layout.dim)
    padded = unsharded.new_zeros(layout.shard_shape)
    if rank < len(parts):
        padded.narrow(layout.dim, 0, parts[rank].shape[layout.dim]).copy_(parts[rank])
    return padded


def check_extension(name: str, tensor: Tensor, after_forward: int) -> None:
    """Raise ValueError unless ``tensor`` has both methods or none, and the first takes 1 or 5 arguments.

    TypeError if the third returns no bool. NotImplementedError if it has them and is to stay sharded over a group of
    ``after_forward`` ranks, more than 1.
    """
    found = [method for method in (PRE, POST, _RELEASES) if hasattr(tensor, method)]
    if found and found[:2] != [PRE, POST]:
        raise unexpected(name, f"{type(tensor).__name__} to define both {PRE} and {POST}", f"only {found[0]}")
    if found[2:]:
        expect(name, getattr(tensor, _RELEASES)(), bool, f"{type(tensor).__name__}.{_RELEASES} to return a bool")
    if found and len((got := inspect.signature(getattr(tensor, PRE))).parameters) not in (1, 5):
        either = "(mesh) or (mesh, outer_size, outer_stride, module, mp_policy)"
        raise unexpected(name, f"{type(tensor).__name__}.{PRE} to take {either}", got)
    if found and after_forward > 1:
        raise NotImplementedError(
            f"{name}: reshard_after_forward as a group size is not implemented for parameters with an all-gather "
            "extension; use True or False"
        )


def _function(method: Any) -> Callable[..., Any]:
    """Return a method as a function of the tensor: bound methods are not traced by Dynamo."""
    return getattr(method, "__func__", None) or (lambda _, *args, **kwargs: method(*args, **kwargs))


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor as it is, or what a wrapper subclass copies into a plain one: process groups know no other."""
    if not is_wrapper(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class AllGatherExtension:
    """The two methods of one parameter's local tensor, and what passes between them."""

    def __init__(
        self, extended: Tensor, shard: Tensor, module: nn.Module, placement: ParamPlacement, shape: tuple[int, ...]
    ) -> None:
        """``extended`` or its class has the methods, ``shard`` is this rank's, padded; ``shape`` is unsharded."""
        policy, unsharded = placement.mp_policy, torch.empty(shape, device="meta")
        self.shard, self.shape, self.device = shard, shape, placement.device  # of compute
        self.dtype = placement.dtypes(shard.dtype).all_gather  # of compute
        self.name = ""  # full name
        self.input_spec_text = ""  # the spec of each input but for its shape and dtype
        self.metadata: Any = None  # of the last launch, for :meth:`join`
        self.releases_outputs = hasattr(extended, _RELEASES) and getattr(extended, _RELEASES)()
        self._methods = getattr(extended, PRE), getattr(extended, POST)
        self._pre, self._post = map(_function, self._methods)
        arguments = (placement.mesh_info.shard_mesh, unsharded.shape, unsharded.stride(), module, policy)
        self._arguments = arguments[: len(inspect.signature(self._methods[0]).parameters)]

    def is_of(self, tensor: Tensor) -> bool:
        """Tell whether these are the methods that ``tensor`` has now."""
        return self._methods == (getattr(tensor, PRE, None), getattr(tensor, POST, None))

    def split(self) -> tuple[Sequence[Tensor], Any]:
        """Return (what this rank sends, metadata for :meth:`join`); Dynamo traces this."""
        with torch.no_grad():
            shard = self.shard
            if shard.device.type != self.device.type:
                shard = shard.to(self.device, non_blocking=True)
            sent = self._pre(shard, *self._arguments)
            inputs = sent[0] if isinstance(sent, (tuple, list)) and len(sent) == 2 else None
            if not isinstance(inputs, (tuple, list)) or not all(isinstance(each, Tensor) for each in inputs):
                self._refuse(PRE, "(a tuple of tensors, metadata)", sent)
            wrapped = [each for each in inputs if type(each) not in (Tensor, nn.Parameter)]
            if wrapped and torch.compiler.is_compiling():
                self._refuse(PRE, "plain tensors where it is compiled", wrapped[0])
            return sent

    def join(self, outputs: Sequence[Tensor], metadata: Any) -> tuple[Tensor, Sequence[Tensor]]:
        """Return (unsharded parameter, maybe with padding, tensors that hold its memory); Dynamo traces this."""
        with torch.no_grad():
            made = self._post(self.shard, tuple(outputs), metadata, self.dtype)
            if not (isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], Tensor)):
                self._refuse(POST, "(the unsharded tensor, a tuple of tensors that hold its memory)", made)
            return made[0], made[1]

    def without_padding(self, unsharded: Tensor) -> Tensor:
        """Return the part of ``unsharded`` that has the parameter's shape."""
        shape = self.shape
        if unsharded.shape == shape:
            return unsharded
        if unsharded.shape[1:] != shape[1:] or unsharded.dim() != len(shape) or unsharded.shape[0] < shape[0]:
            self._refuse(POST, f"a tensor of shape {shape}, or with more rows as padding", tuple(unsharded.shape))
        with torch.no_grad():
            return unsharded.narrow(0, 0, shape[0])

    def _refuse(self, method: str, expected: str, got: object) -> NoReturn:
        got = got if isinstance(got, tuple) and not any(isinstance(each, Tensor) for each in got) else type(got)
        raise unexpected(self.name, f"{type(self.shard).__name__}.{method} to return {expected}", got)

    def launch(self) -> tuple[list[Tensor], list[CommSpec]]:
        sent, self.metadata = self.split()
        plain, spec = list(map(_plain, sent)), CommSpec.decode(self.input_spec_text)
        return plain, [spec.for_input(each.shape, each.dtype) for each in plain]

    def refill(self, outputs: Sequence[Tensor], out: Tensor) -> None:
        """Fill ``out``, which :meth:`join` returned before, after another launch."""
        with torch.no_grad():
            self._post(self.shard, tuple(outputs), self.metadata, self.dtype, out=out)


@dataclass(frozen=True, eq=False)
class InnerTensors:
    """How one unsharded weight of a wrapper subclass is made of its inner tensors."""

    cls: type
    sharded: tuple[str, ...]  # inner tensors that are cut along dimension 0 where the weight is
    replicated: dict[str, Tensor]  # the others, the same on every rank
    others: tuple[Any, ...]  # arguments of ``__tensor_unflatten__`` for it: context, shape and stride

    def extend(self, shard: Tensor) -> Tensor:
        """Let ``shard`` have the two methods of :mod:`.extension`, and return it."""

        def split(shard: Tensor, mesh: object) -> tuple[tuple[Tensor, ...], None]:
            return tuple([getattr(shard, name) for name in self.sharded]), None

        def join(
            shard: Tensor, outputs: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
        ) -> tuple[Tensor, Sequence[Tensor]] | None:
            if out is not None:
                return None  # it consists of the very outputs
            inner = {**self.replicated, **dict(zip(self.sharded, outputs, strict=True))}
            return self.cls.__tensor_unflatten__(inner, *self.others), outputs  # type: ignore[attr-defined]

        setattr(shard, PRE, MethodType(split, shard))
        setattr(shard, POST, MethodType(join, shard))
        return shard


def inner_tensors(name: str, unsharded: Tensor, layout: ShardLayout) -> InnerTensors | None:
    """Return how to gather a wrapper subclass without an all-gather of its own; None for any other tensor.

    ``unsharded`` is the original parameter's tensor, under other parallelism this rank's part. NotImplementedError if
    it cannot be sharded by ``layout``.
    """
    if not is_wrapper(unsharded) or is_extended(unsharded):
        return None
    cls = type(unsharded)

    def refuse(expected: str) -> NoReturn:
        raise NotImplementedError(
            f"{name}: {cls.__name__} defines no all-gather, and sharding its inner tensors over {layout.world} ranks "
            f"expects {expected}; leave it whole on every rank with fully_shard(..., ignored_params={{...}})"
        )

    if layout.dim != 0 or not layout.is_even:
        refuse(f"only Shard(0) of equal parts, got Shard({layout.dim}) of {layout.shape}")
    try:
        part = unsharded.narrow(0, 0, layout.chunk).clone(memory_format=torch.contiguous_format).contiguous()
    except (NotImplementedError, RuntimeError, ValueError, AssertionError) as error:
        refuse(f"a class that can be sliced and copied, got: {str(error).strip().splitlines()[0]}")
    names, context = unsharded.__tensor_flatten__()  # type: ignore[attr-defined]
    sharded, replicated = [], {}
    for inner in names:
        whole, cut = getattr(unsharded, inner), getattr(part, inner)
        if cut.shape == whole.shape and layout.world > 1:
            replicated[inner] = whole
        elif (cut.shape[0] * layout.world, *cut.shape[1:]) == tuple(whole.shape):
            sharded.append(inner)
        else:
            sizes = f"{tuple(whole.shape)} of which a shard has {tuple(cut.shape)}"
            refuse(f"inner tensors that are cut along dimension 0, got {inner} of shape {sizes}")
    return InnerTensors(cls, tuple(sharded), replicated, (context, tuple(unsharded.shape), unsharded.stride()))
