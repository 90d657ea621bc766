"""What a tensor subclass may do around the all-gather of its parameter: quantise it, and make the result.

A parameter's local tensor takes part if its class, or that tensor itself, has both methods of the protocol that
PyTorch's FSDP2 defines:

* ``fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)``, or with ``mesh`` alone, returns
  ``(inputs, metadata)``: what this rank sends, each with the shard's dimension 0 first, and anything;
* ``fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)`` returns ``(unsharded, inner tensors)``,
  or fills ``out``, which it returned before; rows that pad an uneven dimension 0 are cut off afterwards. Under tensor
  parallelism all of these are this rank's part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # checked on torch 2.11.0, 2.13.0 and 2.15.0

from ..expect import unexpected

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

    def launch(self) -> Sequence[Tensor]:
        """Return what this rank sends, and keep the metadata until :meth:`finish`."""
        sent, self._metadata = self.split()
        return list(map(_plain, sent))

    def finish(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Do what :meth:`join` does for the last launch."""
        return self.join(outputs, self._metadata)

    def refill(self, outputs: Sequence[Tensor], out: Tensor) -> None:
        """Fill ``out``, which :meth:`finish` returned before."""
        with torch.no_grad():
            self._post(self.shard, tuple(outputs), self._metadata, self.dtype, out=out)


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _are_tensors(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(each, Tensor) for each in value)
