"""Steps an optimizer on this rank's plain shards, and shows its parameters and state as DTensors.

It decides which optimizers may do so and what stands for a DTensor during a step. It must not know who sharded the
parameters: those of ``torch.distributed.fsdp`` do as well as this package's.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import cache, wraps
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .expect import expect, expect_bool, unexpected

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

# Read in the source of torch 2.11.0, 2.13.0 and 2.15.0: beside a parameter's elements they use only step counts,
# and what follows from those, which are equal on all ranks.
_ADAMS = (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam)
ELEMENTWISE = frozenset({*_ADAMS, optim.ASGD, optim.Adadelta, optim.Adagrad, optim.RMSprop, optim.Rprop, optim.SGD})
# Norms, matrix products, line searches and sparse gradients.
NOT_ELEMENTWISE = (optim.Adafactor, optim.LBFGS, optim.Muon, optim.SparseAdam)
# Checked on torch 2.11.0, 2.13.0 and 2.15.0, as the two marks below by which schedulers know that a step ran. The
# plain optimizer has no hooks: a subclass's step that calls its parent's would run them there again.
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def step_on_shards(optimizer: OptimizerT, *, elementwise: bool = False) -> OptimizerT:
    """Let an elementwise optimizer of DTensors step on each rank's plain shards, which saves DTensor's dispatch.

    Use it where the optimizer is made: ``optimizer = step_on_shards(torch.optim.AdamW(model.parameters()))``. Only
    what happens inside ``step`` changes. Parameter groups, gradients, ``optimizer.state``, state dicts, hooks and
    closures see DTensors as before. A state tensor that has the shape of the parameter's local shard is taken for
    one value per element and shown as a DTensor with the parameter's placements; others are shown as they are.
    Plain parameters, also beside DTensors in one group, are stepped as they are.

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
    """Return the one subclass of ``cls`` whose step runs on a plain optimizer; all state is on instances."""
    # The hooks of the step run outside: one that clips gradients needs DTensors to get the norm over all ranks.
    hooked = cls.step  # type: ignore[attr-defined]
    step = hooked.__wrapped__ if getattr(hooked, "hooked", False) else hooked

    @torch.compiler.disable(reason="a step on shards makes a plain optimizer")  # type: ignore[untyped-decorator]
    @wraps(step)
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        vars(optimizer)["_opt_called"] = True  # for learning rate schedulers
        stand_in = _StandIn(optimizer, cls)
        stand_in.take()
        if args and callable(args[0]):
            args = (stand_in.synchronized(args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs["closure"] = stand_in.synchronized(kwargs["closure"])
        try:
            return step(stand_in.plain, *args, **kwargs)
        finally:
            stand_in.give_back()

    hooked_step: Any = Optimizer.profile_hook_step(run)
    hooked_step.hooked = True
    hooked_step._wrapped_by_lr_sched = True
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (StepsOnShards, cls), {"step": hooked_step, **names})


class _StandIn:
    """An optimizer of plain tensors that share memory with another one's DTensors; it lives for one step."""

    def __init__(self, shown: Optimizer, cls: type[Optimizer]) -> None:
        self.shown = shown
        self.plain = object.__new__(cls)
        self._leaves: dict[Tensor, Tensor] = {}  # by parameter
        self._params: dict[Tensor, DTensor] = {}  # by leaf

    def take(self) -> None:
        """Give the plain optimizer all that the shown one has; ValueError for a layout that cannot be stepped."""
        groups = [
            {**group, "params": [self._leaf(param) for param in group["params"]]} for group in self.shown.param_groups
        ]
        attributes = {**vars(self.shown), "state": self._plain_state(), "param_groups": groups}
        vars(self.plain).update(attributes | {name: OrderedDict() for name in HOOKS})

    def _leaf(self, param: Tensor) -> Tensor:
        """Return the tensor that stands for ``param``, with its gradient."""
        if not isinstance(param, DTensor):
            return param
        if param in self._leaves:
            return self._leaves[param]
        leaf = self._leaves[param] = param._local_tensor.detach()
        self._params[leaf] = param
        if param.grad is not None:
            leaf.requires_grad = True
            local = self._local(param.grad, param)
            if local.dtype != leaf.dtype:
                leaf.grad_dtype = local.dtype
            leaf.grad = local
        return leaf

    def _plain_state(self) -> defaultdict[Any, Any]:
        if not self._leaves.keys() <= self.shown.state.keys():  # what has state was checked before it got it
            _check_params(self.shown)
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, values in self.shown.state.items():
            if isinstance(key, DTensor) and key in self._leaves:
                values = {name: self._plain_value(value, key, name) for name, value in values.items()}
            state[self._leaves.get(key, key)] = values
        return state

    def _plain_value(self, value: Any, param: DTensor, name: str) -> Any:
        if isinstance(value, DTensor):
            return self._local(value, param, name)
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape != param._local_tensor.shape:
            got = f"a plain tensor of the whole shape {tuple(value.shape)}"
            do = "distribute it like the parameter before it is loaded"
            raise unexpected(_name(param, self.shown), f"a DTensor as state {name!r}", got, do)
        return value

    def synchronized(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure of a step, during which the shown optimizer is up to date."""

        def evaluate() -> Any:
            self.give_back()
            loss = closure()
            self.take()
            return loss

        return evaluate

    def give_back(self) -> None:
        """Bring what the plain optimizer changed into the shown one, and leave the plain one empty."""
        changed = dict(vars(self.plain))
        vars(self.plain).clear()
        if not changed:  # a closure raised
            return
        for key, values in changed.pop("state").items():
            if key in self._params:
                self._show_values(values, self._params[key])
            else:
                self.shown.state[key] = values
        for group, plain in zip(self.shown.param_groups, changed.pop("param_groups"), strict=True):
            group.update({**plain, "params": group["params"]})
        vars(self.shown).update({name: value for name, value in changed.items() if name not in HOOKS})
        self._leaves, self._params = {}, {}

    def _show_values(self, values: dict[str, Any], param: DTensor) -> None:
        shown = self.shown.state.setdefault(param, {})
        for key, value in values.items():
            before = shown.get(key)
            if before is not value and not (isinstance(before, DTensor) and before._local_tensor is value):
                shown[key] = _shown_value(value, param)
        if len(shown) > len(values):
            for key in shown.keys() - values.keys():
                del shown[key]

    def _local(self, tensor: Tensor, param: DTensor, name: str | None = None) -> Tensor:
        """Return the local tensor of the gradient, or of the state of this name, that is sharded like ``param``."""
        if isinstance(tensor, DTensor):
            spec, expected = tensor._spec, param._spec
            if spec is expected or (spec.placements == expected.placements and spec.mesh == expected.mesh):
                return tensor._local_tensor
        what, of = "gradient" if name is None else f"state {name!r}", _name(param, self.shown)
        if isinstance(tensor, DTensor):
            alike = f"a {what} with the parameter's {_layout(param)}"
            raise unexpected(of, alike, _layout(tensor), "redistribute it before the step")
        got = f"a plain tensor of shape {tuple(tensor.shape)}"
        raise unexpected(of, f"a DTensor as {what}", got, "distribute it like the parameter")


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
