"""PyTorch's record of what was applied to a module: ``fully_shard``, ``replicate``. Each leaves the other's alone.

``torch.distributed._composable.replicate`` skips modules by it, as PyTorch's own ``fully_shard`` does.
``torch.distributed.fsdp.fully_shard.state(module)`` returns the state noted there.
"""

from __future__ import annotations

import torch.distributed.fsdp as torch_fsdp
from torch import nn

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

_FULLY_SHARD = torch_fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]  # what states are noted under


def applied(module: nn.Module) -> dict[str, RegistryItem]:
    """Return what was applied to ``module``, by the name of the function."""
    found: dict[str, RegistryItem] = module.__dict__.get(REGISTRY_KEY, {})
    return found


def note_sharded(module: nn.Module, state: object) -> None:
    """Let PyTorch's composable functions see that ``fully_shard`` was applied to ``module``, with what state."""
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
    module.__dict__.setdefault(STATE_KEY, {})[_FULLY_SHARD] = state
