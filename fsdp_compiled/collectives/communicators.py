"""What may stand in place of the collectives: ready-made communicators, and how operators find objects.

A communicator gets 1-D tensors; the output is in order of rank. It returns the work to wait for, or None if the
output is complete, or in order on the current stream. The ready-made ones have buffers that are not PyTorch's: the
process group's own, and symmetric memory. Both need GPUs; each says so where a device or a process group cannot do
it. A graph holds only strings and numbers, so an object that the user gave is found by the name that ``register``
returned. The names count the objects of this process, so that ranks that run one program agree on them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import FSDPError
from . import backend
from .backend import AllGather, Comm, RedOp, ReduceScatter
from .streams import has_streams


class Hook:
    """A function on reduced, packed gradients, as an object that can be referred to weakly."""

    def __init__(self, run: Callable[[Tensor], None], stream: torch.Stream | None = None) -> None:
        self._run = run
        self._stream = stream  # where it runs; None for the stream on which the reduction ends

    def __call__(self, packed: Tensor) -> None:
        """Run the function between what came before and what comes after."""
        if self._stream is None:
            self._run(packed)
            return
        around = torch.accelerator.current_stream(packed.device)
        self._stream.wait_stream(around)
        with self._stream:
            self._run(packed)
        around.wait_stream(self._stream)


class _Registered(WeakValueDictionary[str, "Comm | Hook"]):
    """Objects by name. No name is given twice: a graph that was compiled for an object now gone finds nothing."""

    given = 0


_registered = _Registered()  # the callers own the objects


def register(value: Comm | Hook) -> str:
    """Return the name by which operators find ``value`` as long as the caller keeps it; always the same one."""
    known = next((name for name, each in _registered.items() if each is value), None)
    if known is None:
        known, _registered.given = str(_registered.given), _registered.given + 1
        _registered[known] = value
    return known


def registered(name: str, kind: type) -> Any:
    """Return the object of this name; FSDPError if there is none, or none of this kind."""
    found = _registered.get(name)
    if not isinstance(found, kind):
        raise FSDPError(f"custom communication {name!r}: expected {kind.__name__}, found {found!r}; compile again")
    return found


class ProcessGroupMemory(Comm):
    """Buffers that a process group's backend allocates, as NCCL does from memory registered with the network.

    RuntimeError if the group's backend for ``device`` allocates no tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._backend = backend.backend_of(group, device)
        if not self._backend.supports_tensor_alloc(device):
            raise RuntimeError(
                f"process group {group.group_name!r}: expected a backend that allocates tensors on {device.type}, as "
                f"NCCL does on GPUs that support it, got {self._backend.name()!r}; leave buffers to PyTorch"
            )

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._backend.allocate_tensor(prod(size), dtype=dtype, device=device).view(*size)


class ProcessGroupAllGather(ProcessGroupMemory, AllGather):
    """The process group's all-gather into memory of its own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return backend.all_gather(output_tensor, input_tensor, group)


class ProcessGroupReduceScatter(ProcessGroupMemory, ReduceScatter):
    """The process group's reduce-scatter into memory of its own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: RedOp, async_op: bool = False
    ) -> dist.Work | None:
        return backend.reduce_scatter(output_tensor, input_tensor, group, op)


class SymmetricAllGather(AllGather):
    """An all-gather into buffers that every rank of a group sees, one for each size and dtype, kept as long as this.

    It may use one again because no rank's part arrives before this rank's all-gather has begun, behind the copy-out
    of the last one on the same stream.

    Args:
        device: where compute runs; RuntimeError if it is no GPU.
        name: of symmetric memory's backend. By "NCCL", NCCL's symmetric kernels gather; with the process group's
            ``config.cta_policy`` (or ``NCCL_CTA_POLICY=2``) at zero, NCCL uses the copy engines inside a node, which
            takes no compute units. By "CUDA", every rank copies its part into the others' buffers by copy engines.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        if not has_streams(device):
            raise RuntimeError(f"symmetric memory: expected GPUs, got {device.type}; leave buffers to PyTorch")
        self._memory = backend.symmetric_memory()
        if self._memory.get_backend(device) != name:  # which also refuses one that a build has as its default alone
            self._memory.set_backend(name)
        self._name = name
        self._buffers: dict[Hashable, Tensor] = {}
        self._met: set[tuple[str, int]] = set()  # groups, and the buffers in which their ranks have met

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (prod(size), dtype, device)
        if key not in self._buffers:
            self._buffers[key] = self._memory.empty(prod(size), dtype=dtype, device=device)
            torch.accelerator.synchronize(device)  # it is cleared on a stream for which ours do not wait
        return self._buffers[key].view(*size)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        run = self._by_nccl if self._name == "NCCL" else self._by_copies
        return run(output_tensor, input_tensor, group)

    def _by_nccl(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> dist.Work:
        place = (group.group_name, output.data_ptr())
        if place not in self._met:
            # A rendezvous needs the communicator, which NCCL makes for the first collective.
            dist.barrier(group, device_ids=[input.get_device()])
            self._memory.rendezvous(output, group.group_name)
            self._met.add(place)
        return backend.all_gather(output, input, group)

    def _by_copies(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """Leave the result in order on the current stream."""
        place = (group.group_name, output.data_ptr())
        is_new = place not in self._met
        if is_new:  # its tables, too, are filled on such a stream, in memory that ours may still use
            torch.accelerator.synchronize(output.device)
        handle = self._memory.rendezvous(output, group.group_name)
        if is_new:
            torch.accelerator.synchronize(output.device)
            self._met.add(place)
        numel = input.numel()
        handle.barrier(channel=0)  # nobody reads what the last all-gather left
        for step in range(handle.world_size):
            peer = (handle.rank + step) % handle.world_size  # so that not all write to one
            theirs = handle.get_buffer(peer, (numel,), input.dtype, handle.rank * numel)
            if theirs.data_ptr() != input.data_ptr():
                theirs.copy_(input, non_blocking=True)
        handle.barrier(channel=0)


# Units own what they share, and its buffers, so that these are freed with the last unit.
_shared: WeakValueDictionary[Hashable, AllGather] = WeakValueDictionary()


def symmetric_all_gather(device: torch.device, name: str, groups: tuple[str, ...]) -> AllGather:
    """Return the all-gather that all units share which use symmetric memory over the groups of these names."""
    key = (device, name, groups)
    return _shared.get(key) or _shared.setdefault(key, SymmetricAllGather(device, name))
