"""Keeps a sharded model's parameters unsharded over many calls, for generation and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .expect import expect, unexpected
from .hooks.state import FSDPState, states_of
from .hooks.step import TrainingState
from .param.param import FSDPParam


class unsharded(ContextDecorator, AbstractContextManager[None]):
    """Keep parameters all-gathered within the block, in which nothing may train.

    Calls of the model in it, uncompiled or compiled, communicate nothing, so that ranks may stop at different
    lengths: Hugging Face's ``generate`` needs no ``synced_gpus``. Gradients are off. Afterwards, also after an
    exception, parameters are sharded. Enter it on all ranks. The model's state dicts are taken and loaded inside as
    outside; the next call, on all ranks, all-gathers again. Take and load those of optimizers outside.

    Args:
        model: a module with units.
        max_bytes: of unsharded parameters; units that do not fit are all-gathered at every call, so that ranks must
            make the same calls. None keeps all.

    Raises:
        TypeError: ``model`` is no module, or ``max_bytes`` no integer.
        ValueError: no unit lies in ``model``, or ``max_bytes`` is negative.
        RuntimeError: a forward, a backward or another such block has not ended; inside, a forward with gradients, an
            optimizer's step or ``set_reshard_after_forward``; at the end, an unsharded parameter was written to,
            which is lost.
    """

    def __init__(self, model: nn.Module, *, max_bytes: int | None = None) -> None:
        self._model, self._max_bytes = model, max_bytes

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __enter__(self) -> None:
        kept = _unsharded(self._model, self._max_bytes)
        kept.__enter__()
        self._kept = kept

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __exit__(self, *error: Any) -> bool | None:
        return self._kept.__exit__(*error)


@contextmanager
def _unsharded(model: nn.Module, max_bytes: int | None) -> Iterator[None]:
    states = states_of(model)
    expect("max_bytes", max_bytes, int | None, "an integer or None")
    if max_bytes is not None and max_bytes < 0:
        raise unexpected("max_bytes", "0 or more", max_bytes)
    for state in states:
        if not state.unit.config.trains or state.unit.training_state is not TrainingState.IDLE:
            where = "another such block" if not state.unit.config.trains else "forward or backward"
            got = f"one in {where} of {state.unit.config.name}"
            raise unexpected("unsharded", "a model between two steps", got, error=RuntimeError)
    kept = _that_fit(states, max_bytes)
    before = [state.unit.config for state in kept]
    kept_config = dict.fromkeys(("reshard_after_forward", "reshards_by_default", "trains"), False)
    kept_config["has_hooks"] = len(kept) < len(states)
    try:
        for state in kept:
            state.unit.configure(**kept_config)
        _unshard(kept)
        versions = _versions(kept)
        with _refuse_steps(kept), torch.no_grad():
            yield
        for param, version in _versions(kept).items():
            if version != versions.get(param, version):
                where, expected = f"{param.name} in unsharded()", "parameters that stay as they are"
                got, do = "a change of the unsharded one, which is lost", "change it outside the block"
                raise unexpected(where, expected, got, do, RuntimeError)
    finally:
        for state, config in zip(kept, before, strict=True):
            state.reshard()
            state.unit.configure(**{name: getattr(config, name) for name in kept_config})


def _that_fit(states: Sequence[FSDPState], max_bytes: int | None) -> list[FSDPState]:
    """Return the units whose unsharded parameters take so many bytes, in order."""
    if max_bytes is None:
        return list(states)
    kept, left = list[FSDPState](), max_bytes
    for state in states:
        needed = sum(param.spec.all_gather_bytes for param in state.params)
        if needed <= left:
            kept.append(state)
            left -= needed
    return kept


def _unshard(states: Sequence[FSDPState]) -> None:
    """All-gather units one after the other, the next one while the last one is unpacked."""
    for group in (group for state in states for group in state.groups):
        group.drop_stale()
    for state, following in zip_longest(states, states[1:]):
        state.launch_unshard()
        if following is not None:
            following.launch_unshard()
        state.wait_unshard()
        state.unit.hold(True)  # what traces reads them too, and no unit that shares some frees them


def _versions(states: Sequence[FSDPState]) -> dict[FSDPParam, int]:
    """Return how often each unsharded parameter was written to, where autograd counts that."""
    params = (param for state in states for param in state.params)
    return {param: version for param in params if (version := param.unsharded.version) is not None}


def _refuse_steps(states: Sequence[FSDPState]) -> RemovableHandle:
    """Refuse optimizers' steps of these units' parameters, unseen by calls, until the handle is removed."""
    names = {id(param.sharded_param): param.name for state in states for param in state.params}

    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = (id(param) for group in optimizer.param_groups for param in group["params"])
        if name := next((names[each] for each in held if each in names), None):
            expected, got = "no optimizer's step", f"one of {type(optimizer).__name__}"
            raise unexpected(f"{name} in unsharded()", expected, got, "leave the block to train", RuntimeError)

    return register_optimizer_step_pre_hook(refuse)
