"""What a user may put in place of the collectives: interfaces, and the operators by which graphs call them.

A graph holds only strings and numbers, so an object that the user gave is found by the name that ``register``
returned. The names count the objects of this process, so that ranks that run one program agree on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# Checked on torch 2.11.0, 2.13.0 and 2.15.0: ties a work to the tensor, so that wait_tensor waits for it.
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions, _register_work
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

from ..errors import FSDPError
from ..passes import ir


class Comm(ABC):
    """A collective with a buffer of its own kind."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of ``size`` for the collective's result."""


class AllGather(Comm):
    """An all-gather; give one to ``FSDPModule.set_custom_all_gather``."""

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather 1-D ``input_tensor`` of every rank into ``output_tensor``, in order of rank.

        Returns:
            The work to wait for, or None if the result is there (or in order on the current stream).
        """


class ReduceScatter(Comm):
    """A reduce-scatter; give one to ``FSDPModule.set_custom_reduce_scatter``."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce 1-D ``input_tensor`` over the ranks and leave this rank's part in ``output_tensor``.

        Returns:
            The work to wait for, or None if the result is there (or in order on the current stream).
        """


class Hook:
    """A function on a reduced row, as an object that can be referred to weakly.

    Args:
        run: the function.
        stream: what it is to run on; None for the stream that the reduction ends on.
    """

    def __init__(self, run: Callable[[Tensor], None], stream: torch.Stream | None = None) -> None:
        self._run = run
        self._stream = stream

    def __call__(self, row: Tensor) -> None:
        """Run the function between what came before and what comes after."""
        if self._stream is None:
            self._run(row)
            return
        around = torch.accelerator.current_stream(row.device)
        self._stream.wait_stream(around)
        with self._stream:
            self._run(row)
        around.wait_stream(self._stream)


_objects: WeakValueDictionary[str, Comm | Hook] = WeakValueDictionary()
_numbers = count()


def register(value: Comm | Hook) -> str:
    """Return the name by which operators find ``value`` as long as the caller keeps it; always the same one."""
    for name, known in _objects.items():
        if known is value:
            return name
    name = str(next(_numbers))
    _objects[name] = value
    return name


def _find(name: str, kind: type) -> Any:
    found = _objects.get(name)
    if not isinstance(found, kind):
        raise FSDPError(f"custom communication {name!r}: expected {kind.__name__}, found {found!r}; compile again")
    return found


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name."""
    return _resolve_process_group(GroupName(name))


_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def all_gather(row: Tensor, world: int, group: str, comm: str) -> Tensor:
    """Start the user's all-gather ``comm`` of a 1-D row and return its result, to be waited for."""
    out = gather_output(world * row.numel(), row.dtype, row.device, comm)
    return all_gather_into(out, row.contiguous(), group, comm)


def gather_output(numel: int, dtype: torch.dtype, device: torch.device, comm: str) -> Tensor:
    """Return a buffer of ``comm``'s own kind for an all-gather."""
    gather: AllGather = _find(comm, AllGather)
    return gather.allocate([numel], dtype=dtype, device=device)


def all_gather_into_tensor(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the process group's own all-gather of 1-D ``input``, perhaps a part of ``output``."""
    options = AllgatherOptions()
    options.asyncOp = True
    # Checked on torch 2.11.0, which has the second name only, 2.13.0 and 2.15.0.
    start = getattr(group, "all_gather_single", None) or group._allgather_base
    return start(output, input, options)


def all_gather_into_tensors(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Start the process group's own all-gathers of several 1-D tensors, in one launch."""
    options = AllgatherOptions()
    options.asyncOp = True
    start = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced  # see above
    return start(list(outputs), list(inputs), options)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType
) -> dist.Work:
    """Start the process group's own reduce-scatter of 1-D ``input``."""
    options = ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]
    options.asyncOp = True
    start = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base  # see above
    return start(output, input, options)


def all_gather_into(out: Tensor, row: Tensor, group: str, comm: str) -> Tensor:
    """Start the user's all-gather of ``row``, perhaps a part of ``out``, and return ``out``, to be waited for."""
    return _started(out, _find(comm, AllGather)(out, row, process_group(group), async_op=True))


def reduce_scatter(rows: Tensor, op: str, world: int, group: str, comm: str) -> Tensor:
    """Start the user's reduce-scatter ``comm`` of 1-D rows and return its result, to be waited for."""
    reduce: ReduceScatter = _find(comm, ReduceScatter)
    out = reduce.allocate([rows.numel() // world], dtype=rows.dtype, device=rows.device)
    return _started(out, reduce(out, rows.contiguous(), process_group(group), _OPS[op], async_op=True))


def _started(out: Tensor, work: dist.Work | None) -> Tensor:
    if work is not None:
        register_work(out, work)
    return out


def register_work(out: Tensor, work: dist.Work) -> None:
    """Let ``_c10d_functional.wait_tensor(out)`` wait for ``work``."""
    _register_work(out, work)


def reduce_hook(row: Tensor, hook: str) -> Tensor:
    """Return a copy of a reduced row that the user's hook has seen, and perhaps changed."""
    out = row.clone()
    _find(hook, Hook)(out)
    return out


_library = torch.library.Library(ir.NAMESPACE, "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator of ours."""
    # What these do, waiting for other streams and asking the host, a CUDA graph cannot hold.
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    name = schema.split("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{ir.NAMESPACE}::{name}", fake, lib=_library)


def differentiate(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Give an operator of ours its autograd formula."""
    torch.library.register_autograd(f"{ir.NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)


define(ir.CUSTOM_ALL_GATHER_SCHEMA, all_gather, lambda row, world, *_: row.new_empty(world * row.numel()))
define(
    ir.CUSTOM_REDUCE_SCATTER_SCHEMA, reduce_scatter, lambda rows, _, world, *__: rows.new_empty(rows.numel() // world)
)
define(ir.REDUCE_HOOK_SCHEMA, reduce_hook, lambda row, _: torch.empty_like(row))
