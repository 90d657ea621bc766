"""Ready-made communicators whose buffers are not PyTorch's: the process group's own, and symmetric memory.

Both need GPUs; each says so where a device or a process group cannot do it. Symmetric memory is CUDA's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from . import backend
from .interfaces import AllGather, Comm, RedOp, ReduceScatter


class ProcessGroupMemory(Comm):
    """Buffers that a process group's backend allocates, as NCCL does from memory registered with the network.

    Raises:
        RuntimeError: the group's backend for ``device`` allocates no tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._backend = group._get_backend(device)
        if not self._backend.supports_tensor_alloc(device):
            raise RuntimeError(
                f"process group {group.group_name!r}: expected a backend that allocates tensors on {device.type}, as "
                f"NCCL does on GPUs that support it, got {self._backend.name()!r}; leave buffers to PyTorch"
            )

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
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


class SymmetricMemory(Comm):
    """Buffers that every rank of a group sees, one for each size and dtype, kept as long as this object.

    An all-gather may use one again because no rank's part arrives before this rank's all-gather has begun, behind the
    copy-out of the last one on the same stream. ``backend`` is "NCCL" or "CUDA".

    Raises:
        RuntimeError: ``device`` is no GPU.
    """

    def __init__(self, device: torch.device, backend: str) -> None:
        if device.type != "cuda":
            raise RuntimeError(f"symmetric memory: expected GPUs, got {device.type}; leave buffers to PyTorch")
        self._memory = _symmetric_memory()
        self._memory.set_backend(backend)
        self._buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (prod(size), dtype, device)
        if key not in self._buffers:
            self._buffers[key] = self._memory.empty(prod(size), dtype=dtype, device=device)
        return self._buffers[key].view(*size)


class NCCLSymmetricAllGather(SymmetricMemory, AllGather):
    """NCCL's all-gather into symmetric memory, which it serves by its symmetric kernels.

    With the process group's ``config.cta_policy`` (or ``NCCL_CTA_POLICY=2``) at zero, NCCL uses the copy engines
    inside a node, which takes no compute units.
    """

    def __init__(self, device: torch.device, backend: str) -> None:
        super().__init__(device, backend)
        self._met: set[tuple[str, int]] = set()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        place = (group.group_name, output_tensor.data_ptr())
        if place not in self._met:
            # A rendezvous needs the communicator, which NCCL makes for the first collective.
            dist.barrier(group, device_ids=[input_tensor.get_device()])
            self._memory.rendezvous(output_tensor, group.group_name)
            self._met.add(place)
        return backend.all_gather(output_tensor, input_tensor, group)


class CopyEngineAllGather(SymmetricMemory, AllGather):
    """Every rank copies its part into the others' buffers by the GPUs' copy engines, which takes no compute units."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        # The result is in order on the current stream.
        handle = self._memory.rendezvous(output_tensor, group.group_name)
        numel = input_tensor.numel()
        handle.barrier(channel=0)  # nobody reads what the last all-gather left
        for step in range(handle.world_size):
            peer = (handle.rank + step) % handle.world_size  # so that not all write to one
            theirs = handle.get_buffer(peer, (numel,), input_tensor.dtype, handle.rank * numel)
            if theirs.data_ptr() != input_tensor.data_ptr():
                theirs.copy_(input_tensor, non_blocking=True)
        handle.barrier(channel=0)
        return None


# Units own what they share, and its buffers, so that these are freed with the last unit.
_shared: WeakValueDictionary[Hashable, AllGather] = WeakValueDictionary()


def symmetric_all_gather(device: torch.device, backend: str, groups: tuple[str, ...]) -> AllGather:
    """Return the all-gather that all units share which use symmetric memory over the groups of these names."""
    kind = NCCLSymmetricAllGather if backend == "NCCL" else CopyEngineAllGather
    key = (device, backend, groups)
    return _shared.get(key) or _shared.setdefault(key, kind(device, backend))


def _symmetric_memory() -> Any:
    # Checked for its names on torch 2.11.0, 2.13.0 and 2.15.0; without GPUs never run.
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory
