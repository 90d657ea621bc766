"""Side streams of an accelerator, and work under way on one.

Work starts on a side stream at the point that compute has reached, and compute waits for it by events; the host waits
only where it reads the result. Tensors that both streams use are allocated on the compute stream and kept by the
:class:`Pending` until compute has waited; tensors that only the side stream uses come from that stream's own pool and
are freed at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar

import torch

from ..errors import FSDPError

_NEEDED = ("Stream", "stream", "current_stream", "current_device")  # of the module that torch has for a device

Begun = TypeVar("Begun")
Result = TypeVar("Result")
Following = TypeVar("Following")


class AcceleratorStreams:
    """The side streams of a device with an index, of any kind that PyTorch takes for an accelerator.

    By ``torch.accelerator``, because what the modules of devices have, such as CUDA's, takes the host longer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.Stream] = {}

    def _stream(self, name: str) -> torch.Stream:
        if name not in self._streams:
            # High priority, since compute waits for what runs here.
            self._streams[name] = torch.Stream(self._device, priority=-1)
        return self._streams[name]

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Run what follows on the side stream ``name``, after all that compute was given so far."""
        around, outside = self._current(), torch.accelerator.current_device_index()
        stream = self._stream(name)
        stream.wait_stream(around)
        torch.accelerator.set_stream(stream)  # and its device
        try:
            yield
        finally:
            torch.accelerator.set_stream(around)
            if outside != self._device.index:
                torch.accelerator.set_device_index(outside)

    def record(self, name: str) -> torch.Event:
        """Return an event after all that the side stream was given so far."""
        return self._stream(name).record_event()

    def wait(self, event: torch.Event) -> None:
        """Let the current stream wait for ``event``."""
        self._current().wait_event(event)

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device.index)


@cache
def has_streams(device: torch.device) -> bool:
    """Tell by its type whether ``device`` has streams, also on a machine that has none of these devices."""
    module = getattr(torch, device.type, None)
    return device.type != "cpu" and all(hasattr(module, name) for name in _NEEDED)  # a CPU's streams do nothing


def streams_of(device: torch.device) -> AcceleratorStreams | None:
    """Return the side streams of ``device``; None if it has none, as a CPU, which copies in turn with compute."""
    if not has_streams(device):
        return None
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return _streams_of(torch.device(device.type, index))


_streams_of = cache(AcceleratorStreams)


@dataclass(eq=False)
class Pending(Generic[Result]):
    """Started work: a collective and the copies around it."""

    finish: Callable[[], Result] | None  # does or awaits the rest and returns its result; holds what the work needs
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext  # makes what is entered around the wait
    _event: torch.Event | None = None  # after the work; None on a device without streams
    _join: Callable[[], None] | None = None  # lets compute wait for the event, until it has
    _held: object = None  # what the work reads, until compute has waited

    def wait(self) -> Result:
        """Let compute wait for the work, once, and release what the work has held."""
        if self.finish is None:
            raise FSDPError("a collective was waited for twice")
        with self.waiting():
            self._wait_for_event()
            finish, self.finish, self._held = self.finish, None, None
            return finish()

    def _wait_for_event(self) -> None:
        join, self._join = self._join, None
        if join is not None:
            join()

    def __del__(self) -> None:
        # An exception came between launch and wait: memory that the side stream still uses is about to be freed for
        # compute.
        if not sys.is_finalizing():
            self._wait_for_event()

    def wait_on_host(self) -> None:
        """Let the host wait for work that compute has waited for, and whose result the host will read."""
        if self._event is not None:
            self._event.synchronize()

    def then(self, name: str, device: torch.device, work: Callable[[Result], Following]) -> Pending[Following]:
        """Continue with the result on the side stream ``name``; without streams, when compute waits."""
        return launch(name, device, lambda: self, lambda begun: work(begun.wait()), held=(self.finish, self._held))


def launch(
    name: str,
    device: torch.device,
    begin: Callable[[], Begun],
    finish: Callable[[Begun], Result],
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    held: object = None,
) -> Pending[Result]:
    """Start work that runs at the same time as compute on ``device``: on the side stream ``name``.

    ``begin`` starts a collective. ``finish`` waits for it and unpacks its output: on the side stream; without
    streams, when compute waits. ``waiting`` makes what is entered when compute waits.
    """
    streams = streams_of(device)
    if streams is None:
        begun = begin()
        return Pending(lambda: finish(begun), waiting)
    with streams.on(name):
        result = finish(begin())
    event = streams.record(name)
    return Pending(lambda: result, waiting, event, partial(streams.wait, event), (begin, finish, held))
