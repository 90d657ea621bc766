"""A process group of simulated ranks, for one GPU alone: what rank 0 would compute, copy and wait for.

Every other rank's part is this rank's own: an all-gather writes it to all ranks' places, a reduce-scatter takes this
rank's chunk, and an all-to-all gets what this rank sends. That happens on a stream of the group's, as NCCL's does,
and writes as much memory. With ``SimulatedGroup.wire`` each collective also keeps that stream busy for as long as the
cluster's model says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compiled.collectives import streams
from fsdp_compiled.passes import cost
from fsdp_compiled.passes.cost.matrix_cost import all_to_all_us

STREAM = "simulated link"


class _Done(dist.Work):
    """Work that is complete, or ends with an event on a side stream."""

    def __init__(self, side: streams.AcceleratorStreams | None = None) -> None:
        super().__init__()
        self._side = side
        self._event = side.record(STREAM) if side is not None else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._side is not None and self._event is not None:
            self._side.wait(self._event)
        return True


class SimulatedGroup(dist.ProcessGroup):
    """Rank 0 of ``size``; see the module."""

    wire = False  # whether collectives take their time

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return "simulated"

    def _allgather_base(self, output: Tensor, input: Tensor, options: object = None) -> dist.Work:
        return self._send([output], [input], reduces=False)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: object = None
    ) -> dist.Work:
        return self._send(outputs, inputs, reduces=False)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, options: object = None) -> dist.Work:
        return self._send([output], [input], reduces=True)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: object = None
    ) -> dist.Work:
        return self._send(outputs, inputs, reduces=True)

    def alltoall_base(
        self, output: Tensor, input: Tensor, received: object, sent: object, options: object = None
    ) -> dist.Work:
        def microseconds() -> float:
            return all_to_all_us(input.numel() * input.element_size(), range(self.size()), _cluster(input.device))

        return self._on_link(input.device, partial(_repeat, output, input), microseconds)

    # Their names from torch 2.13 on.
    all_to_all_single = alltoall_base
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced

    def _send(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduces: bool) -> dist.Work:
        device = inputs[0].device
        takes = partial(self._collective_us, inputs if reduces else outputs, device, reduces)
        return self._on_link(device, partial(self._move, outputs, inputs, reduces), takes)

    def _on_link(self, device: torch.device, move: Callable[[], None], takes: Callable[[], float]) -> dist.Work:
        """Let ``move`` run on the stream, which with a wire is busy for the microseconds that ``takes`` returns."""
        side = streams.streams_of(device)
        if side is None:
            move()
            return _Done()
        with side.on(STREAM):
            move()
            if self.wire:
                torch.cuda._sleep(int(takes() * 1e-6 * _cycles_per_second(device)))
        return _Done(side)

    def _move(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduces: bool) -> None:
        if reduces:
            for output, input in zip(outputs, inputs, strict=True):
                output.view(-1).copy_(input[: output.numel()])
            return
        for output, input in zip(outputs, inputs, strict=True):
            ranks = output.view(self.size(), -1)
            is_in_place = ranks.data_ptr() == input.data_ptr()
            (ranks[1:] if is_in_place else ranks).copy_(input)  # to every rank's place

    def _collective_us(self, buffers: Sequence[Tensor], device: torch.device, reduces: bool) -> float:
        cluster, world = _cluster(device), self.size()
        link = cluster.link_of(range(world))
        size_bytes = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
        return link.collective_us(size_bytes, world, reduces=reduces) + (len(buffers) - 1) * cluster.piece_us


def _repeat(output: Tensor, input: Tensor) -> None:
    """Fill ``output`` with ``input`` again and again; both are 1-D."""
    if not input.numel():
        output.zero_()
        return
    for part in output.split(input.numel()):
        part.copy_(input[: part.numel()])


_cluster = cache(cost.detect)  # which looks for network cards
_cycles: dict[torch.device, float] = {}


def _cycles_per_second(device: torch.device) -> float:
    if device not in _cycles:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(10**6)
        start.record()
        torch.cuda._sleep(10**7)
        end.record()
        end.synchronize()
        _cycles[device] = 10**7 / (start.elapsed_time(end) / 1e3)
    return _cycles[device]


def measure_clock(device: torch.device) -> float | None:
    """Find out how many cycles a second has for a GPU that sleeps; call it while the GPU is warm and idle."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    return _cycles_per_second(device)


def start(world: int) -> None:
    """Make the default process group one of ``world`` simulated ranks."""
    dist.init_process_group("simulated", store=dist.HashStore(), rank=0, world_size=world)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(rank, size)


dist.Backend.register_backend("simulated", _create, devices=["cpu", "cuda"])
