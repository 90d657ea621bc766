"""What this rank holds of an optimizer's parameters, gradients and state, and errors that name a parameter."""

from __future__ import annotations

from itertools import chain

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..expect import unexpected


def local_part_of(tensor: Tensor, param: DTensor, optimizer: Optimizer, what: str = "gradient") -> Tensor:
    """Return the local tensor of what must be sharded like ``param``."""
    if not isinstance(tensor, DTensor):
        got = f"a plain tensor of shape {tuple(tensor.shape)}"
        raise unexpected(name_of(param, optimizer), f"a DTensor as {what}", got, "distribute it like the parameter")
    spec, expected = tensor._spec, param._spec
    if spec is not expected and (spec.placements != expected.placements or spec.mesh != expected.mesh):
        alike = f"a {what} with the parameter's {layout_of(param)}"
        raise unexpected(name_of(param, optimizer), alike, layout_of(tensor), "redistribute it before the step")
    return tensor._local_tensor


def check_params(optimizer: Optimizer) -> None:
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if isinstance(param, DTensor) and any(p.is_partial() for p in param.placements):
            got = f"shape {tuple(param.shape)} with {layout_of(param)}"
            do = "use the optimizer without step_on_shards"
            raise unexpected(name_of(param, optimizer), "a DTensor without Partial", got, do)


def layout_of(tensor: DTensor) -> str:
    return f"{tensor.placements} on {tensor.device_mesh}"


def name_of(param: Tensor, optimizer: Optimizer) -> str:
    return names_of(optimizer).get(param, "a parameter")


def names_of(optimizer: Optimizer) -> dict[Tensor, str]:
    """Return each parameter's name; its place among the parameter groups if the optimizer was given no names."""
    found = dict[Tensor, str]()
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            found[param] = names[position] if names else f"param_groups[{index}]['params'][{position}]"
    return found
