"""Base classes of tests that run on several ranks, for ``unittest`` and for pytest."""

from __future__ import annotations

import functools
import importlib
import os
import unittest
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .parity import run_subtests
from .processes import RankProcesses, Setting
from .threads import run_on_threads

CALLER = -1  # the rank of an instance that only waits for the ranks
_NUMBER = (int, float, complex)  # and bool, which is an int


class RankTestCase(unittest.TestCase):
    """A test case each of whose tests runs on ``world_size`` ranks, and fails or is skipped where any rank's does.

    ``setUp`` and ``tearDown`` run once, beside the ranks; ``perThreadSetUp`` and ``perThreadTearDown`` run on each
    rank, where the default process group is ready. A test has no state but what its rank's instance gets there.
    """

    rank = CALLER
    test_timeout_s = 300.0

    def __init__(self, methodName: str = "runTest") -> None:
        super().__init__(methodName)
        method = getattr(self, methodName, None)
        if method is not None:
            setattr(self, methodName, self._waiting_for_ranks(method))

    def _waiting_for_ranks(self, method: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(method)  # which keeps the marks of skips and expected failures
        def run() -> None:
            cls = type(self)
            body = functools.partial(_run_test, cls.__module__, cls.__qualname__, self._testMethodName)
            self._run_on_ranks(body)

        return run

    @abstractmethod
    def _run_on_ranks(self, body: Callable[[int], None]) -> None: ...

    @property
    def world_size(self) -> int:
        """Number of ranks; override it."""
        return 2

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The default process group; on a rank only."""
        group = dist.group.WORLD
        assert group is not None
        return group

    def perThreadSetUp(self) -> None:
        """Prepare one rank."""

    def perThreadTearDown(self) -> None:
        """Clean up after one rank."""

    def run_subtests(
        self, subtest_config: Mapping[str, Sequence[Any]], test_fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Run ``test_fn`` under every combination of values, see :func:`fsdp_compiled.testing.run_subtests`."""
        run_subtests(self, subtest_config, test_fn, *args, **kwargs)

    def assertEqual(
        self,
        first: Any,
        second: Any,
        msg: Any = None,
        *,
        rtol: float | None = None,
        atol: float | None = None,
        equal_nan: bool = True,
        exact_dtype: bool = True,
        exact_device: bool = False,
    ) -> None:
        """Compare as unittest does, but tensors, also within mappings, lists and tuples, as ``torch.testing`` does.

        Lists and tuples are interchangeable where there are tensors.

        Args:
            first: the value found. A tensor may be compared with a number, a list or tuple of numbers, or an array;
                dtypes and devices may differ then.
            second: what is expected.
            msg: added to the message about the difference.
            rtol: relative tolerance of tensors and of numbers; by default torch's for the dtype, as for ``atol``.
            atol: absolute tolerance.
            equal_nan: whether NaN equals NaN.
            exact_dtype: whether two tensors must have the same dtype.
            exact_device: whether two tensors must be on the same device.
        """
        if rtol is None and atol is None and not _has_tensor(first) and not _has_tensor(second):
            super().assertEqual(first, second, msg)
            return
        for one, other in _pairs(self, first, second, msg):
            are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
            left, right = _comparable(one, other), _comparable(other, one)
            if not _is_numeric(left) or not _is_numeric(right):
                super().assertEqual(left, right, msg)
                continue
            torch.testing.assert_close(
                left,
                right,
                rtol=rtol,
                atol=atol,
                equal_nan=equal_nan,
                check_dtype=are_tensors and exact_dtype,
                check_device=are_tensors and exact_device,
                msg=None if msg is None else lambda text: f"{text}\n{msg}",
            )

    def assertNotEqual(self, first: Any, second: Any, msg: Any = None, **how: Any) -> None:
        """Require that :meth:`assertEqual` fails; ``how`` is what it takes by name."""
        try:
            self.assertEqual(first, second, **how)
        except AssertionError:
            return
        self.fail(self._formatMessage(msg, f"{first!r} == {second!r}"))

    def assertExpectedInline(self, actual: str, expect: str, skip: int = 0) -> None:
        """Compare with a text in the test as package ``expecttest`` does; rank 0 accepts a new one if asked for."""
        from expecttest import assert_expected_inline

        if self.rank in (CALLER, 0):
            assert_expected_inline(actual, expect, skip=skip + 1)
        elif not os.environ.get("EXPECTTEST_ACCEPT"):
            self.assertEqual(actual, expect)


class FSDPTest(RankTestCase):
    """Tests whose ranks are processes; they start with the first test of the class and end with the class.

    The class must be importable, as it is in a test module or script. Each test gets a new process group, compiled
    code is dropped before it, and torch's generator is seeded with 0 on every rank.
    """

    backend = "gloo"
    device_type = "cpu"  # on another type, with a backend to match, each rank takes the device of its number
    group_timeout = timedelta(seconds=60)
    _processes: RankProcesses | None = None

    def processes(self) -> RankProcesses:
        """Return the processes to use, at least ``world_size``; override it to share them among classes."""
        cls = type(self)
        current = cls.__dict__.get("_processes")
        if current is None or not current.alive or current.world < self.world_size:
            if current is None:
                cls.addClassCleanup(cls._end_processes)
            else:
                current.close()
            current = cls._processes = RankProcesses(self.world_size)
        return current

    @classmethod
    def _end_processes(cls) -> None:
        if cls._processes is not None:
            cls._processes.close()
        cls._processes = None

    def _run_on_ranks(self, body: Callable[[int], None]) -> None:
        setting = Setting(self.backend, self.device_type, self.group_timeout, self.test_timeout_s)
        self.processes().run(self.world_size, body, setting)


class FSDPTestMultiThread(RankTestCase):
    """Tests whose ranks are threads of this process: they start at once, but cannot compile.

    All threads share torch's generator: make equal parameters under :func:`fsdp_compiled.testing.seeded`. Any other
    state of the process is shared too. Ranks that differ do not raise RankMismatchError: only processes are compared.
    """

    test_timeout_s = 60.0

    def _run_on_ranks(self, body: Callable[[int], None]) -> None:
        run_on_threads(self.world_size, body, self.test_timeout_s)


def _run_test(module: str, qualname: str, name: str, rank: int) -> None:
    """Run one rank's part of a test; a class inside a function cannot be found."""
    cls: Any = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    case = cls(name)
    case.rank = rank
    with ExitStack() as cleanups:
        case.addCleanup = cleanups.callback  # unittest's own needs a result to report errors to
        case.perThreadSetUp()
        try:
            getattr(cls, name)(case)
        finally:
            case.perThreadTearDown()


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


def _pairs(case: unittest.TestCase, first: Any, second: Any, msg: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what two nested values have at one place; mappings must have equal keys, lists and tuples one length."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        unittest.TestCase.assertEqual(case, set(first), set(second), msg)
        for key in first:
            yield from _pairs(case, first[key], second[key], msg)
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        unittest.TestCase.assertEqual(case, len(first), len(second), msg)
        for one, other in zip(first, second, strict=True):
            yield from _pairs(case, one, other, msg)
    else:
        yield first, second


def _comparable(value: Any, other: Any) -> Any:
    """Return ``value`` as it compares with a tensor ``other``: numbers as a tensor, a tensor of one number as it."""
    if isinstance(value, Tensor):
        return value.reshape(()) if value.numel() == 1 and isinstance(other, _NUMBER) else value
    has_numbers = isinstance(value, (*_NUMBER, list, tuple)) or hasattr(value, "__array__")
    if not isinstance(other, Tensor) or not has_numbers:
        return value
    dtype = torch.promote_types(torch.as_tensor(value).dtype, other.dtype)
    return torch.as_tensor(value, dtype=dtype)


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (Tensor, *_NUMBER)) and not isinstance(value, bool)
