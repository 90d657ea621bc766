"""Which devices have side streams and which copies they use; a stand-in for an accelerator of any kind."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fsdp_compiled.collectives import copies, reference, streams
from fsdp_compiled.collectives.streams import has_streams


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mtia"])
def test_accelerators_have_streams_wherever_a_graph_is_compiled(kind):
    assert has_streams(torch.device(kind)) and has_streams(torch.device(kind, 1))


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps", "xla"])
def test_other_devices_have_none(kind):
    assert not has_streams(torch.device(kind))
    assert streams.streams_of(torch.device(kind)) is None


class _Stream:
    """A stream that writes down what it waits for."""

    def __init__(self, log, name, priority=0):
        self.log, self.name = log, name
        log.append(f"{name} of priority {priority}")

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        return SimpleNamespace(name=f"an event on {self.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")


@pytest.mark.parametrize("kind", ["cuda", "xpu", "privateuseone"])
def test_every_accelerator_takes_the_same_path(kind, monkeypatch):
    log = []
    current = [_Stream(log, "compute")]
    module = SimpleNamespace(Stream=None, current_stream=None, current_device=lambda: 1, stream=None)
    monkeypatch.setattr(torch, kind, module, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)  # torch 2.15's remembers the real one
    monkeypatch.setattr(torch, "Stream", lambda device, priority: _Stream(log, f"side of {device}", priority))
    accelerator = SimpleNamespace(
        current_stream=lambda index: current[-1],
        current_device_index=lambda: 0,
        set_stream=lambda stream: current.append(stream) or log.append(f"on {stream.name}"),
        set_device_index=lambda index: log.append(f"device {index}"),
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    has_streams.cache_clear()
    streams._streams_of.cache_clear()
    pending = streams.launch(
        "all-gathers", torch.device(kind), lambda: log.append("begin"), lambda _: log.append("finish") or 5
    )
    log.append("compute goes on")
    assert pending.wait() == 5
    has_streams.cache_clear()
    streams._streams_of.cache_clear()
    side = f"side of {kind}:1"
    assert log == [
        "compute of priority 0",
        f"{side} of priority -1",
        f"{side} waits for compute",
        f"on {side}",
        "begin",
        "finish",
        "on compute",
        "device 0",
        "compute goes on",
        f"compute waits for an event on {side}",
    ]


def test_triton_copies_where_it_has_a_driver(monkeypatch):
    kernels = pytest.importorskip("fsdp_compiled.collectives.kernels")

    def module(kind, is_complex=False):
        copies._module.cache_clear()
        return copies._for(mock.Mock(device=torch.device(kind), is_complex=lambda: is_complex))

    driver = SimpleNamespace(get_active_torch_device=lambda: torch.device("xpu", 0))
    monkeypatch.setattr(kernels, "driver", SimpleNamespace(active=driver))
    assert module("xpu") is kernels
    assert module("xpu", is_complex=True) is module("cpu") is module("mtia") is reference
    copies._module.cache_clear()
