"""Side streams that record what happens on which, for CPU tensors; work is done at once, in the order of issue."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.collectives import backend, copies, streams

COMPUTE = ("aten.mm", "aten.addmm")


class _Event:
    def __init__(self, streams: RecordingStreams, name: str) -> None:
        self.streams, self.name = streams, name

    def synchronize(self) -> None:
        self.streams.say(f"host waits for {self.name}")


class RecordingStreams:
    """Stands in for :class:`fsdp_compiled.collectives.streams.AcceleratorStreams`; ``log`` has a line per event."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "compute"

    def say(self, what: str) -> None:
        self.log.append(f"{self.current}: {what}")

    @contextmanager
    def _on(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before

    def on(self, name: str):
        with self._on(name):
            self.say("waits for compute")
        return self._on(name)

    def record(self, name: str) -> _Event:
        return _Event(self, name)

    def wait(self, event: _Event) -> None:
        self.say(f"waits for {event.name}")

    def freed(self, tensor: torch.Tensor, what: str) -> None:
        """Say so when ``tensor`` is freed."""
        weakref.finalize(tensor, self.say, f"{what} freed")


class _Operators(TorchDispatchMode):
    def __init__(self, recording: RecordingStreams) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func.overloadpacket) in COMPUTE:
            self.recording.say("compute")
        return func(*args, **(kwargs or {}))


@contextmanager
def recording(patch: pytest.MonkeyPatch, compute: bool = True) -> Iterator[RecordingStreams]:
    """Take the CPU for an accelerator, and record; without ``compute`` compiled code runs as it does outside."""
    found = RecordingStreams()
    patch.setattr(streams, "streams_of", lambda device: found)

    def recorded(place: ModuleType, name: str, words: str):
        run = getattr(place, name)

        def call(*args, **kwargs):
            found.say(words)
            return run(*args, **kwargs)

        patch.setattr(place, name, call)

    pack, unpack = copies.pack, copies.unpack

    def recorded_pack(tensors, packed, dims=None, divisor=1.0):
        found.say("pack shards" if dims is None else "pack gradients")
        pack(tensors, packed, dims, divisor)
        if dims is not None:
            found.freed(packed, "reduce-scatter input")

    def recorded_unpack(packed, outs, dims=None, divisor=1.0):
        found.say("unpack gradients" if dims is None else "unpack parameters")
        unpack(packed, outs, dims, divisor)

    reduce_scatter, all_to_all = backend.reduce_scatter, backend.all_to_all

    def recorded_reduce_scatter(output, input, group, op):
        found.say("reduce-scatter")
        with patch.context() as inner:
            inner.setattr(backend, "all_to_all", all_to_all)  # on the CPU it is one
            return reduce_scatter(output, input.clone(), group, op)  # gloo's threads let go of it late

    patch.setattr(copies, "pack", recorded_pack)
    patch.setattr(copies, "unpack", recorded_unpack)
    recorded(copies, "to_host", "to the host")
    recorded(backend, "all_gather", "all-gather")
    recorded(backend, "all_gather_coalesced", "all-gathers into place")
    patch.setattr(backend, "reduce_scatter", recorded_reduce_scatter)
    recorded(backend, "all_reduce", "all-reduce")
    recorded(backend, "all_to_all", "all-to-all")
    recorded(backend, "wait", "wait")
    with _Operators(found) if compute else nullcontext():
        yield found
