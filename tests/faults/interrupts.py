"""Exceptions that a signal handler or a lack of memory raises at any point of the Python code of a step."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint  # where some of its hooks are
from torch.autograd.graph import saved_tensors_hooks

import fsdp_compiled

_FOLDERS = tuple(str(Path(module.__file__).parent) + os.sep for module in (fsdp_compiled, torch))
_PASSES = str(Path(fsdp_compiled.__file__).parents[1] / "passes") + os.sep
# If one of these is interrupted, torch's stack of hooks stays as it was meant for the block, whoever calls it. From
# torch 2.15 on those of checkpoints have their own.
_NOT_UNDONE = {
    vars(kind)[name].__code__
    for kind in (saved_tensors_hooks, *saved_tensors_hooks.__subclasses__())
    for name in ("__enter__", "__exit__")
    if name in vars(kind)
}
# Nor is it where the line ends that holds them: a real signal's handler does not run before ``__exit__`` is called.
_NOT_UNDONE.add(torch.utils.checkpoint._checkpoint_without_reentrant_generator.__code__)


@dataclass
class RaiseAt:
    """Raises ``error`` at the event of this number in code of ours or torch's; 0 only counts them.

    ``lines`` are lines that begin. Otherwise events are the calls of functions and the returns from C, which, but for
    the ends of loops, are all the points where CPython runs a signal handler.
    """

    number: int
    error: Callable[[], BaseException] = KeyboardInterrupt
    lines: bool = True
    count: int = 0
    where: str = ""

    def __enter__(self) -> RaiseAt:
        gc.disable()  # what it finalises would count
        (sys.settrace if self.lines else sys.setprofile)(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        gc.enable()

    def _stop(self) -> None:
        (sys.settrace if self.lines else sys.setprofile)(None)

    def _event(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        is_reached = code.co_filename.startswith((*_FOLDERS, _PASSES)) and code not in _NOT_UNDONE
        if not is_reached or code.co_name == "__del__":  # what a finaliser raises is printed and forgotten
            return None
        if event in ("call", "line" if self.lines else "c_return"):
            self.count += 1
            if self.count == self.number:
                self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
                self._stop()
                raise self.error()
        return self._event
