"""Comparing a sharded model with a replicated one, and running one test under many configurations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class HasSubTest(Protocol):
    """What ``run_subtests`` asks of a ``unittest.TestCase``."""

    def subTest(self, msg: Any = ..., **params: Any) -> AbstractContextManager[None]:
        """Mark what runs inside as one configuration."""


def check_sharded_parity(
    cls: object,
    replicated_module: nn.Module,
    sharded_module: nn.Module,
    prefixes_to_ignore: tuple[str, ...] = (),
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Assert that a sharded model has the parameters and gradients of a replicated one. All ranks must call it.

    It gathers every parameter, so that any placement can be compared.

    Args:
        cls: the calling test case; not used, and None will do.
        replicated_module: whose parameters are plain tensors, equal on every rank.
        sharded_module: whose parameters are all DTensors.
        prefixes_to_ignore: parts to drop from the sharded model's parameter names.
        rtol: relative tolerance; by default torch's for the dtype, as for ``atol``.
        atol: absolute tolerance.

    Raises:
        AssertionError: names differ, a parameter is no DTensor, or values differ; it names the parameter.
    """
    sharded = {_without(name, prefixes_to_ignore): param for name, param in sharded_module.named_parameters()}
    replicated = dict(replicated_module.named_parameters())
    if list(sharded) != list(replicated):
        raise AssertionError(f"expected parameters {list(replicated)}, got {list(sharded)}")
    for name, want in replicated.items():
        got = sharded[name]
        if not isinstance(got, DTensor):
            raise AssertionError(f"{name}: expected a DTensor, got {type(got).__name__}; is the module sharded?")
        _assert_close(name, got, want.detach(), rtol, atol)
        if (got.grad is None) != (want.grad is None):
            raise AssertionError(f"{name}.grad: expected {_what(want.grad)}, got {_what(got.grad)}")
        if got.grad is not None and want.grad is not None:
            _assert_close(f"{name}.grad", got.grad, want.grad, rtol, atol)


def _without(name: str, prefixes: Sequence[str]) -> str:
    for prefix in prefixes:
        name = name.replace(prefix, "")
    return name


def _what(grad: Tensor | None) -> str:
    return "None" if grad is None else "a gradient"


def _assert_close(name: str, got: Tensor, want: Tensor, rtol: float | None, atol: float | None) -> None:
    torch.testing.assert_close(_full(got), want, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_full_params(model: nn.Module, recurse: bool = True) -> list[Tensor]:
    """Return copies of the model's whole parameters, in order. All ranks must call it.

    Args:
        model: whose parameters may be DTensors or plain.
        recurse: False for the parameters of ``model`` itself without its submodules.
    """
    return [_full(param).clone() for param in model.parameters(recurse)]


def reduce_scatter_with_assert(
    cls: object,
    orig_reduce_scatter: Callable[..., Any],
    assert_fn: Callable[[Tensor], None],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run a reduce-scatter, wait for it and check its output: bind the first three arguments and patch it in.

    Args:
        cls: the calling test case; not used, and None will do.
        orig_reduce_scatter: what :func:`patch_reduce_scatter` replaces.
        assert_fn: called with this rank's part of the sum or mean, 1-D in the reduce dtype.
        args: of the collective, its output first, as are ``kwargs``.
    """
    orig_reduce_scatter(*args, **kwargs).wait()
    assert_fn(args[0])


def run_subtests(
    cls_inst: HasSubTest,
    subtest_config: Mapping[str, Sequence[Any]],
    test_fn: Callable[..., Any],
    *test_args: Any,
    **test_kwargs: Any,
) -> None:
    """Run ``test_fn`` once for every combination of values.

    Compiled code is dropped before each, and the ranks wait for each other after each. A failure ends the run,
    unless the test case goes on after a failed ``subTest``, and carries its configuration as a note.

    Args:
        cls_inst: the test case.
        subtest_config: keyword argument of ``test_fn`` to its possible values.
        test_fn: the test.
        test_args: given to it each time, as are ``test_kwargs``.
    """
    for values in itertools.product(*subtest_config.values()):
        config = dict(zip(subtest_config, values, strict=True))
        with cls_inst.subTest(**config):
            torch.compiler.reset()
            try:
                test_fn(*test_args, **test_kwargs, **config)
            except Exception as error:
                error.add_note(f"subtest: {config}")
                raise
        if dist.is_initialized():
            dist.barrier()


def subtest_name(test_name_mapping: Mapping[str, str], *args: Any) -> str:
    """Join the names of a parametrized test's arguments: ``subtest_name({"True": "on"}, True, None) == "on_none"``.

    Raises:
        KeyError: the mapping lacks ``str(arg)``.
    """
    return "_".join("none" if arg is None else test_name_mapping[str(arg)] for arg in args)


class DummyProcessGroup:
    """A rank and a size without communication, for code that asks no more; its all-reduce returns at once."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """Return the rank it was made with."""
        return self._rank

    def size(self) -> int:
        """Return the size it was made with."""
        return self._size

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        """Return a work that is done; its future holds 1. No tensor is changed."""
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(1)
        return SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True, get_future=lambda: future)
