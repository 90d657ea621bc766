"""How an eager unit learns of its backward: identities around its forward, also under torch.func's transforms."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from ..collectives import backend
from ..expect import unexpected
from ..param.param import FSDPParam
from ..sharding.dtensor import storage_of
from ..sharding.local_types import keeps_types, unchecked
from ..tracing.dynamo import skipped
from .forward import EagerHooks, map_tensors, tensors_in

P = ParamSpec("P")
R = TypeVar("R")

_SCALARS, _CONTAINERS = (int, float, complex, str, type(None)), (tuple, list, dict, set, frozenset)
_WITHOUT_TENSORS, _VALUES = (*_SCALARS, nn.Module, ModuleType), (Tensor, *_SCALARS, *_CONTAINERS)


def in_functorch() -> bool:
    """Tell whether a transform of ``torch.func`` (grad, jvp, vmap, ...) is under way."""
    # Checked on torch 2.11.0, 2.13.0 and 2.15.0, as are _DisableFuncTorch, for nothing public leaves a transform, and
    # is_legacy_batchedtensor below.
    return torch._C._are_functorch_transforms_active()


def outside_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function``, which moves and frees parameters' memory, outside of transforms and type checks."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C._DisableFuncTorch() if in_functorch() else nullcontext(), unchecked():
            return function(*args, **kwargs)

    return run


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` without gradients, also under ``inference_mode``: memory first allocated there never trains.

    Unlike ``torch.no_grad`` it restores the caller's modes in C++, where no signal handler can raise before it has.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C._InferenceMode(False):  # checked on torch 2.11.0, 2.13.0 and 2.15.0
            torch._C._set_grad_enabled(False)
            return function(*args, **kwargs)

    return run


def hook(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a unit's method a hook: outside of transforms, and in the profiler's range ``FSDP::what (unit)``."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with backend.profiled(what, args[0].unit.config.name):  # type: ignore[attr-defined]
                return method(*args, **kwargs)

        return outside_modes(run)

    return decorate


def before_backward(owner: EagerHooks, output: Any) -> Any:
    """Call ``owner.pre_backward`` when the first gradient of a tensor in ``output`` arrives."""
    tensors = tensors_in(output)
    if in_functorch() or any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        return _wrapped(PreBackward, owner, output)
    trained = [each for each in tensors if each.requires_grad]
    given = {each: passed_on for each in trained if (passed_on := _given(owner, each)) is not None}
    computed = [each for each in trained if each not in given]
    if not computed:
        computed = [each for each in _held([output], set()) if each.grad_fn and _given(owner, each) is None]
    if not trained or _holds_objects(output):
        owner.begin_by_gradients()
    for tensor in computed or trained:
        _hook_first(tensor, owner)
        _hook_base(tensor, owner)
    return map_tensors(given.get, output) if given and computed else output


def copy_own(params: Sequence[FSDPParam], output: Any) -> Any:
    """Return the output of a forward, copied where it lies in the memory of a parameter, which goes now."""

    def copied(tensor: Tensor) -> Tensor | None:
        memory = storage_of(tensor if tensor._base is None else tensor._base)
        is_own = memory is not None and any(param.unsharded.holds(memory) for param in params)
        return tensor.clone() if is_own else None

    return map_tensors(copied, output)


def _holds_objects(output: Any) -> bool:
    """Tell whether a forward returned objects with its tensors, which may compute with parameters afterwards."""
    items = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return any(not isinstance(each, _VALUES) for each in items)


def _held(values: Iterable[Any], seen: set[int], depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in ``values`` and in what objects there hold: as pytree knows, or as attributes."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif not isinstance(each, _WITHOUT_TENSORS) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, _CONTAINERS):  # pytree would not end in one that holds itself
                yield from _held(each.values() if isinstance(each, dict) else each, seen, depth)
            elif depth:
                leaves = tree_leaves(each)
                is_unknown = len(leaves) == 1 and leaves[0] is each
                yield from _held(getattr(each, "__dict__", {}).values() if is_unknown else leaves, seen, depth - 1)


def _hook_first(tensor: Tensor, owner: EagerHooks) -> None:
    """Hook a tensor's gradient before hooks of the user's, which may run a backward of the unit's operations."""
    given: Any = tensor._backward_hooks or {}
    if tensor.is_leaf and _is_hooked(tensor, owner):
        return  # a parameter that the unit returns in every forward
    later = [key for key, hook in given.items() if getattr(hook, "__module__", None) != __name__]
    _register(tensor, owner)
    for key in later:
        given[key] = given.pop(key)


def _is_hooked(tensor: Tensor, owner: EagerHooks) -> bool:
    return any(getattr(hook, "owner", None) is owner for hook in (tensor._backward_hooks or {}).values())


def _register(tensor: Tensor, owner: EagerHooks) -> None:
    run: Any = skipped(lambda grad: _begin(owner, grad))
    run.owner = owner
    tensor.register_hook(run)


@skipped
def _begin(owner: EagerHooks, grads: Any) -> Any:
    """Begin the unit's backward by gradients of its output, and return these."""
    owner.pre_backward()
    # create_graph=True: a backward may end here that goes through this one, as by a vector of its gradients
    return after_backward(owner, grads) if torch.is_grad_enabled() else grads


def _hook_base(view: Tensor, owner: EagerHooks) -> None:
    """Hook what a unit computed and returned a view of: after the view is changed in place, gradients go there."""
    base, node = view._base, view.grad_fn
    if base is None or base.grad_fn is None or _is_hooked(base, owner):
        return
    while node is not base.grad_fn:
        if node is None or getattr(node, "owner", None) is owner:
            return  # a view of the unit's input
        node = next((each for each, _ in node.next_functions), None)
    _register(base, owner)


def _given(owner: EagerHooks, tensor: Tensor) -> Tensor | None:
    """Return the input that the unit only passes on as ``tensor``: a model may differentiate by it afterwards.

    None for one with hooks of the user's, to which gradients of its later uses belong, too.
    """
    node: Any = tensor.grad_fn
    is_passed_on = getattr(node, "owner", None) is owner and hasattr(node, "given")
    if not is_passed_on or tensor._backward_hooks or tensor.retains_grad:
        return None
    return node.given[tensor.output_nr]()  # type: ignore[no-any-return]


def after_backward(owner: EagerHooks, inputs: Any) -> Any:
    """Call ``owner.post_backward`` once the gradients of all tensors in ``inputs`` have been computed."""
    return _wrapped(PostBackward, owner, inputs)


def _wrapped(function: type[_Identity], owner: EagerHooks, value: Any) -> Any:
    watched = [tensor for tensor in tensors_in(value) if _is_watched(tensor)]
    if not watched:
        return value
    outputs = iter(function.around(owner, watched))
    return map_tensors(lambda tensor: next(outputs) if _is_watched(tensor) else None, value)


def _is_watched(tensor: Tensor) -> bool:
    """Tell whether gradients may come; within a transform ``requires_grad`` speaks of that transform alone."""
    return tensor.requires_grad or (in_functorch() and (tensor.is_floating_point() or tensor.is_complex()))


class _Identity(torch.autograd.Function):
    in_transforms: type[_Identity]  # the same as torch.func demands it, which torch takes twice as long to call

    @classmethod
    def around(cls, owner: EagerHooks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        function = cls.in_transforms if in_functorch() else cls
        keeps_types(function)
        return function.apply(owner, *tensors)

    @staticmethod
    def forward(ctx: Any, owner: EagerHooks, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.owner = owner
        return inputs

    @staticmethod
    def jvp(ctx: Any, owner: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        # Operations on tangents run before ``PostBackward``, by the order in which autograd recorded everything.
        return tuple(tangent.view_as(tangent) for tangent in tangents)


class PreBackward(_Identity):
    """Identity whose backward runs before that of the operations on which its inputs depend."""

    @staticmethod
    @skipped
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_begin(ctx.owner, grads))

    @staticmethod
    def jvp(ctx: Any, owner: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return PreBackward.around(ctx.owner, tangents)  # a loss may be of the tangents alone


class PostBackward(_Identity):
    """Identity whose backward runs after that of the operations that use its outputs."""

    @staticmethod
    def forward(ctx: Any, owner: EagerHooks, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.given = list(map(weakref.ref, inputs))
        return _Identity.forward(ctx, owner, *inputs)

    @staticmethod
    @skipped
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.owner.unit.ends_late:
            ctx.owner.post_backward()
        if torch.is_grad_enabled():  # create_graph=True: a backward through this one needs the parameters once more
            if any(map(torch._C._functorch.is_legacy_batchedtensor, grads)):  # an identity would cut off their graph
                do = "take one gradient at a time, or use torch.func.jacrev"
                raise unexpected("is_grads_batched", "False with create_graph=True", "True", do, NotImplementedError)
            ctx.owner.unit.note_differentiated()
            grads = PreBackward.around(ctx.owner, grads)
        return (None, *grads)


class _InTransforms(_Identity):
    generate_vmap_rule = True

    @staticmethod
    def forward(owner: EagerHooks, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.owner = inputs[0]


for _each in (PreBackward, PostBackward):
    _each.in_transforms = type(f"{_each.__name__}InTransforms", (_InTransforms, _each), {})
