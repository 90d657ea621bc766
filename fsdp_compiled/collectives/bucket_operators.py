"""The operators of a kind of collective: one for a tensor alone, and for a bucket a launch and a wait for each stage.

A launch returns a *handle*, a tensor of one element whose Python object carries the work under way; the wait takes
the handle and returns the results. So nothing aliases, no table of works is needed, and what an exception leaves
behind is freed with the handle. The wait returns a list, so that every parameter and gradient is a buffer of its own
to Inductor, and kernels of equal layers are equal. Stages that follow pass handles on between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..agreement.ledger import agree
from ..errors import FSDPError
from ..passes import kinds, products
from ..passes.graph import nodes
from ..passes.kinds import Kind
from ..sharding.contract import Contract, contract_of
from ..sharding.spec import Bucket
from .all_gather import ALL_GATHER
from .reduction import REDUCTION

_library = torch.library.Library(nodes.NAMESPACE, "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator: its schema, what it computes on every device, and on fake tensors."""
    # CUDA graphs cannot hold what these do: they wait for other streams, and some read from the host.
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    name = schema.split("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{nodes.NAMESPACE}::{name}", partial(_traced, fake), lib=_library)


def _traced(fake: Callable[..., Any], *args: Any) -> Any:
    products.found_ours()
    return fake(*args)


def differentiate(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Give an operator its autograd formula."""
    torch.library.register_autograd(f"{nodes.NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)


def define_kind(kind: Kind) -> None:
    """Let graphs hold collectives of ``kind``: define its operators. The process keeps them for good."""
    _define_stages(kind)
    define(nodes.OPAQUE_SCHEMA.format(kind.opaque), partial(_opaque, kind), partial(opaque_fake, kind))


def run_alone(kind: Kind, tensor: Tensor, bucket: Bucket) -> Tensor:
    """Do for one tensor what its kind does, stage by stage; ranks agree before."""
    agree(contract_of(bucket))
    given: Any = [tensor]
    for stage in bucket.stages:
        given = kind.wait(kind.launch[stage](given, bucket), stage, bucket)
    (result,) = given
    return result


def _define_stages(kind: Kind) -> None:
    kinds.register(kind)
    for stage in kind.launch:
        define(nodes.LAUNCH_SCHEMA.format(stage), partial(_launch, kind, stage), partial(_launch_fake, kind, stage))
        define(nodes.WAIT_SCHEMA.format(stage), partial(_wait, kind, stage), partial(_wait_fake, kind, stage))


def _opaque(kind: Kind, tensor: Tensor, text: str) -> Tensor:
    return run_alone(kind, tensor, kind.bucket_of_one(text, tensor))


def opaque_fake(kind: Kind, tensor: Tensor, text: str) -> Tensor:
    """Return the result of :func:`run_alone` on fake tensors."""
    (result,) = kind.results(tensor, kind.bucket_of_one(text, tensor))
    return result


def _handle(device: torch.device, carried: Any) -> Tensor:
    handle = torch.empty(1, dtype=torch.uint8, device=device)
    handle.carried = carried  # type: ignore[attr-defined]
    return handle


def _take(handle: Tensor) -> Any:
    """Return what a handle carries, once."""
    carried = handle.__dict__.pop("carried", None)
    if carried is None:
        raise FSDPError("a collective was waited for that no launch started, or twice")
    return carried


def _launch(kind: Kind, stage: str, inputs: Sequence[Tensor], text: str, contract: str = "") -> Tensor:
    """Start a stage on tensors, or on what the handle of the stage before carries."""
    if contract:  # the first launch of a graph has that of all collectives of the graph
        agree(Contract.unpack(contract))
    bucket = kind.bucket.decode(text)
    given = inputs if stage == bucket.stages[0] else _take(inputs[0])
    return _handle(bucket.device_of(inputs), kind.launch[stage](given, bucket))


def _launch_fake(kind: Kind, stage: str, inputs: Sequence[Tensor], text: str, contract: str = "") -> Tensor:
    return inputs[0].new_empty(1, dtype=torch.uint8, device=kind.bucket.decode(text).device_of(inputs))


def _wait(kind: Kind, stage: str, handle: Tensor, text: str) -> list[Tensor]:
    """Return the results, or a handle for the stage that follows."""
    bucket = kind.bucket.decode(text)
    result = kind.wait(_take(handle), stage, bucket)
    return result if stage == bucket.stages[-1] else [_handle(handle.device, result)]


def _wait_fake(kind: Kind, stage: str, handle: Tensor, text: str) -> list[Tensor]:
    bucket = kind.bucket.decode(text)
    return kind.results(handle, bucket) if stage == bucket.stages[-1] else [torch.empty_like(handle)]


for _kind in (ALL_GATHER, REDUCTION):
    _define_stages(_kind)  # their opaque operators take more than a tensor, see operators.py
