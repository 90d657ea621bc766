"""Steps an optimizer on this rank's plain shards, and shows its parameters and state as DTensors.

Whoever sharded the parameters: those of ``torch.distributed.fsdp`` are accepted, too.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .expect import expect, expect_bool, unexpected

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

# Read in the source of torch 2.11.0, 2.13.0 and 2.15.0: besides a parameter's elements they use only step
# counts, and values computed from these, which are equal on all ranks.
_ADAMS = (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam)
ELEMENTWISE = frozenset({*_ADAMS, optim.ASGD, optim.Adadelta, optim.Adagrad, optim.RMSprop, optim.Rprop, optim.SGD})
# Norms, matrix products, line searches and sparse gradients.
NOT_ELEMENTWISE = (optim.Adafactor, optim.LBFGS, optim.Muon, optim.SparseAdam)
# Checked on torch 2.11.0, 2.13.0 and 2.15.0, as the two marks below by which schedulers know that a step ran. There
# are none of these hooks during a step: a subclass's that calls its parent's would run them again.
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def step_on_shards(optimizer: OptimizerT, *, elementwise: bool = False) -> OptimizerT:
    """Let an elementwise optimizer of DTensors step on each rank's plain shards, which saves DTensor's dispatch.

    Use it where the optimizer is made: ``optimizer = step_on_shards(torch.optim.AdamW(model.parameters()))``. Only
    what happens inside ``step`` changes. Parameter groups, gradients, ``optimizer.state``, state dicts, hooks and
    closures see DTensors as before. A state tensor that has the shape of the parameter's local shard is taken for
    one value per element and shown as a DTensor with the parameter's placements; others are shown as they are.
    Plain parameters are stepped as they are; a group may hold both.

    No tensor is copied, and none is kept between steps. A copied or unpickled optimizer steps on DTensors again until
    it is given to this function. ``torch.compile`` does not compile the step.

    Args:
        optimizer: changed in place. Its class's ``step`` must be the one it uses; a learning rate scheduler may be
            there already.
        elementwise: you know of a class that is not torch's own that each element's update depends on that element,
            its gradient and its state alone, and that its step changes nothing but parameters and state.

    Returns:
        ``optimizer`` itself.

    Raises:
        TypeError: ``optimizer`` is no optimizer, or ``elementwise`` no bool.
        ValueError: the optimizer is not elementwise or not known to be, it is differentiable, or its ``step`` was
            replaced. Each later ``step`` raises it, and changes nothing, for a DTensor that is ``Partial`` or has no
            dimension, and for a gradient or state that is not sharded like its parameter.
    """
    expect("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    expect_bool("elementwise", elementwise)
    if isinstance(optimizer, StepsOnShards):
        return optimizer
    _check_class(optimizer, elementwise)
    _check_params(optimizer)
    vars(optimizer).pop("step", None)  # of a learning rate scheduler: the new step does what it needs
    cls: type = type(optimizer)
    optimizer.__class__ = _on_shards(cls)
    return optimizer


def _check_class(optimizer: Optimizer, elementwise: bool) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, NOT_ELEMENTWISE):
        got = "one whose update of an element depends on others"
        raise unexpected(name, "an elementwise optimizer", got, "use it without step_on_shards")
    if type(optimizer) not in ELEMENTWISE and not elementwise:
        do = "pass elementwise=True if each element's update depends on that element alone"
        raise unexpected(name, "an optimizer of torch.optim that is known to be elementwise", "another class", do)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise unexpected(name, "differentiable=False", True, "a step on shards is not recorded by autograd")
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        do = "call step_on_shards before what replaces it"
        raise unexpected(f"{name}.step", "the method of its class", f"{replaced!r} on the object", do)


class StepsOnShards:
    """Mixin of an optimizer given to :func:`step_on_shards`; it comes before the optimizer's class."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy is of the class that the user knows, which can be pickled by name.
        reduced: Any = super().__reduce_ex__(protocol)
        return (object.__new__, (type(self).__mro__[2],), *reduced[2:])


@cache
def _on_shards(cls: type) -> type:
    """Return the one subclass of ``cls`` that steps on plain tensors; all state is on instances."""
    # The hooks of the step run outside: one that clips gradients needs DTensors to get the norm over all ranks.
    hooked = cls.step  # type: ignore[attr-defined]
    step = hooked.__wrapped__ if getattr(hooked, "hooked", False) else hooked

    @torch.compiler.disable(reason="a step on shards replaces the optimizer's tensors")  # type: ignore[untyped-decorator]
    @wraps(step)
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        def on_dtensors(closure: Callable[[], Any]) -> Any:
            shards.close()
            loss = closure()
            shards.enter_context(_plain_tensors(optimizer))
            return loss

        vars(optimizer)["_opt_called"] = True  # for learning rate schedulers
        if args and callable(args[0]):
            args = (partial(on_dtensors, args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs["closure"] = partial(on_dtensors, kwargs["closure"])
        with ExitStack() as shards:
            shards.enter_context(_plain_tensors(optimizer))
            return step(optimizer, *args, **kwargs)

    hooked_step: Any = Optimizer.profile_hook_step(run)
    hooked_step.hooked = True
    hooked_step._wrapped_by_lr_sched = True
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (StepsOnShards, cls), {"step": hooked_step, **names})


@contextmanager
def _plain_tensors(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer hold plain tensors that share memory with its DTensors, which it holds again afterwards.

    ValueError, before anything is changed, for a layout that cannot be stepped.
    """
    groups = optimizer.param_groups
    shown_params: list[list[Tensor]] = [group["params"] for group in groups]
    dtensors = (param for param in chain.from_iterable(shown_params) if isinstance(param, DTensor))
    leaves: dict[Any, Tensor] = {param: _leaf(param, optimizer) for param in dtensors}
    if not leaves.keys() <= optimizer.state.keys():  # what has state was checked before it got it
        _check_params(optimizer)
    attributes = {"state": _plain_state(optimizer, leaves), **{name: OrderedDict() for name in HOOKS}}
    shown = {name: getattr(optimizer, name) for name in attributes}
    for group, params in zip(groups, shown_params, strict=True):
        group["params"] = [leaves.get(param, param) for param in params]
    vars(optimizer).update(attributes)
    try:
        yield
    finally:
        owners = {leaf: param for param, leaf in leaves.items()}
        for key, values in optimizer.state.items():
            if key in owners:
                _show_state(values, shown["state"].setdefault(owners[key], {}), owners[key])
            else:
                shown["state"][key] = values
        for group, params in zip(optimizer.param_groups, shown_params, strict=True):
            group["params"] = params
        vars(optimizer).update(shown)


def _leaf(param: DTensor, optimizer: Optimizer) -> Tensor:
    """Return the plain tensor in place of ``param``, with its gradient."""
    leaf = param._local_tensor.detach()
    if param.grad is not None:
        leaf.requires_grad = True
        grad = _local(param.grad, param, optimizer)
        if grad.dtype != leaf.dtype:
            leaf.grad_dtype = grad.dtype
        leaf.grad = grad
    return leaf


def _plain_state(optimizer: Optimizer, leaves: Mapping[Any, Tensor]) -> defaultdict[Any, Any]:
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, values in optimizer.state.items():
        if isinstance(key, DTensor) and key in leaves:
            values = {name: _plain_value(value, key, name, optimizer) for name, value in values.items()}
        state[leaves.get(key, key)] = values
    return state


def _plain_value(value: Any, param: DTensor, name: str, optimizer: Optimizer) -> Any:
    if isinstance(value, DTensor):
        return _local(value, param, optimizer, f"state {name!r}")
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape != param._local_tensor.shape:
        got = f"a plain tensor of the whole shape {tuple(value.shape)}"
        do = "distribute it like the parameter before it is loaded"
        raise unexpected(_name(param, optimizer), f"a DTensor as state {name!r}", got, do)
    return value


def _local(tensor: Tensor, param: DTensor, optimizer: Optimizer, what: str = "gradient") -> Tensor:
    """Return the local tensor of what must be sharded like ``param``."""
    if not isinstance(tensor, DTensor):
        got = f"a plain tensor of shape {tuple(tensor.shape)}"
        raise unexpected(_name(param, optimizer), f"a DTensor as {what}", got, "distribute it like the parameter")
    spec, expected = tensor._spec, param._spec
    if spec is not expected and (spec.placements != expected.placements or spec.mesh != expected.mesh):
        alike = f"a {what} with the parameter's {_layout(param)}"
        raise unexpected(_name(param, optimizer), alike, _layout(tensor), "redistribute it before the step")
    return tensor._local_tensor


def _show_state(values: dict[str, Any], shown: dict[str, Any], param: DTensor) -> None:
    """Make ``shown``, which the user sees of a parameter's state, what a step left as ``values``."""
    for key, value in values.items():
        before = shown.get(key)
        if before is not value and not (isinstance(before, DTensor) and before._local_tensor is value):
            shown[key] = _shown_value(value, param)
    if len(shown) > len(values):
        for key in shown.keys() - values.keys():
            del shown[key]


def _shown_value(value: Any, param: DTensor) -> Any:
    """Return new state as its user sees it: with one value per element, as a DTensor of ``param``'s layout."""
    if not isinstance(value, Tensor) or value.shape != param._local_tensor.shape:
        return value
    spec = param._spec
    if value.dtype != param.dtype and spec.tensor_meta is not None:
        spec = spec.shallow_copy_with_tensor_meta(spec.tensor_meta._replace(dtype=value.dtype))
    return DTensor(value, spec, requires_grad=False)


def _check_params(optimizer: Optimizer) -> None:
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if isinstance(param, DTensor) and (param.dim() == 0 or any(p.is_partial() for p in param.placements)):
            got, do = f"shape {tuple(param.shape)} with {_layout(param)}", "use the optimizer without step_on_shards"
            raise unexpected(_name(param, optimizer), "a DTensor with a dimension and no Partial", got, do)


def _layout(tensor: DTensor) -> str:
    return f"{tensor.placements} on {tensor.device_mesh}"


def _name(param: Tensor, optimizer: Optimizer) -> str:
    for index, group in enumerate(optimizer.param_groups):
        for position, other in enumerate(group["params"]):
            if other is param:
                names = group.get("param_names")
                return names[position] if names else f"param_groups[{index}]['params'][{position}]"
    return "a parameter"
