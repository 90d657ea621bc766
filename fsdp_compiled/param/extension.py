"""What a tensor subclass may do around the all-gather of its parameter: quantise it, and make the result.

A parameter's local tensor takes part if its class, or that tensor itself, has both methods of the protocol that
PyTorch's FSDP2 defines:

* ``fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)``, or with ``mesh`` alone, returns
  ``(inputs, metadata)``: what this rank sends, each with the shard's dimension 0 first, and anything;
* ``fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)`` returns ``(unsharded, inner tensors)``,
  or fills ``out``, which it returned before; rows that pad an uneven dimension 0 are cut off afterwards. Under tensor
  parallelism all of these are this rank's part.

A wrapper subclass that defines neither, such as torchao's quantised weights, is sharded by its own slicing. Its shard
is given the two methods: each inner tensor travels as it is, and the unsharded weight is made of the results.

This file knows single tensors; it must not know when they are all-gathered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # checked on torch 2.11.0, 2.13.0 and 2.15.0

from ..expect import unexpected
from ..policy import resolved
from ..sharding.layout import ShardLayout
from ..sharding.spec import CommSpec
from .placement import ParamPlacement

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(tensor: Tensor) -> bool:
    """Tell whether ``tensor``, or its class, extends the all-gather."""
    return hasattr(tensor, PRE) or hasattr(tensor, POST)


def check_extension(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless ``tensor`` has both methods or none, and the first takes 1 or 5 arguments."""
    found = [method for method in (PRE, POST) if hasattr(tensor, method)]
    if len(found) == 1:
        raise unexpected(name, f"{type(tensor).__name__} to define both {PRE} and {POST}", f"only {found[0]}")
    if found and _pre_arguments(tensor) not in (1, 5):
        either = "(mesh) or (mesh, outer_size, outer_stride, module, mp_policy)"
        got = inspect.signature(getattr(tensor, PRE))
        raise unexpected(name, f"{type(tensor).__name__}.{PRE} to take {either}", got)


def check_smaller_group(name: str, tensor: Tensor, world: int) -> None:
    """Raise NotImplementedError if an extended parameter is to stay sharded over a group of ``world`` ranks."""
    if world > 1 and is_extended(tensor):
        raise NotImplementedError(
            f"{name}: reshard_after_forward as a group size is not implemented for parameters with an all-gather "
            "extension; use True or False"
        )


def _pre_arguments(tensor: Tensor) -> int:
    return len(inspect.signature(getattr(tensor, PRE)).parameters)


def _function(method: Any) -> Callable[..., Any]:
    """Return a method as a function of the tensor: bound methods are not traced by Dynamo."""
    function: Callable[..., Any] | None = getattr(method, "__func__", None)
    return function if function is not None else lambda _, *args, **kwargs: method(*args, **kwargs)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor as it is, or what a wrapper subclass copies into a plain one: process groups know no other."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    plain.copy_(tensor)
    return plain


@dataclass(eq=False)
class AllGatherExtension:
    """The two methods of one parameter's local tensor, and what passes between them."""

    extended: InitVar[Tensor]  # it or its class has the methods
    shard: Tensor  # this rank's, padded
    arguments: InitVar[tuple[Any, ...]]  # the five of the first method, which may take the mesh alone
    dtype: torch.dtype  # of compute
    device: torch.device  # of compute
    shape: tuple[int, ...]  # of the unsharded parameter
    name: str = ""  # full name
    input_spec_text: str = ""  # the spec of each input but for its shape and dtype

    def __post_init__(self, extended: Tensor, arguments: tuple[Any, ...]) -> None:
        self._methods = getattr(extended, PRE), getattr(extended, POST)
        self._pre, self._post = map(_function, self._methods)
        self._arguments = arguments[: _pre_arguments(extended)]
        self._metadata: Any = None

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
            if not (_is_pair(sent) and _are_tensors(sent[0])):
                self._refuse(PRE, "(a tuple of tensors, metadata)", sent)
            wrapped = [each for each in sent[0] if type(each) not in (Tensor, nn.Parameter)]
            if wrapped and torch.compiler.is_compiling():
                self._refuse(PRE, "plain tensors where it is compiled", wrapped[0])
            return sent

    def join(self, outputs: Sequence[Tensor], metadata: Any) -> tuple[Tensor, Sequence[Tensor]]:
        """Return (unsharded parameter, maybe with padding, tensors that hold its memory); Dynamo traces this."""
        with torch.no_grad():
            made = self._post(self.shard, tuple(outputs), metadata, self.dtype)
            if not (_is_pair(made) and isinstance(made[0], Tensor)):
                self._refuse(POST, "(the unsharded tensor, a tuple of tensors that hold its memory)", made)
            return made

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
        """Return what this rank sends and by which specs, and keep the metadata until :meth:`finish`."""
        sent, self._metadata = self.split()
        plain, spec = list(map(_plain, sent)), CommSpec.decode(self.input_spec_text)
        return plain, [spec.for_input(each.shape, each.dtype) for each in plain]

    def finish(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Do what :meth:`join` does for the last launch."""
        return self.join(outputs, self._metadata)

    def refill(self, outputs: Sequence[Tensor], out: Tensor) -> None:
        """Fill ``out``, which :meth:`finish` returned before."""
        with torch.no_grad():
            self._post(self.shard, tuple(outputs), self._metadata, self.dtype, out=out)


def extension_of(
    local: Tensor, shard: Tensor, module: nn.Module, placement: ParamPlacement, shape: tuple[int, ...]
) -> AllGatherExtension | None:
    """Return the extension of a parameter, or None.

    Args:
        local: of the sharded parameter.
        shard: the same with padding.
        module: the first that the parameter is registered on.
        placement: how it is sharded.
        shape: of the unsharded parameter.
    """
    extended = next((tensor for tensor in (local, shard) if is_extended(tensor)), None)
    if extended is None:
        return None
    policy, unsharded = placement.mp_policy, torch.empty(shape, device="meta")
    arguments = (placement.mesh_info.shard_mesh, unsharded.shape, unsharded.stride(), module, policy)
    # The DTensor's local tensor itself, if it needs no padding: torchao keeps its scale there.
    sent = local if local.shape == shard.shape else shard
    return AllGatherExtension(extended, sent, arguments, resolved(policy, shard.dtype)[0], placement.device, shape)


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _are_tensors(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(each, Tensor) for each in value)


@dataclass(frozen=True, eq=False)
class InnerTensors:
    """How one unsharded weight of a wrapper subclass is made of its inner tensors."""

    cls: type
    sharded: tuple[str, ...]  # inner tensors that are cut along dimension 0 where the weight is
    replicated: dict[str, Tensor]  # the others, the same on every rank
    context: Any  # of the unsharded weight, for ``__tensor_unflatten__``
    shape: tuple[int, ...]
    stride: tuple[int, ...]

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
            made = self.cls.__tensor_unflatten__(inner, self.context, self.shape, self.stride)  # type: ignore[attr-defined]
            return made, outputs

        setattr(shard, PRE, MethodType(split, shard))
        setattr(shard, POST, MethodType(join, shard))
        return shard


def inner_tensors(name: str, unsharded: Tensor, layout: ShardLayout) -> InnerTensors | None:
    """Return how to gather a wrapper subclass without an all-gather of its own; None for any other tensor.

    ``unsharded`` is the original parameter's tensor, under other parallelism this rank's part. NotImplementedError if
    it cannot be sharded by ``layout``.
    """
    if not is_traceable_wrapper_subclass(unsharded) or is_extended(unsharded):
        return None
    cls = type(unsharded)
    if layout.dim != 0 or not layout.is_even:
        _refuse(name, cls, f"only Shard(0) of equal parts, got Shard({layout.dim}) of {layout.shape}", layout)
    try:
        part = unsharded.narrow(0, 0, layout.chunk).clone(memory_format=torch.contiguous_format).contiguous()
    except (NotImplementedError, RuntimeError, ValueError, AssertionError) as error:
        _refuse(
            name, cls, f"a class that can be sliced and copied, got: {str(error).strip().splitlines()[0]}", layout
        )
    names, context = unsharded.__tensor_flatten__()
    sharded, replicated = [], {}
    for inner in names:
        whole, cut = getattr(unsharded, inner), getattr(part, inner)
        if cut.shape == whole.shape and layout.world > 1:
            replicated[inner] = whole
        elif (cut.shape[0] * layout.world, *cut.shape[1:]) == tuple(whole.shape):
            sharded.append(inner)
        else:
            sizes = f"{tuple(whole.shape)} of which a shard has {tuple(cut.shape)}"
            _refuse(name, cls, f"inner tensors that are cut along dimension 0, got {inner} of shape {sizes}", layout)
    return InnerTensors(cls, tuple(sharded), replicated, context, tuple(unsharded.shape), unsharded.stride())


def _refuse(name: str, cls: type, expected: str, layout: ShardLayout) -> None:
    raise NotImplementedError(
        f"{name}: {cls.__name__} defines no all-gather, and sharding its inner tensors over {layout.world} ranks "
        f"expects {expected}; leave it whole on every rank with fully_shard(..., ignored_params={{...}})"
    )
