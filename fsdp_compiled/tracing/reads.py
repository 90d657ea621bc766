"""What a read of a sharded parameter becomes in a graph: the all-gather, as a function of the leaf.

Dynamo traces these functions. Every attribute of a parameter that they read is a guard of every step, so the common
case reads one, and the leaf; see :meth:`FSDPParam.follow_call`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import collectives
from ..param.extension import AllGatherExtension
from ..param.param import FSDPParam


def _plain_spec(param: FSDPParam) -> str | None:
    """Return the spec of a read for which nothing else counts, HELD, or None."""
    return param.plain_spec if torch.is_grad_enabled() else param.plain_spec_without_grad


def is_held(param: FSDPParam) -> bool:
    """Tell whether eager hooks hold the unsharded parameter, so that a read is of what is registered."""
    spec = _plain_spec(param)
    return spec is not None and not spec  # == HELD, without a guard on that global


def unsharded(param: FSDPParam) -> Tensor:
    """Return the unsharded parameter."""
    if _plain_spec(param):
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
    spec = _plain_spec(param)
    if spec:
        return (param.leaf if param.leaf.requires_grad else param.leaf.detach()), None, None, spec
    return *_leaves(param), param.spec_text


def _leaves(param: FSDPParam) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the leaf, and the one that takes its gradient instead: unsharded, or partially reduced."""
    if not (param.leaf.requires_grad if param.leaf_is_current else param.sharded_param.requires_grad):
        return param.leaf.detach(), None, None
    if not torch.is_grad_enabled():
        return param.leaf, None, None
    return param.leaf, param.gradients.unsharded_leaf, param.gradients.partial_leaf


def _extended(param: FSDPParam, extension: AllGatherExtension) -> Tensor:
    sent, metadata = extension.split()
    gathered = (collectives.unshard(each, None, None, extension.input_spec_text) for each in sent)
    outputs = [output.view(-1, *each.shape[1:]) for output, each in zip(gathered, sent, strict=True)]
    made = extension.without_padding(extension.join(outputs, metadata)[0])
    return collectives.with_gradient(made, *_leaves(param), param.spec_text)
