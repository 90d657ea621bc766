"""How operators of this library are defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..passes.graph import nodes

_library = torch.library.Library(nodes.NAMESPACE, "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator: its schema, what it computes on every device, and on fake tensors."""
    # CUDA graphs cannot hold what these do: they wait for other streams, and some read from the host.
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    name = schema.split("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{nodes.NAMESPACE}::{name}", fake, lib=_library)


def differentiate(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Give an operator its autograd formula."""
    torch.library.register_autograd(f"{nodes.NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)
