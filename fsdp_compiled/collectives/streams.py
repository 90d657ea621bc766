"""Side streams of an accelerator, and work under way on one.

Work is begun on a side stream at the point that compute has reached, and waited for by events; by the host only where
it reads the result. What work and compute share comes from the compute stream's pool, where it is freed after compute
has waited for the work; what only the work uses comes from the side stream's pool and is freed at once. Only what a
graph has computed, and may forget before the wait, is lent by ``record_stream``.
It knows streams and events; it must not know tensors' meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..errors import FSDPError

Begun = TypeVar("Begun")
Result = TypeVar("Result")
Following = TypeVar("Following")


class Event(Protocol):
    """A point on a stream."""

    def synchronize(self) -> None:
        """Let the host wait for it."""


class Streams(Protocol):
    """A device's side streams, by name."""

    def beside(self, name: str) -> AbstractContextManager[Any]:
        """Run what follows on the side stream ``name``, after all that compute was given so far."""

    def record(self, name: str) -> Event:
        """Return an event after all that the side stream was given so far."""

    def wait(self, event: Event) -> None:
        """Let compute wait for ``event``."""

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Let nobody use the memory of ``tensor``, once it is freed, before the side stream is done with it."""


class CudaStreams:
    """The side streams of one CUDA device.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            # Of high priority, since compute waits for what runs here.
            self._streams[name] = torch.cuda.Stream(self._device, priority=-1)
        return self._streams[name]

    def beside(self, name: str) -> AbstractContextManager[Any]:
        stream = self._stream(name)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(stream)

    def record(self, name: str) -> Event:
        return self._stream(name).record_event()

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)  # type: ignore[arg-type]

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream(name))


class After(dist.Work):
    """A work that ends with all that a side stream was given so far.

    Args:
        streams: of the device.
        name: of the side stream.
        to_host: the host reads the result.
    """

    def __init__(self, streams: Streams, name: str, to_host: bool = False) -> None:
        super().__init__()
        self._streams = streams
        self._event = streams.record(name)
        self._to_host = to_host

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        """Let compute wait, or, if it reads the result, the host, as long as it takes."""
        if self._to_host:
            self._event.synchronize()
        else:
            self._streams.wait(self._event)
        return True


def streams_of(device: torch.device) -> Streams | None:
    """Return the side streams of ``device``; None for a CPU, where work is done in turn with compute."""
    if device.type != "cuda":
        return None
    return _cuda_streams(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_streams(index: int) -> CudaStreams:
    return CudaStreams(torch.device("cuda", index))


class Pending(Generic[Result]):
    """Work under way: a collective and the copies around it.

    Args:
        finish: does or awaits what is left of the work and returns its result; it holds what the work needs.
        event: after the work; None where compute does it, and with it the host.
    """

    def __init__(self, finish: Callable[[], Result], event: Event | None = None) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._event = event

    def wait(self) -> Result:
        """Let compute wait for the work, once, and forget what the work has held."""
        finish, self._finish = self._finish, None
        if finish is None:
            raise FSDPError("a collective was waited for twice")
        return finish()

    def wait_on_host(self) -> None:
        """Let the host wait for work that compute has waited for, and whose result the host is to read."""
        if self._event is not None:
            self._event.synchronize()

    def then(self, name: str, device: torch.device, work: Callable[[Result], Following]) -> Pending[Following]:
        """Go on with the result on the side stream ``name``, or, where there is none, when compute waits."""
        streams = streams_of(device)
        if streams is None:
            return Pending(lambda: work(self.wait()))
        held = self._finish
        with streams.beside(name):
            result = work(self.wait())
        return _under_way(streams, name, result, (held, work))


def launch(
    name: str, device: torch.device, begin: Callable[[], Begun], finish: Callable[[Begun], Result]
) -> Pending[Result]:
    """Begin work beside compute.

    Args:
        name: of the side stream.
        device: of compute.
        begin: starts a collective.
        finish: waits for it and copies its result out: on the side stream, or, where there is none, when compute
            waits.
    """
    streams = streams_of(device)
    if streams is None:
        begun = begin()
        return Pending(lambda: finish(begun))
    with streams.beside(name):
        result = finish(begin())
    return _under_way(streams, name, result, (begin, finish))


def _under_way(streams: Streams, name: str, result: Result, held: object) -> Pending[Result]:
    event = streams.record(name)

    def join() -> Result:
        streams.wait(event)
        return result

    join.held = held  # type: ignore[attr-defined]  # what the work reads, until compute waits for it
    return Pending(join, event)
