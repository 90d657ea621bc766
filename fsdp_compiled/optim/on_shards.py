"""Lets an optimizer step on this rank's shards: elementwise ones on plain tensors, those of matrices by owners.

Whoever sharded the parameters: those of ``torch.distributed.fsdp`` are accepted, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from ..expect import expect, expect_bool, unexpected
from ..subclasses import Unannounced, layout_base
from .local_parts import check_params
from .local_tensors import local_tensors
from .matrix_rules import RULES, NewtonSchulz
from .matrix_step import MatrixStep, matrix_step

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

# Read in the source of torch 2.11.0, 2.13.0 and 2.15.0: besides a parameter's elements they use only step
# counts, and values computed from these, which are equal on all ranks.
_ADAMS = (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam)
ELEMENTWISE = frozenset({*_ADAMS, optim.ASGD, optim.Adadelta, optim.Adagrad, optim.RMSprop, optim.Rprop, optim.SGD})
# Norms, line searches and sparse gradients.
NOT_ELEMENTWISE = (optim.Adafactor, optim.LBFGS, optim.SparseAdam)


def step_on_shards(
    optimizer: OptimizerT,
    *,
    elementwise: bool = False,
    blocks: Mapping[Tensor, Sequence[int]] | None = None,
    newton_schulz: NewtonSchulz | None = None,
) -> OptimizerT:
    """Let an optimizer of DTensors step on each rank's shards, which saves DTensor's dispatch and collectives.

    Use it where the optimizer is made: ``optimizer = step_on_shards(torch.optim.AdamW(model.parameters()))``. Only
    what happens inside ``step`` changes. Parameter groups, gradients, ``optimizer.state``, state dicts, hooks and
    closures see DTensors as before. A state tensor that has the shape of the parameter's local shard is taken for
    one value per element and shown as a DTensor with the parameter's placements; others are shown as they are.
    Plain parameters are stepped as they are; a group may hold both.

    No tensor is copied, and none is kept between steps. A copied or unpickled optimizer steps on DTensors again until
    it is given to this function. A second call changes nothing. ``torch.compile`` does not compile the step.

    ``torch.optim.Muon`` needs complete matrices. Momentum is updated on shards; each matrix then travels in bf16 to
    one rank, its owner, which runs torch's Newton-Schulz, and its update travels back in bf16. fp32 parameters get
    the bits of one process; bf16 ones keep their momentum with ``nesterov=False``, where torch before 2.15 loses it.
    Replicas do the same, or share the owners where that is estimated to be faster. Parameters of three dimensions,
    which ``add_param_group`` takes, are stacks of matrices.

    Args:
        optimizer: changed in place. Its class's ``step`` must be the one it uses; a learning rate scheduler may be
            there already.
        elementwise: you know of a class that is not torch's own that each element's update depends on that element,
            its gradient and its state alone, and that its step changes nothing but parameters and state.
        blocks: of Muon parameters that hold several matrices, the rows of each, as ``{wqkv.weight: (64, 16, 16)}``.
        newton_schulz: runs in place of torch's in Muon, on ``(matrix, ns_coefficients, ns_steps, eps)``: a contiguous
            bf16 matrix, which it may overwrite. It returns the update, of the same shape.

    Returns:
        ``optimizer`` itself.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the optimizer is not elementwise or not known to be, it is differentiable, it holds another one,
            or its ``step`` was replaced; ``blocks`` do not fit; or a second call has ``blocks`` or
            ``newton_schulz``. Each later ``step`` raises it, and changes nothing, for a DTensor that is ``Partial``
            or has no dimension, and for a gradient or state that is not sharded like its parameter.
        NotImplementedError: matrices that are sharded over several mesh dimensions (tensor parallelism), or that are
            offloaded to the CPU.
    """
    expect("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    expect_bool("elementwise", elementwise)
    rule = RULES.get(type(optimizer))
    if rule is None:
        _refuse_matrices(optimizer, blocks=blocks, newton_schulz=newton_schulz)
    if isinstance(optimizer, StepsOnShards):
        return optimizer
    _check_class(optimizer, elementwise or rule is not None)
    check_params(optimizer)
    matrices = None if rule is None else matrix_step(optimizer, rule, blocks or {}, newton_schulz)
    vars(optimizer).pop("step", None)  # of a learning rate scheduler: the new step does what it needs
    cls: type = type(optimizer)
    optimizer.__class__ = _on_shards(cls)
    vars(optimizer)["_matrices"] = matrices
    return optimizer


def _refuse_matrices(optimizer: Optimizer, **arguments: object) -> None:
    """Raise ValueError for an argument about matrices: the class has none, or the optimizer was given before."""
    for name, value in arguments.items():
        if value is not None and isinstance(optimizer, StepsOnShards):
            expected = "None for an optimizer that steps on shards already"
            raise unexpected(name, expected, "a value", "pass it to the first call")
        if value is not None:
            raise unexpected(name, "None", "a value", f"{type(optimizer).__name__} has no matrices")


def _check_class(optimizer: Optimizer, is_known: bool) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, NOT_ELEMENTWISE):
        got = "one whose update of an element depends on others"
        raise unexpected(name, "an elementwise optimizer", got, "use it without step_on_shards")
    if type(optimizer) not in ELEMENTWISE and not is_known:
        do = "pass elementwise=True if each element's update depends on that element alone"
        raise unexpected(name, "an optimizer of torch.optim that is known to be elementwise", "another class", do)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise unexpected(name, "differentiable=False", True, "a step on shards is not recorded by autograd")
    for attribute, value in vars(optimizer).items():
        if isinstance(value, Optimizer):  # whose state would be lost, as its keys are the plain tensors of one step
            do = "give that one to step_on_shards, then to this class"
            raise unexpected(f"{name}.{attribute}", "no optimizer within the optimizer", type(value).__name__, do)
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        do = "call step_on_shards before what replaces it"
        raise unexpected(f"{name}.step", "the method of its class", f"{replaced!r} on the object", do)


class StepsOnShards(Unannounced):
    """Mixin of an optimizer given to :func:`step_on_shards`; it comes before the optimizer's class."""

    _matrices: MatrixStep | None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy is of the class that the user knows, which can be pickled by name.
        reduced: Any = super().__reduce_ex__(protocol)
        return (object.__new__, type(self).__bases__[-1:], *reduced[2:])


@cache
def _on_shards(cls: type) -> type:
    """Return the one subclass of ``cls`` that steps on shards; all state is on instances."""
    # The hooks of the step run outside: one that clips gradients needs DTensors to get the norm over all ranks.
    hooked = cls.step  # type: ignore[attr-defined]
    step = hooked.__wrapped__ if getattr(hooked, "hooked", False) else hooked
    step = _step_matrices if cls in RULES else partial(_step_elements, step)

    @torch.compiler.disable(reason="a step on shards replaces the optimizer's tensors")  # type: ignore[untyped-decorator]
    @wraps(hooked)
    def run(optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        vars(optimizer)["_opt_called"] = True  # for learning rate schedulers
        return step(optimizer, *args, **kwargs)

    hooked_step: Any = Optimizer.profile_hook_step(run)
    hooked_step.hooked = True
    hooked_step._wrapped_by_lr_sched = True
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (*layout_base(cls), StepsOnShards, cls), {"step": hooked_step, **names})


def _step_elements(step: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own step on plain tensors."""

    def on_dtensors(closure: Callable[[], Any]) -> Any:
        shards.close()
        loss = closure()
        shards.enter_context(local_tensors(optimizer))
        return loss

    if args and callable(args[0]):
        args = (partial(on_dtensors, args[0]), *args[1:])
    elif callable(kwargs.get("closure")):
        kwargs["closure"] = partial(on_dtensors, kwargs["closure"])
    with ExitStack() as shards:
        shards.enter_context(local_tensors(optimizer))
        return step(optimizer, *args, **kwargs)


def _step_matrices(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    with torch.no_grad():
        optimizer._matrices.run(optimizer)
    return loss
