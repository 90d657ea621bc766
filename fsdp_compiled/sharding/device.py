"""What devices can do, told by their type alone: the same on a machine that has none of them.

So a graph for an accelerator is scheduled alike wherever it is compiled. It must not know what runs on a device.
"""

from __future__ import annotations

from functools import cache

import torch

_NEEDED = ("Stream", "stream", "current_stream", "current_device")  # of the module that torch has for a device


@cache
def has_streams(device: torch.device) -> bool:
    """Tell whether ``device`` has streams, on which copies and collectives run at the same time as compute."""
    module = getattr(torch, device.type, None)
    return device.type != "cpu" and all(hasattr(module, name) for name in _NEEDED)  # a CPU's streams do nothing
