"""What a read of a sharded parameter becomes in a graph: the all-gather, as a function of the leaf.

Dynamo traces these functions. Every attribute of a parameter that they read is a guard of every step, so the common
case reads few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import collectives
from ..param.extension import AllGatherExtension
from ..param.param import FSDPParam


def plain_spec(param: FSDPParam) -> str | None:
    """Return the spec of a read for which nothing else counts, or None."""
    return param.plain_spec if torch.is_grad_enabled() else param.plain_spec_without_grad


def unsharded(param: FSDPParam) -> Tensor:
    """Return the unsharded parameter."""
    if plain_spec(param) is not None or param.is_plain:
        return collectives.unshard(*unshard_arguments(param))
    local = unsharded_local(param)
    return local if param.outer is None else param.outer.wrap(local)


def unsharded_local(param: FSDPParam) -> Tensor:
    """Return it without other parallelism."""
    if param.extension is not None:
        return _extended(param, param.extension)
    return collectives.unshard(*unshard_arguments(param))


def unshard_arguments(param: FSDPParam) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    """Return the arguments of :func:`collectives.unshard` for a parameter without an extension."""
    spec = plain_spec(param)
    if spec is not None and param.leaf.requires_grad:
        return param.leaf, None, None, spec
    return *_leaves(param), param.spec_text


def _leaves(param: FSDPParam) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the leaf, and the one that takes its gradient instead: unsharded, or partially reduced."""
    if not param.requires_grad:
        return param.leaf.detach(), None, None
    if not torch.is_grad_enabled() or param.reduces_grads:
        return param.leaf, None, None
    config = param.unit.config
    if not config.reduce_grads and param.unsharded_grad.leaf is not None:
        return param.leaf, param.unsharded_grad.leaf, None
    if not config.all_reduce_grads and param.partial_grad.leaf is not None:
        return param.leaf, None, param.partial_grad.leaf
    return param.leaf, None, None


def _extended(param: FSDPParam, extension: AllGatherExtension) -> Tensor:
    sent, metadata = extension.split()
    gathered = (collectives.unshard(each, None, None, param.input_spec_text) for each in sent)
    outputs = [output.view(-1, *each.shape[1:]) for output, each in zip(gathered, sent, strict=True)]
    made = extension.without_padding(extension.join(outputs, metadata)[0])
    return collectives.with_gradient(made, *_leaves(param), param.spec_text)
