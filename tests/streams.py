"""Side streams that record what happens on which, for CPU tensors; work is done at once, in the order of issue."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.collectives import comm, copies, streams

OPS = {
    "c10d._allgather_base_": "all-gather",
    "c10d.allgather_into_tensor_coalesced_": "all-gathers into place",
    "_c10d_functional.reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional.all_reduce": "all-reduce",
    "_c10d_functional.wait_tensor": "wait",
    "aten.mm": "compute",
    "aten.addmm": "compute",
}


class _Event:
    def __init__(self, streams: RecordingStreams, name: str) -> None:
        self.streams, self.name = streams, name

    def synchronize(self) -> None:
        self.streams.say(f"host waits for {self.name}")


class RecordingStreams:
    """Implements :class:`fsdp_compiled.collectives.streams.Streams`; ``log`` has a line for each event."""

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

    def beside(self, name: str):
        with self._on(name):
            self.say("waits for compute")
        return self._on(name)

    def record(self, name: str) -> _Event:
        return _Event(self, name)

    def wait(self, event: _Event) -> None:
        self.say(f"waits for {event.name}")

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        self.say(f"lends {name} {tensor.numel()} elements")

    def freed(self, tensor: torch.Tensor, what: str) -> None:
        """Say so when ``tensor`` is freed."""
        weakref.finalize(tensor, self.say, f"{what} freed")


class _Operators(TorchDispatchMode):
    def __init__(self, recording: RecordingStreams) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = OPS.get(str(func.overloadpacket))
        if name is not None:
            self.recording.say(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def recording(patch: pytest.MonkeyPatch, compute: bool = True) -> Iterator[RecordingStreams]:
    """Take the CPU for an accelerator, and record; without ``compute`` compiled code runs as it does outside."""
    found = RecordingStreams()
    patch.setattr(streams, "streams_of", lambda device: found)

    def recorded(place: ModuleType, name: str, words: str, result: str = ""):
        run = getattr(place, name)

        def call(*args, **kwargs):
            found.say(words)
            out = run(*args, **kwargs)
            if result:
                found.freed(out, result)
            return out

        patch.setattr(place, name, call)

    recorded(copies, "copy_in_shards", "copy in shards")
    recorded(copies, "copy_out_gathered", "copy out gathered")
    recorded(copies, "copy_in_gradients", "copy in gradients", "reduce-scatter input")
    recorded(copies, "copy_out_reduced", "copy out reduced")
    recorded(copies, "to_host", "to the host")
    if not compute:
        recorded(comm, "all_gather_into_tensor", "all-gather")
        recorded(comm, "all_gather_into_tensors", "all-gathers into place")
    with _Operators(found) if compute else nullcontext():
        yield found
