"""Streams this rank's shards, of which only those that changed: for engines that are sharded themselves."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..expect import expect, unexpected
from ..hooks.backward import without_grad
from ..sharding.dtensor import local_of, local_part
from ..tracing.dynamo import module_inside
from .items import cast_dtype, check_streamed, sharded_tensors

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of an element
_AT_ONCE = 2**20  # elements that are hashed together; as many weights of 8 bytes are kept


class LocalShard(NamedTuple):
    """What this rank has of one tensor."""

    name: str  # as of ``stream_parameters``
    tensor: Tensor  # without padding
    part: tuple[slice, ...]  # of the complete tensor
    shape: tuple[int, ...]  # of the complete tensor


def stream_shards(
    model: nn.Module, *, since: MutableMapping[str, int] | None = None, dtype: torch.dtype | None = None
) -> Iterator[LocalShard]:
    """Return an iterator of this rank's part of a model's parameters and persistent buffers.

    It communicates nothing, and ranks may do as they like with it. Parameters must not change meanwhile.

    Args:
        model: a module with units, which may be compiled.
        since: a dict, empty at first, that is given to every call with the same ``dtype``. Shards whose bits are what
            this rank took last are left out. It holds a hash of 64 bits of each shard that was taken, and is updated
            once the next one is asked for. A change is missed with a probability of 2^-32 at the very most. None
            yields all shards.
        dtype: of floating-point tensors; None leaves each its own. A change that it rounds away is none.

    Yields:
        Shards that are not empty; what is not sharded on every rank. What is not cast is the model's own memory.

    Raises:
        TypeError: an argument of another type.
        ValueError: no unit lies in ``model``, or ``dtype`` is not floating-point.
        NotImplementedError: a parameter is a tensor subclass with an all-gather of its own.
    """
    states = check_streamed(model, dtype)
    expect("since", since, MutableMapping | None, "a dict or None")
    tensors = list[tuple[str, Tensor]]()
    for name, tensor, param in sharded_tensors(module_inside(model), states):
        if param is not None and param.extension is not None:
            expected, got = "plain shards", f"a {type(param.storage.local).__name__}, which extends its all-gather"
            raise unexpected(name, expected, got, "use stream_parameters", NotImplementedError)
        if local_of(tensor).numel():
            tensors.append((name, tensor))
    return _stream(tensors, since, dtype)


def _stream(
    tensors: Sequence[tuple[str, Tensor]], since: MutableMapping[str, int] | None, dtype: torch.dtype | None
) -> Iterator[LocalShard]:
    hashes = [None if since is None else _hash(_local(tensor, dtype)) for _, tensor in tensors]
    for (name, tensor), hashed in zip(tensors, hashes, strict=True):
        bits = None if hashed is None else int(hashed)
        if since is not None and since.get(name) == bits:
            continue
        part = local_part(tensor) if isinstance(tensor, DTensor) else tuple(map(slice, tensor.shape))
        yield LocalShard(name, _local(tensor, dtype), part, tuple(tensor.shape))
        if since is not None and bits is not None:
            since[name] = bits


@without_grad
def _local(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return local_of(tensor).detach().to(cast_dtype(tensor, dtype))


@without_grad
def _hash(tensor: Tensor) -> Tensor:
    """Return 64 bits on the tensor's device: a sum of its bits with odd weights, modulo 2^64.

    One element that changes always changes the sum. *Source:* universal hashing by a random linear function.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.contiguous().view(-1).view(_INTEGERS[real.itemsize])
    weights, total = _weights(bits.device), torch.zeros((), dtype=torch.int64, device=bits.device)
    for some in bits.split(_AT_ONCE):
        total = total * _FACTOR + (some.to(torch.int64) * weights[: len(some)]).sum()
    return total


_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd: 2^64 divided by the golden ratio, as a signed integer


@cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (_AT_ONCE,), generator=generator, device="cpu")
    return (drawn | 1).to(device)
